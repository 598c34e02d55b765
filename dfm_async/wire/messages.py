"""What the application and the sites say to each other.

Every message of a job carries the job's number, which is never used twice, and the index of the location that it is
for (or, to the application, comes from). What belongs to no job that is known is ignored.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.model.error_record import ErrorRecord
from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.telemetry.spans import Origin
from dfm_async.wire.memory import Block, Payload

__all__ = [
    "BATCH_BYTES",
    "CARRIERS",
    "AbandonJob",
    "Announce",
    "CallsAbandoned",
    "CallsMade",
    "CancelJob",
    "CancelSeen",
    "Credit",
    "ElementDone",
    "FramesDone",
    "Hello",
    "JobBroken",
    "JobStopped",
    "LoopEnded",
    "Memory",
    "Message",
    "MetricsMade",
    "ObjectsBuilt",
    "ObjectsClosed",
    "OpenFrames",
    "OperationError",
    "PlaceTaken",
    "ProgressMade",
    "Refused",
    "Release",
    "Results",
    "SendNet",
    "SendToPlace",
    "SpansMade",
    "SpansTaken",
    "StartJob",
    "StreamClose",
    "StreamItems",
    "StreamPull",
    "Tokens",
    "Withdraw",
    "YieldFailed",
    "decoder",
    "encoder",
]


BATCH_BYTES: Final = 1024 * 1024
"""Large values are put into one message up to this size; a larger value makes a message of its own. So no message is
much larger than the largest value in it, and a limit for messages is one for values."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# From the application to a site.


class SendNet(_Message, frozen=True, tag=1):
    """The net of one location of a plan; sent once per worker."""

    plan: str
    at: int
    net: bytes


class StartJob(_Message, frozen=True, tag=2):
    """A job begins, with its first parameter sets as in :class:`OpenFrames`. ``routes``: each location's address.

    ``stored``: its results are written down, so they must not need pickle. ``watch``: its calls are counted. ``trace``:
    the trace that it belongs to, the id of the location's span, and which run of the job this is; None if it is not
    traced. ``measure``: its spans tell the sizes of what operations take and return. ``priority``: whose calls get a
    free thread first.
    """

    job: int
    at: int
    job_id: str
    plan: str
    routes: tuple[str, ...]
    window: int
    window_bytes: int
    first: int
    count: int
    payload: bytes | Payload
    last: bool
    stored: bool = False
    watch: bool = False
    trace: tuple[str, int, int] | None = None
    origin: Origin | None = None
    measure: bool = False
    priority: int = 0


class OpenFrames(_Message, frozen=True, tag=3):
    """Parameter sets ``first, first + 1, ...``. ``payload``: a batch of lists; empty if no parameter is used here."""

    job: int
    at: int
    first: int
    count: int
    payload: bytes | Payload
    last: bool
    origin: Origin | None = None


class Credit(_Message, frozen=True, tag=4):
    """The site may send that many further results."""

    job: int
    at: int
    items: int
    bytes: int


class CancelJob(_Message, frozen=True, tag=5):
    """Stop everything of a job; answered by :class:`JobStopped`."""

    job: int
    at: int


class AbandonJob(_Message, frozen=True, tag=9):
    """A job that was cancelled has not stopped: do not wait any more for its calls that do not return."""

    job: int
    at: int


class PlaceTaken(_Message, frozen=True, tag=6):
    """Answers :class:`SendToPlace`: the other job has taken the token, or why not."""

    job: int
    at: int
    request: int
    error: str


class Announce(_Message, frozen=True, tag=7):
    """A job will begin here with this net, which was sent before, or will not (:class:`Withdraw`).

    What other sites send for it may come before it begins, and is kept. ``operations``: those that it may call.
    """

    job: int
    at: int
    plan: str
    operations: list[str]


class Withdraw(_Message, frozen=True, tag=8):
    """A job that was announced does not begin."""

    job: int
    at: int


class SpansTaken(_Message, frozen=True, tag=41):
    """Answers :class:`SpansMade`: the application has taken so many spans."""

    job: int
    at: int
    count: int


# Between sites.


class Tokens(_Message, frozen=True, tag=10):
    """Tokens for places. ``heads``: place, frame, state (an index into ``_STATES`` of the runtime)."""

    job: int
    at: int
    heads: list[tuple[int, Frame, int]]
    payload: bytes | Payload
    origin: Origin | None = None


class LoopEnded(_Message, frozen=True, tag=11):
    """How many elements a loop had. ``state``: 0 it ended, 1 it was skipped, 2 it failed."""

    job: int
    at: int
    loop: int
    frame: Frame
    total: int
    state: int
    error: ErrorRecord | None


class ElementDone(_Message, frozen=True, tag=12):
    """A location is done with elements of a loop."""

    job: int
    at: int
    loop: int
    frames: list[Frame]


class StreamPull(_Message, frozen=True, tag=13):
    """Send up to ``count`` further elements of a stream to ``reader``, as long as it has taken fewer than ``bytes``."""

    job: int
    at: int
    stream: int
    reader: int
    count: int
    bytes: int


class StreamItems(_Message, frozen=True, tag=14):
    """Elements of a stream; ``ended`` says that there are no more."""

    job: int
    at: int
    stream: int
    source: int
    payload: bytes | Payload
    ended: bool
    error: ErrorRecord | None
    origin: Origin | None = None


class StreamClose(_Message, frozen=True, tag=15):
    """A location is done with a stream; ``read``: a reader there had begun."""

    job: int
    at: int
    stream: int
    read: bool = True


