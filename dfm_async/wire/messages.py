"""The messages between the application and the sites.

The number of a job is never used twice. A message of a job that is not known is ignored.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from dfm_async.model.call_limits import CallLimits
from dfm_async.model.events import ErrorRecord, OperationEvent
from dfm_async.model.ids import Frame
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.policies import RetryPolicy
from dfm_async.telemetry.spans import Origin
from dfm_async.wire.memory import Block, Payload

BATCH_BYTES: Final = 1024 * 1024
"""Large values are put into one message up to this size; a larger value makes a message of its own. So no message is
much larger than the largest value in it, and a limit for messages is one for values."""


class _SiteMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class _JobMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message of a job. ``job``: its number. ``at``: the location that it is for, or comes from.

    Between locations, ``source`` is the one that it comes from, and ``incarnation`` how often the worker of one of the
    two was lost, as far as the sender knows; a receiver that knows better ignores it.
    """

    job: int
    at: int


# From the application to a site.


class SendNet(_SiteMessage, frozen=True, tag=1):
    """The net of one location of a plan; sent once per worker."""

    plan: str
    at: int
    net: bytes


class StartJob(_JobMessage, frozen=True, kw_only=True, tag=2):
    """A job begins, with its first parameter sets as in :class:`OpenFrames`. ``routes``: each location's address.

    ``trace``: the trace that it belongs to, the id of the location's span, and which run of the job this is; None if
    it is not traced. ``recorded``: calls of it may have been recorded before.
    """

    spec: JobSpec
    plan: str
    routes: tuple[str, ...]
    first: int
    count: int
    payload: bytes | Payload
    last: bool
    trace: tuple[str, int, int] | None = None
    origin: Origin | None = None
    recorded: bool = False
    incarnation: int = 0
    """How often the worker of the location was lost in this run. If it was, :class:`RestoreJob` follows."""


class OpenFrames(_JobMessage, frozen=True, tag=3):
    """Parameter sets ``first, first + 1, ...``. ``payload``: a batch of lists; empty if no parameter is used here."""

    first: int
    count: int
    payload: bytes | Payload
    last: bool
    origin: Origin | None = None


class Credit(_JobMessage, frozen=True, tag=4):
    """The site may send that many further results."""

    items: int
    bytes: int


class CancelJob(_JobMessage, frozen=True, tag=5):
    """Stop everything of a job; answered by :class:`JobStopped`."""


class AbandonJob(_JobMessage, frozen=True, tag=9):
    """A job that was cancelled has not stopped: do not wait any longer for its calls that do not return."""


class PlaceTaken(_JobMessage, frozen=True, tag=6):
    """Answers :class:`SendToPlace`: the other job has taken the token, or why not."""

    request: int
    error: str


class Announce(_JobMessage, frozen=True, tag=7):
    """A job will begin here with this net, which was sent before, or will not (:class:`Withdraw`).

    What other sites send for it may come before it begins, and is kept. ``operations``: those that it may call.
    """

    plan: str
    operations: list[str]


class Withdraw(_JobMessage, frozen=True, tag=8):
    """A job that was announced does not begin."""


class WaitAnswer(_JobMessage, frozen=True, tag=46):
    """Answers :class:`WaitRequest`. ``value``: that of the event, as JSON; None if the time was over before."""

    node: str
    frame: Frame
    value: str | None


class SpansTaken(_JobMessage, frozen=True, tag=41):
    """Answers :class:`SpansMade`: the application has taken ``count`` spans."""

    count: int


class LocationLost(_JobMessage, frozen=True, tag=43):
    """A location that this one calls has lost its worker. ``incarnation``: how often that has happened in this run."""

    location: int
    incarnation: int
    error: ErrorRecord


class LocationBack(_JobMessage, frozen=True, tag=44):
    """A location that was lost has another worker, which waits for :class:`RestoreJob`, with these parameter sets."""

    location: int
    incarnation: int
    address: str
    frames: list[int]


# Between sites.


class Tokens(_JobMessage, frozen=True, tag=10):
    """Tokens for places. ``heads``: place, frame, state (an index into ``_STATES`` of the runtime)."""

    heads: list[tuple[int, Frame, int]]
    payload: bytes | Payload
    origin: Origin | None = None
    source: int = -1
    incarnation: int = 0


class LoopEnded(_JobMessage, frozen=True, tag=11):
    """How many elements a loop had. ``state``: 0 it ended, 1 it was skipped, 2 it failed."""

    loop: int
    frame: Frame
    total: int
    state: int
    error: ErrorRecord | None
    source: int = -1
    incarnation: int = 0


class ElementDone(_JobMessage, frozen=True, tag=12):
    """A location is done with elements of a loop."""

    loop: int
    frames: list[Frame]
    source: int = -1
    incarnation: int = 0


