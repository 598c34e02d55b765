"""What every transport does for the two ends, and what they do for it."""

from __future__ import annotations

import hashlib
from typing import Protocol

from dfm_async.exchange.messages import Chunk, Message

__all__ = ["Pipe", "Receiver", "stamp_of"]


class Receiver(Protocol):
    """Takes what comes out of a pipe. All methods are called on the loop, and must not raise."""

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """Where the bytes behind a chunk shall go; None if nobody wants them."""
        ...

    def received(self, message: Message, size: int) -> None:
        """A message has come, with so many bytes behind it, which are where :meth:`room` said; 0 if it wanted none."""
        ...

    def lost(self, reason: str) -> None:
        """Nothing will come any more. Called once."""
        ...


class Pipe(Protocol):
    """One end of a connection: messages come in order, and none twice."""

    can_resend: bool
    """Whether a message that was sent can have been lost, so that it makes sense to send it again."""
    shows_progress: bool
    """Whether large parts are transferred in chunks, by pulling; else they are inside the messages."""

    has_metrics: bool
    """Whether metrics can be sent."""
    silence: float
    """How long the other side accepts that nothing is said, in seconds, as far as it has told; 0 means for ever."""

    def open(self, receiver: Receiver) -> None:
        """Names who takes what comes. What came before is handed over at once."""
        ...

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queues a message, with the bytes of a chunk behind it. Ignored when the pipe is lost."""
        ...

    async def drain(self) -> None:
        """Waits until there is room for more."""
        ...

    def close(self) -> None:
        """Sends what is queued, and ends the connection."""
        ...

    def abort(self) -> None:
        """Ends the connection at once; what is queued is dropped."""
        ...

    async def wait_closed(self) -> None:
        """Waits until the connection has ended."""
        ...


def stamp_of(session: str, token: str) -> int:
    """The number that every frame of one launch carries, so that frames of another are not taken for its own."""
    found = hashlib.blake2b(f"{session}\0{token}".encode(), digest_size=8).digest()
    return int.from_bytes(found, "little")