# From a site to the application.


class Hello(_Message, frozen=True, tag=20):
    """The worker is ready; its peers reach it at ``address``."""

    pid: int
    address: str


class Refused(_Message, frozen=True, tag=21):
    """The worker cannot start: its operations cannot be loaded."""

    reason: str
    traceback: str


class Results(_Message, frozen=True, tag=22):
    """Yielded values. ``runs``: yield point, frame, first index or -1, count; ``payload``: a batch of all values.

    ``frames``: the parameter sets that are done with them, as in :class:`FramesDone`.
    """

    job: int
    at: int
    runs: list[tuple[int, Frame, int, int]]
    payload: bytes | Payload
    frames: list[int]
    origin: Origin | None = None


class OperationError(_Message, frozen=True, tag=23):
    """An error happened."""

    job: int
    at: int
    error: ErrorRecord


class YieldFailed(_Message, frozen=True, tag=24):
    """A yield will not come, because of an error that was reported before."""

    job: int
    at: int
    point: int
    frame: Frame
    error: str


class FramesDone(_Message, frozen=True, tag=25):
    """The location is done with these parameter sets; all their results were sent before."""

    job: int
    at: int
    frames: list[int]


class JobStopped(_Message, frozen=True, tag=26):
    """Nothing of the job runs here any more. ``seconds``: how long that took."""

    job: int
    at: int
    seconds: float = 0.0


class CallsAbandoned(_Message, frozen=True, tag=42):
    """Calls have exceeded their deadline, or belong to a job that was cancelled, and keep threads of the worker.

    ``count``: how many there are. ``exhausted``: they are so many that the worker cannot go on. ``text``: which call
    this is about.
    """

    count: int
    exhausted: bool
    text: str


class JobBroken(_Message, frozen=True, tag=27):
    """The job cannot go on here, because something went wrong that is no operation's fault."""

    job: int
    at: int
    error: ErrorRecord


class CancelSeen(_Message, frozen=True, tag=28):
    """The location has seen the cancellation, and waits for operations to end.

    ``waiting``: how many of its calls were waiting for a thread.
    """

    job: int
    at: int
    waiting: int = 0


class ProgressMade(_Message, frozen=True, tag=29):
    """How far calls are. ``reports``: node, frame, done, total, note."""

    job: int
    at: int
    reports: list[tuple[str, Frame, float, float | None, str]]


class SendToPlace(_Message, frozen=True, tag=30):
    """A token for a parameter of another job; answered by :class:`PlaceTaken`.

    Tokens with the same key make one parameter set.
    """

    job: int
    at: int
    request: int
    target: str
    place: str
    key: str
    payload: bytes


class MetricsMade(_Message, frozen=True, tag=33):
    """Metrics of calls, in the order they were reported. ``reports``: node, frame, values, step."""

    job: int
    at: int
    reports: list[tuple[str, Frame, dict[str, Scalar], int | None]]


class ObjectsBuilt(_Message, frozen=True, tag=34):
    """The location has objects that live as long as the job: it has ended there with :class:`ObjectsClosed`."""

    job: int
    at: int


class ObjectsClosed(_Message, frozen=True, tag=35):
    """The location is done with the job, and its objects are closed."""

    job: int
    at: int


class CallsMade(_Message, frozen=True, tag=36):
    """What the calls of a watched job do.

    ``nodes``: node, and how many of its calls have started, returned and raised so far. ``calls``: some that have ended
    since the last report: node, frame, attempt, start, end, whether it raised. ``left_out``: how many more there were.
    """

    job: int
    at: int
    nodes: list[tuple[str, int, int, int]]
    calls: list[tuple[str, Frame, int, float, float, bool]]
    left_out: int


class SpansMade(_Message, frozen=True, tag=40):
    """What ran at the location, of a job that is traced; answered by :class:`SpansTaken`, unless no more will come.

    ``spans``: a list of them, encoded: it is read when there is time.
    """

    job: int
    at: int
    count: int
    spans: bytes
    last: bool


# Between channels, about shared memory. Those who use a channel do not see them.


class Memory(_Message, frozen=True, tag=31):
    """The sender's arena: a file of a process. Comes before the first message that tells of a block in it."""

    pid: int
    file: int
    size: int
    device: int
    inode: int


class Release(_Message, frozen=True, tag=32):
    """For each block of the receiver's arena that is named here: one message's use of it is over."""

    offsets: list[int]


Message: TypeAlias = (
    SendNet
    | StartJob
    | OpenFrames
    | Credit
    | CancelJob
    | AbandonJob
    | Announce
    | Withdraw
    | Tokens
    | LoopEnded
    | ElementDone
    | StreamPull
    | StreamItems
    | StreamClose
    | Hello
    | Refused
    | Results
    | OperationError
    | YieldFailed
    | FramesDone
    | JobStopped
    | CallsAbandoned
    | JobBroken
    | CancelSeen
    | PlaceTaken
    | ProgressMade
    | MetricsMade
    | CallsMade
    | ObjectsBuilt
    | ObjectsClosed
    | SendToPlace
    | SpansMade
    | SpansTaken
    | Memory
    | Release
)

CARRIERS: Final = frozenset({StartJob, OpenFrames, Tokens, StreamItems, Results})
"""The messages that have a payload."""


def _where(block: Any) -> tuple[int, int]:
    if isinstance(block, Block):
        return block.offset, block.size
    raise TypeError(f"a value of type {type(block).__name__} cannot be sent")


encoder = msgspec.msgpack.Encoder(enc_hook=_where)
decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