class RestoreJob(_JobMessage, frozen=True, tag=16):
    """A location takes the place of one that was lost; tokens follow.

    ``done``: parameter sets that it has nothing to do for. ``instances``: where it begins with the others: frame,
    scope, outputs of the calls that are resolved, and the number of elements that are done of each loop.
    """

    done: list[int]
    instances: list[tuple[Frame, int, list[int], list[tuple[int, int]]]]
    source: int
    incarnation: int


class StreamPull(_JobMessage, frozen=True, tag=13):
    """Send up to ``count`` further elements of a stream to ``reader``, as long as it has taken fewer than ``bytes``."""

    stream: int
    reader: int
    count: int
    bytes: int


class StreamItems(_JobMessage, frozen=True, tag=14):
    """Elements of a stream; ``ended``: there are no more."""

    stream: int
    source: int
    payload: bytes | Payload
    ended: bool
    error: ErrorRecord | None
    origin: Origin | None = None


class StreamClose(_JobMessage, frozen=True, tag=15):
    """A location is done with a stream; ``read``: a reader there had begun."""

    stream: int
    read: bool = True


# From a site to the application.


class WorkerReady(_SiteMessage, frozen=True, tag=20):
    """The worker is ready; its peers reach it at ``address``."""

    pid: int
    address: str


class WorkerRefused(_SiteMessage, frozen=True, tag=21):
    """The worker cannot start: its operations cannot be loaded."""

    reason: str
    traceback: str


class ResultBatch(_JobMessage, frozen=True, tag=22):
    """Yielded values. ``runs``: yield point, frame, first index or -1, count; ``payload``: a batch of all values.

    ``frames``: the parameter sets that are done with them, as in :class:`FramesDone`.
    """

    runs: list[tuple[int, Frame, int, int]]
    payload: bytes | Payload
    frames: list[int]
    origin: Origin | None = None


class OperationError(_JobMessage, frozen=True, tag=23):
    """An error happened."""

    error: ErrorRecord


class YieldFailed(_JobMessage, frozen=True, tag=24):
    """A yield will not come, because of an error that was reported before."""

    point: int
    frame: Frame
    error: str


class FramesDone(_JobMessage, frozen=True, tag=25):
    """The location is done with these parameter sets; all their results were sent before."""

    frames: list[int]


class LossNotContained(_JobMessage, frozen=True, tag=37):
    """The job cannot go on without a location that was lost, as its caller reports."""

    location: int


class JobRestarted(_JobMessage, frozen=True, tag=38):
    """The location has the job, in the place of one that was lost, and waits for :class:`RestoreJob`."""


class JobStopped(_JobMessage, frozen=True, tag=26):
    """Nothing of the job runs here any longer. ``seconds``: how long that took."""

    seconds: float = 0.0


class CallCompleted(_SiteMessage, frozen=True, tag=67):
    """The worker has completed its first call: it is of use, so another one follows it at once if it dies."""


class CallsAbandoned(_SiteMessage, frozen=True, tag=42):
    """Calls have exceeded their deadline, or belong to a job that was cancelled, and keep threads of the worker.

    ``count``: their number. ``exhausted``: too many for the worker to continue. ``text``: which call
    this is about.
    """

    count: int
    exhausted: bool
    text: str


class JobBroken(_JobMessage, frozen=True, tag=27):
    """The job cannot go on here, because something went wrong that is no operation's fault."""

    error: ErrorRecord


class CancelSeen(_JobMessage, frozen=True, tag=28):
    """The location has seen the cancellation, and waits for operations to end.

    ``waiting``: how many of its calls were waiting for a thread.
    """

    waiting: int = 0


class ProgressMade(_JobMessage, frozen=True, tag=29):
    """How far calls are. ``reports``: node, frame, done, total, note."""

    reports: list[tuple[str, Frame, float, float | None, str]]


class SendToPlace(_JobMessage, frozen=True, kw_only=True, tag=30):
    """A token for a parameter of another job; answered by :class:`PlaceTaken`.

    Tokens with the same key make one parameter set.
    """

    request: int
    target: str
    place: str
    key: str
    payload: bytes


class EventsMade(_JobMessage, frozen=True, tag=33):
    """Events of operations, in the order they were made."""

    events: list[OperationEvent]


class ObjectsBuilt(_JobMessage, frozen=True, tag=34):
    """The location has objects that live as long as the job: it has ended there with :class:`ObjectsClosed`."""


class ObjectsClosed(_JobMessage, frozen=True, tag=35):
    """The location is done with the job, and its objects are closed."""


