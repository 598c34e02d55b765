"""The messages between the two ends. A message has a body, and a chunk also has bytes behind it."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

VERSION: Final = 2
"""The version of the protocol; both ends must have the same."""


class _ProgramMessage(msgspec.Struct, array_like=True, frozen=True):
    pass


class Hello(_ProgramMessage, frozen=True, tag=1):
    """From a program: the first message."""

    version: int
    token: str
    session: str
    pid: int
    silence: float = 0.0
    """How long the program accepts that the site sends nothing, in seconds; 0 means for ever."""

    def __repr__(self) -> str:
        # The token must not end up in logs.
        return f"Hello(version={self.version}, session={self.session!r}, pid={self.pid})"


class Welcome(_ProgramMessage, frozen=True, tag=2):
    """From the site: the program is up."""

    site: str
    job: str
    silence: float = 0.0
    """How long the site accepts that the program sends nothing, in seconds; 0 means for ever."""


class Refused(_ProgramMessage, frozen=True, tag=3):
    """From the site, before it closes the connection."""

    reason: str


class Beat(_ProgramMessage, frozen=True, tag=4):
    """A heartbeat, if there is nothing else to send."""


class TaskOffer(_ProgramMessage, frozen=True, kw_only=True, tag=5):
    """A task. Its large parts are pulled by the program."""

    task: str
    name: str
    data: bytes
    parts: list[tuple[int, int]]
    round: int | None = None
    total_rounds: int | None = None
    receivers: list[str] = []
    """Who will pull the large parts of the result."""


class TaskAnswer(_ProgramMessage, frozen=True, tag=6):
    """The program has the task with all its parts, or does not take it."""

    task: str
    accepted: bool
    reason: str = ""


class ResultOffer(_ProgramMessage, frozen=True, tag=7):
    """A result. Its large parts are pulled by the receivers."""

    task: str
    result: str
    rc: str
    data: bytes
    """Empty if there is nothing to send, not even None."""
    parts: list[tuple[int, int]]
    reason: str = ""


class ResultAnswer(_ProgramMessage, frozen=True, tag=8):
    """The site has this message, or does not want the result."""

    task: str
    result: str
    accepted: bool
    reason: str = ""


class TransferReport(_ProgramMessage, frozen=True, kw_only=True, tag=9):
    """How far a receiver is with a transfer, and how far the sender may go on."""

    tx: str
    transfer: int
    receiver: str
    sequence: int
    bytes_done: int
    state: str = "active"
    limit: int = 0
    """Up to where the sender may send."""
    restart: bool = False
    """Whether the sender must go back to ``bytes_done``: what came after it was damaged, lost or dropped."""


class Chunk(_ProgramMessage, frozen=True, tag=10):
    """A piece of a transfer. Its bytes follow behind the message."""

    tx: str
    transfer: int
    receiver: str
    offset: int
    checksum: int | None = None
    """Of the bytes, where the transport can damage them."""


class Settled(_ProgramMessage, frozen=True, tag=11):
    """All receivers are done with a result: ``finished``, or why not."""

    tx: str
    status: str
    reason: str = ""


class ProgramMetrics(_ProgramMessage, frozen=True, tag=12):
    """Something that the program measured."""

    number: int
    data: bytes
    step: int | None = None


class MetricTaken(_ProgramMessage, frozen=True, tag=13):
    """All metrics up to this number have been taken."""

    number: int


class ProgramProgress(_ProgramMessage, frozen=True, tag=14):
    """How far the program is with its task."""

    done: float
    total: float | None = None
    note: str = ""


class EndOfTasks(_ProgramMessage, frozen=True, tag=15):
    """Nothing new will come: finish what is queued, then stop."""

    reason: str = ""


class Abort(_ProgramMessage, frozen=True, tag=16):
    """Stop now."""

    reason: str = ""


class Withdrawn(_ProgramMessage, frozen=True, tag=17):
    """From the side that offered large parts: they cannot be pulled any longer."""

    tx: str
    reason: str = ""


Message: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Beat
    | TaskOffer
    | TaskAnswer
    | ResultOffer
    | ResultAnswer
    | TransferReport
    | Chunk
    | Settled
    | ProgramMetrics
    | MetricTaken
    | ProgramProgress
    | EndOfTasks
    | Abort
    | Withdrawn
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Turn a message into bytes."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        # Texts about errors may hold parts of file names that are not text. They must arrive all the same.
        texts = {name: getattr(message, name, None) for name in ("reason", "note")}
        plain = {name: text.encode(errors="replace").decode() for name, text in texts.items() if text}
        return _encoder.encode(msgspec.structs.replace(message, **plain))


def decode(data: bytes | memoryview) -> Message:
    """Rebuild a message.

    Raises:
        ValueError: the bytes are not a message.
    """
    return _decoder.decode(data)