class WaitRequest(_JobMessage, frozen=True, tag=47):
    """A statement waits for an event, at most for ``seconds``; without a name, only for that time.

    Answered by :class:`WaitAnswer`.
    """

    node: str
    frame: Frame
    event: str
    seconds: float | None


class CallsMade(_JobMessage, frozen=True, tag=36):
    """What the calls of a watched job do.

    ``nodes``: node, and how many of its calls have started, returned and raised so far. ``calls``: some that have ended
    since the last report: node, frame, attempt, start, end, whether it raised, and for how many seconds it had waited
    before. ``left_out``: how many more there were.
    """

    nodes: list[tuple[str, int, int, int]]
    calls: list[tuple[str, Frame, int, float, float, bool, float]]
    left_out: int


class SpansMade(_JobMessage, frozen=True, tag=40):
    """What ran at the location, of a job that is traced; answered by :class:`SpansTaken`, unless no more will come.

    ``spans``: a list of them, encoded: it is read when there is time.
    """

    count: int
    spans: bytes
    last: bool


# Between workers of one site, about calls that run in another process than their net.


class RunCall(_JobMessage, frozen=True, kw_only=True, tag=50):
    """Run an attempt of a call for the worker at ``home``, which knows it by its number.

    ``trace``: the trace, the id of the call's span, and whether the call is sampled; None if the job is not traced.
    ``timed``: whether the start is reported by :class:`CallStarted`. ``computes``: for how many seconds the call is
    expected to compute, if it takes turns with others of its kind; else 0.
    """

    number: int
    home: str
    job_id: str
    operation: str
    provider: str | None
    node: str
    frame: Frame
    attempt: int
    payload: bytes | Payload
    retry: RetryPolicy | None
    priority: int
    trace: tuple[str, int, bool] | None
    timed: bool
    computes: float


class CallStarted(_JobMessage, frozen=True, tag=51):
    """A call has its thread."""

    number: int


class CallReturned(_JobMessage, frozen=True, kw_only=True, tag=52):
    """A call has returned a value, or the elements of an iterator.

    ``start``: when it began, in seconds since 1970. ``wall``, ``used``: how many seconds it took, and used a processor.
    ``stacks``: what was sampled of it.
    """

    number: int
    start: float
    wall: float
    used: float
    pid: int
    spans: bytes
    stacks: str
    payload: bytes | Payload
    iterated: bool


class CallRaised(_JobMessage, frozen=True, kw_only=True, tag=53):
    """A call has raised an error; ``again``: its policy allows another attempt. The rest as in CallReturned.

    ``unsendable``: it has returned a value that cannot be sent. ``retry_after``: how many seconds its error asks to
    wait.
    """

    number: int
    start: float
    wall: float
    used: float
    pid: int
    spans: bytes
    stacks: str
    error: ErrorRecord
    again: bool
    unsendable: bool
    retry_after: float = 0.0


class CallReports(_JobMessage, frozen=True, tag=54):
    """Progress (node, frame, done, total, note) and events of a call."""

    progress: list[tuple[str, Frame, float, float | None, str]]
    events: list[OperationEvent]


class StopCalls(_JobMessage, frozen=True, tag=55):
    """A job was cancelled: its calls should end, and those that wait are not run."""


class RelayToPlace(_JobMessage, frozen=True, kw_only=True, tag=56):
    """A value of a call for another job; answered by :class:`PlaceTaken`, which is sent to ``reply_to``."""

    request: int
    target: str
    place: str
    key: str
    payload: bytes
    reply_to: str


class CallElements(_JobMessage, frozen=True, tag=62):
    """Elements of a generator that runs for another worker. It ends with CallReturned or CallRaised."""

    number: int
    payload: bytes | Payload


class ElementsTaken(_JobMessage, frozen=True, tag=63):
    """Elements of a generator were read, of this size in bytes: it may produce as many more."""

    number: int
    count: int
    size: int


class CloseCall(_JobMessage, frozen=True, tag=64):
    """The elements of a generator are not needed any longer."""

    number: int


class CloseCallObjects(_JobMessage, frozen=True, tag=65):
    """The objects that calls of a job have built are not needed any longer; answered by CallObjectsClosed."""

    home: str


class CallObjectsClosed(_JobMessage, frozen=True, tag=66):
    """The objects of a job are closed in the worker at this address."""

    address: str


AMONG_WORKERS: Final = (
    RunCall,
    CallStarted,
    CallReturned,
    CallRaised,
    CallReports,
    StopCalls,
    RelayToPlace,
    CallElements,
    ElementsTaken,
    CloseCall,
    CloseCallObjects,
    CallObjectsClosed,
)
"""What only workers of one site send each other."""


# Between a worker and the process that started it, about other workers of the site.


class WorkersWanted(_SiteMessage, frozen=True, tag=57):
    """The number of further workers that would have calls to run."""

    count: int


class WorkerLent(_SiteMessage, frozen=True, tag=58):
    """Calls may run in the worker at this address."""

    address: str


class WorkerRecalled(_SiteMessage, frozen=True, tag=59):
    """Return a worker as soon as its calls have ended."""

    address: str


class WorkerReturned(_SiteMessage, frozen=True, tag=60):
    """A worker is not needed any longer; ``stuck``: which call on it does not return, if one does not."""

    address: str
    stuck: str = ""


class WorkerGone(_SiteMessage, frozen=True, tag=61):
    """A worker that was lent has ended."""

    address: str
    reason: str
    exit_code: int | None


class SuspendDeadlines(_SiteMessage, frozen=True, tag=68):
    """A debugger is open in some worker, so that no deadline may expire, or none is open any longer."""

    suspended: bool


# Between a worker and the process that started it, about the limits of the site.


class PermitWanted(_SiteMessage, frozen=True, kw_only=True, tag=70):
    """A call of an operation with limits wants to start; answered by :class:`PermitGranted`.

    ``key``: the value of the parameter that is limited per value. ``elsewhere``: whether it can run in another worker.
    """

    number: int
    job_id: str
    priority: int
    operation: str
    key: str
    limits: CallLimits
    elsewhere: bool


class PermitGranted(_SiteMessage, frozen=True, tag=71):
    """A call may start, or cannot because of an ``error``.

    ``gpus``: the indexes of those that it may use. ``worker``: where it has to run; empty if it may run anywhere.
    ``waited_for``: the limit that it had to wait for.
    """

    number: int
    gpus: tuple[int, ...] = ()
    worker: str = ""
    waited_for: str = ""
    error: str = ""


class PermitReturned(_SiteMessage, frozen=True, tag=72):
    """A call has ended, or waits no longer."""

    number: int


# Between channels, about shared memory. The users of a channel do not see them.


class Memory(_SiteMessage, frozen=True, tag=31):
    """The sender's arena: a file of a process. Comes before the first message that refers to a block in it."""

    pid: int
    file: int
    size: int
    device: int
    inode: int


class Release(_SiteMessage, frozen=True, tag=32):
    """For each block of the receiver's arena that is named here: one message's use of it is over."""

    offsets: list[int]


if TYPE_CHECKING:
    Message: TypeAlias = _SiteMessage | _JobMessage
else:
    Message = functools.reduce(operator.or_, _SiteMessage.__subclasses__() + _JobMessage.__subclasses__())

WITH_PAYLOAD: Final = frozenset(
    {StartJob, OpenFrames, Tokens, StreamItems, ResultBatch, RunCall, CallReturned, CallElements}
)
"""The messages that have a payload."""


def _where(block: Any) -> tuple[int, int]:
    if isinstance(block, Block):
        return block.offset, block.size
    raise TypeError(f"a value of type {type(block).__name__} cannot be sent")


encoder = msgspec.msgpack.Encoder(enc_hook=_where)
decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


# Forwarding: which run and location an encoded message is for, without decoding it.

_KINDS: Final[dict[Any, type]] = {kind.__struct_config__.tag: kind for kind in _JobMessage.__subclasses__()}
_WIDTHS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""How many bytes follow the first one of a whole number that is larger than 127."""


@dataclass(slots=True, eq=False)
class Envelope:
    """An encoded message of a job.

    Attributes:
        kind: the class of the message.
        job: the run that it belongs to.
        at: the location that it is for, or comes from.
        data: the whole message, encoded. It was not checked any further.
    """

    kind: type
    job: int
    at: int
    data: bytes

    def decode(self) -> Any:
        """Decode the message.

        Raises:
            ValueError: it is malformed.
        """
        return decoder.decode(self.data)


def kind_of(message: Any) -> type:
    """Return the class of a message, also of one in an envelope."""
    return message.kind if type(message) is Envelope else type(message)


def peek(data: bytes | memoryview) -> tuple[type, int, int] | None:
    """Return the class, the run and the location of an encoded message; None if it is not a message of a job."""
    try:
        first = data[0]
        position = 1 if first & 0xF0 == 0x90 else 3 if first == 0xDC else 5 if first == 0xDD else 0
        if not position:
            return None
        found = []
        for _ in range(3):
            byte = data[position]
            width = 0 if byte < 0x80 else _WIDTHS[byte]
            position += 1
            found.append(int.from_bytes(data[position : position + width]) if width else byte)
            position += width
    except (IndexError, KeyError):
        return None
    kind = _KINDS.get(found[0])
    return None if kind is None or position > len(data) else (kind, found[1], found[2])
