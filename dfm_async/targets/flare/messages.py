"""What the application, the hub and the sites say to each other past one machine.

Messages of jobs are those of :mod:`dfm_async.wire.messages`; here is what surrounds them. Nothing in them is ever
unpickled, apart from the code of operations, and that only at sites that allow it (``allow_code``).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from dfm_async.model.events import Scalar
from dfm_async.model.ids import Frame
from dfm_async.model.limits import ResultLimits
from dfm_async.wire import messages as msg

__all__ = [
    "PROTOCOL",
    "AddRows",
    "AppHello",
    "Asked",
    "Attach",
    "Attached",
    "Drop",
    "Echo",
    "Echoed",
    "EventHead",
    "Events",
    "Expired",
    "Fail",
    "Find",
    "Follow",
    "Found",
    "GivenUp",
    "Halt",
    "JobState",
    "Known",
    "Leave",
    "ListJobs",
    "Listed",
    "LogLine",
    "LogLines",
    "Offer",
    "PeerLost",
    "Pulse",
    "Relayed",
    "Seat",
    "SeatLost",
    "SeatRefused",
    "SeatResponds",
    "SeatRetired",
    "SeatSilent",
    "Seated",
    "SiteHello",
    "SiteInfo",
    "SiteLost",
    "SiteReport",
    "StopFrames",
    "StopSeat",
    "Submit",
    "Submitted",
    "Taken",
    "Traced",
    "Undeliverable",
    "Unfollow",
    "Unseat",
    "Welcome",
    "WorkerReport",
    "decode_app",
    "decode_attach",
    "decode_attached",
    "decode_hub",
    "decode_node",
    "encode",
]

PROTOCOL: Final = 3
"""Raised when an older hub or site would not understand what is said."""
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Which Python this is. Code that is pickled can only be loaded by the same."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=366 * 86400)]
"""A time that somebody else has chosen: finite, and not negative."""

# Between the hub and the sites.


class SiteHello(_Message, frozen=True, tag=100):
    """A site is ready.

    ``operations``: what it offers, and the fingerprint of each; ``gateway``: where applications of its machine find it;
    ``life``: names the site from now on until it begins anew; ``python``: which Python runs there, as :data:`PYTHON`.
    """

    site: str
    protocol: int
    version: str
    host: str
    operations: dict[str, str]
    allow_code: bool
    gateway: str = ""
    problem: str = ""
    life: str = ""
    python: str = ""


class Offer(_Message, frozen=True, tag=101):
    """The code of a site's operations, from the application; only sites that allow it take it.

    ``key``: its hash; jobs name it. ``workers``, ``threads``, ``lanes``: how it runs. ``python``: which Python it is
    from, as :data:`PYTHON`.
    """

    key: str
    site: str
    shipped: bytes
    workers: int | None
    threads: int
    lanes: int
    python: str


class Drop(_Message, frozen=True, tag=102):
    """No application needs this code any more."""

    key: str


class Seat(_Message, frozen=True, tag=103):
    """Make room for one location of a job; answered by :class:`Seated`, :class:`SeatRefused` or :class:`SeatLost`.

    ``sites``: the site of every location of the job. ``offer``: which code, or empty for what is installed.
    ``size``: how many bytes of parameters it begins with.
    """

    job: int
    at: int
    job_id: str
    pipeline: str
    location: str
    sites: tuple[str, ...]
    offer: str
    plan: str
    net: bytes
    lane: int
    size: int


class Seated(_Message, frozen=True, tag=104):
    """A worker waits for the location. ``address``: where workers of the same site reach it."""

    job: int
    at: int
    address: str


class SeatRefused(_Message, frozen=True, tag=105):
    """The location cannot run here. ``kind``: whether the site does not allow it, or cannot."""

    job: int
    at: int
    kind: Literal["denied", "failed"]
    reason: str


class SeatLost(_Message, frozen=True, tag=106):
    """The worker of a location has ended."""

    job: int
    at: int
    exit_code: int | None
    detail: str
    lines: tuple[str, ...]
    out_of_memory: bool


class SeatSilent(_Message, frozen=True, tag=107):
    """The worker of a location does not respond."""

    job: int
    at: int
    seconds: float


class SeatResponds(_Message, frozen=True, tag=108):
    """The worker of a location responds again."""

    job: int
    at: int


class SeatRetired(_Message, frozen=True, tag=152):
    """The worker of a location takes no further jobs: calls on it do not return."""

    job: int
    at: int
    why: str


class Unseat(_Message, frozen=True, tag=109):
    """The job has left the location; ``well``: it has finished."""

    job: int
    at: int
    well: bool


class StopSeat(_Message, frozen=True, tag=110):
    """The job was to stop, and did not within its grace: ends it by force. ``seen``: its loop still answers."""

    job: int
    at: int
    job_id: str
    seen: bool


class Abandoned(_Message, frozen=True, tag=111):
    """The location is given up: ``how`` as in ``Job.cancel``."""

    job: int
    at: int
    how: str


class PeerLost(_Message, frozen=True, tag=112):
    """A site cannot reach another one any more. ``life``: which life of the other one that was, if it is known."""

    site: str
    reason: str
    life: str = ""


class SiteLost(_Message, frozen=True, tag=123):
    """Another site was lost: what was said to it is of no use, and what is said from now on is for its next life."""

    site: str


class Undeliverable(_Message, frozen=True, tag=118):
    """What a job sends to a location, of this or another site, can never be delivered. ``at``: that location."""

    job: int
    at: int
    reason: str


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """One worker, as in ``WorkerStats``."""

    pid: int | None
    jobs: int
    memory: int | None
    lag: float | None
    unresponsive: bool
    retired: bool
    abandoned: int = 0


class SiteReport(_Message, frozen=True, tag=113):
    """How the workers of a location are, for one version of its code (``offer``).

    ``tokens``: how many values it has sent to others, and their bytes.
    """

    offer: str
    location: str
    workers: tuple[WorkerReport, ...]
    restarts: int
    tokens: tuple[int, int]


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """One log record of a worker, with what it belongs to."""

    level: int
    text: str
    path: str
    line: int
    function: str | None
    created: float
    thread: str | None
    traceback: str | None
    stack: str | None
    pid: int | None
    origin: str
    job: str | None
    frame: Frame | None
    node: str | None
    operation: str | None


class LogLines(_Message, frozen=True, tag=114):
    """Log records of a site. ``left_out``: how many did not find room."""

    site: str
    lines: list[LogLine]
    left_out: int = 0


class Echo(_Message, frozen=True, tag=116):
    """Sent back as it is, behind everything that the site has said before."""

    request: int


class Pulse(_Message, frozen=True, tag=119):
    """Nothing is to be said: so it is found out whether the other end is still there."""


class GivenUp(_Message, frozen=True, tag=122):
    """The hub has taken the site for lost, and its jobs with it: it must come anew, if it has not already.

    ``life``: which life of the site that was.
    """

    life: str


class Echoed(_Message, frozen=True, tag=117):
    """Answers :class:`Echo`."""

    request: int


class Bye(_Message, frozen=True, tag=115):
    """The carrier ends: the site may leave."""

    reason: str


# Between applications and the hub.


class AppHello(msgspec.Struct, frozen=True, array_like=True):
    """What an application tells of itself.

    ``lanes``, ``slots``, ``queue_limit``, ``overflow``: how many of its jobs run at the same time, and how many wait.
    ``linger``: for how many seconds the carrier stays when nobody needs it. ``start``: for how many seconds a job waits
    for a site that is not there. ``keep``: for how many seconds a job waits
    for somebody who reads it. ``patience``: for how many seconds the hub keeps what is for an application that cannot
    be reached.
    """

    protocol: int
    version: str
    homesite: str
    lanes: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    queue_limit: Annotated[int, msgspec.Meta(ge=0)]
    overflow: Literal["block", "fail"]
    linger: Seconds
    start: Seconds
    keep: Seconds
    patience: Seconds


class Attach(msgspec.Struct, frozen=True, array_like=True):
    """The first thing that an application says on a new way; answered by :class:`Attached`.

    ``session``: names the application's session, and no other. ``new``: it has said nothing before. ``have``: how many
    of the hub's messages it has.
    """

    session: str
    new: bool
    have: int
    hello: AppHello


class Attached(msgspec.Struct, frozen=True, array_like=True):
    """The hub's answer: how many messages of the session it has; ``refused``: why it does not take it, if so."""

    have: int
    refused: str = ""


class SiteInfo(msgspec.Struct, frozen=True, array_like=True):
    """What an application is told of a site."""

    operations: dict[str, str]
    allow_code: bool
    problem: str = ""
    python: str = ""


class Welcome(_Message, frozen=True, tag=131):
    """The first message to an application, and again when a site comes or goes.

    ``deployed``: the sites that the carrier was sent to. ``gone``: sites that were lost, and why. ``gateway``: host and
    address of the homesite's gateway, or empty. ``largest``: how many bytes one message to the hub may have. ``began``:
    since when there has been a hub; ``since``: since when each site of ``gone`` has been missing; both by the clock of
    the server.
    """

    protocol: int
    version: str
    carrier: str
    sites: dict[str, SiteInfo]
    deployed: list[str]
    gone: dict[str, str]
    gateway: tuple[str, str]
    largest: int
    began: float
    since: dict[str, float]


class Traced(msgspec.Struct, frozen=True, array_like=True):
    """The trace that a job belongs to: its id, the job's span, and the span of each location."""

    trace_id: str
    span: int
    spans: tuple[int, ...]


class Submit(_Message, frozen=True, tag=132):
    """A new job; answered by :class:`Submitted`.

    The application follows it from its beginning, and has room for the events before ``until``.

    ``rows``: a batch of parameter sets, each a dict of values. ``nets``: the net of each location. ``offers``: which
    code each site runs, or empty. ``created``: when, by the application's clock. ``deadline``: how many seconds the job
    has, and how many of them are over. ``token``: names this submission, and no other.
    """

    job_id: str
    plan: bytes
    nets: tuple[bytes, ...]
    offers: dict[str, str]
    on_error: Literal["continue", "stop"]
    reruns: int
    window: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    grace: Seconds
    limits: ResultLimits
    rows: bytes
    stopped: bool
    fingerprint: str | None
    label: str | None
    priority: int
    deadline: tuple[Seconds, Seconds] | None
    watch: bool
    trace: Traced | None
    measured: bool
    created: float
    token: str
    until: int


class Submitted(_Message, frozen=True, tag=133):
    """What became of a new job: it is ``new``, the ``same`` was there, ``other`` has its id, the queue is ``full``."""

    job_id: str
    outcome: Literal["new", "same", "other", "full"]
    reason: str = ""


class AddRows(_Message, frozen=True, tag=134):
    """Further parameter sets."""

    job_id: str
    rows: bytes


class StopFrames(_Message, frozen=True, tag=135):
    """No further parameter set will come."""

    job_id: str


class Halt(_Message, frozen=True, tag=136):
    """Stop a job; with a token: only the job of that submission."""

    job_id: str
    token: str
    status: Literal["aborted", "failed", "interrupted"]
    reason: str
    grace: Seconds


class Fail(_Message, frozen=True, tag=137):
    """Ends a job with an error of the application's side; ``token`` as in :class:`Halt`."""

    job_id: str
    token: str
    error: bytes


class Follow(_Message, frozen=True, tag=138):
    """Send the events of a job from an offset on, as far as they are taken."""

    job_id: str
    start: int


class Unfollow(_Message, frozen=True, tag=139):
    """The application does not want to know more of a job."""

    job_id: str


class Taken(_Message, frozen=True, tag=140):
    """The application has events, and room for more.

    Those before ``have`` are not needed again, those before ``until`` may be sent; ``size``: how many bytes it has
    taken so far.
    """

    job_id: str
    have: int
    until: int
    size: int


class Expired(_Message, frozen=True, tag=151):
    """Answers :class:`Follow`: events from that offset on are gone; ``first``: the oldest that there is.

    Without it, the job itself is not known any more.
    """

    job_id: str
    first: int | None


class EventHead(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One event. ``kind``: r(esult), f(ailure), d(one frame), s(tatus), p(rogress), m(etrics), w(orker)."""

    kind: Literal["r", "f", "d", "s", "p", "m", "w"]
    frame: Frame = ()
    point: int = -1
    at: int = -1
    node: str = ""
    place: str | None = None
    text: str | None = None
    done: float = 0.0
    total: float | None = None
    values: dict[str, Scalar] | None = None
    step: int | None = None
    site: str = ""


class Events(_Message, frozen=True, tag=141):
    """Events of a job. ``values``: what the results hold, in order; ``errors``: what the failures hold, numbered.

    An error that is told of several times keeps its number. ``end``: the offset behind the newest event that there is.
    """

    job_id: str
    first: int
    heads: list[EventHead]
    values: bytes
    errors: list[tuple[int, bytes]]
    end: int
    size: int


class JobState(_Message, frozen=True, tag=142):
    """How far a job is. ``outcomes``: how its locations stopped, if it was cancelled; ``end``: how long its log is.

    ``cause``: the error that it was aborted for, if it was for one.
    """

    job_id: str
    status: str
    reason: str | None
    state: str
    added: int
    opened: int
    open: int
    waiting: int
    stopped: bool
    accepts: bool
    outcomes: dict[str, str]
    finished: float | None
    end: int
    phase: str
    cause: bytes = b""


class Find(_Message, frozen=True, tag=143):
    """Asks for a job; answered by :class:`Found`."""

    request: int
    job_id: str


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What an application needs to follow a job that it did not start."""

    job_id: str
    plan: bytes
    limits: ResultLimits
    fingerprint: str | None
    label: str | None
    created: float
    first: int
    end: int
    open: list[int]
    state: JobState


class Found(_Message, frozen=True, tag=144):
    """Answers :class:`Find`."""

    request: int
    known: Known | None


class ListJobs(_Message, frozen=True, tag=145):
    """Asks for all jobs; answered by :class:`Listed`."""

    request: int


class Listed(_Message, frozen=True, tag=146):
    """Answers :class:`ListJobs`: their ids, in the order of their submission."""

    request: int
    job_ids: list[str]


class Asked(_Message, frozen=True, tag=147):
    """Sent back when everything that the sites have said before has been sent on."""

    request: int


class Relayed(_Message, frozen=True, tag=148):
    """What a location told of its calls or spans, for an application that wants to know."""

    job_id: str
    message: bytes


class Forget(_Message, frozen=True, tag=149):
    """An ended job is not needed any more."""

    job_id: str


class Read(_Message, frozen=True, tag=152):
    """The application has read the results of a job up to an offset."""

    job_id: str
    position: int


class Leave(_Message, frozen=True, tag=150):
    """The application leaves."""


class AppBytes(_Message, frozen=True, tag=120):
    """Messages between an application and the hub, on their way through the gateway. ``app``: which application."""

    app: str
    data: list[bytes]


class AppGone(_Message, frozen=True, tag=121):
    """An application has left the gateway, or the hub wants the gateway to let it go."""

    app: str


NodeMessage: TypeAlias = (
    msg.Message
    | SiteHello
    | Offer
    | Drop
    | Seat
    | Seated
    | SeatRefused
    | SeatLost
    | SeatSilent
    | SeatResponds
    | SeatRetired
    | Unseat
    | StopSeat
    | Abandoned
    | PeerLost
    | SiteLost
    | Undeliverable
    | SiteReport
    | LogLines
    | Echo
    | Echoed
    | Pulse
    | GivenUp
    | Bye
    | AppBytes
    | AppGone
)


AppMessage: TypeAlias = (
    Offer
    | Submit
    | AddRows
    | StopFrames
    | Halt
    | Fail
    | Follow
    | Unfollow
    | Taken
    | Find
    | ListJobs
    | Asked
    | Forget
    | Read
    | Leave
)
"""What an application says."""

HubMessage: TypeAlias = (
    Welcome | Submitted | Events | Expired | JobState | Found | Listed | Asked | Relayed | SiteReport | LogLines | Bye
)
"""What the hub says to an application."""

_encoder: Final = msgspec.msgpack.Encoder()
_node: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(NodeMessage)
_attach: Final = msgspec.msgpack.Decoder(Attach)
_attached: Final = msgspec.msgpack.Decoder(Attached)
_app: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(AppMessage)
_hub: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(HubMessage)


def encode(message: Any) -> bytes:
    """Makes a message ready to be sent."""
    return _encoder.encode(message)


def decode_node(data: bytes | memoryview) -> Any:
    """Reads what a site or the hub has sent.

    Raises:
        ValueError: it is no message, or tells of memory that only processes of one machine share.
    """
    message = _node.decode(data)
    if type(message) in msg.CARRIERS and type(message.payload) is not bytes:
        raise ValueError("a message from outside must bring its values with it")
    return message


def decode_attach(data: bytes) -> Attach:
    """Reads the first words of an application.

    Raises:
        ValueError: they are none.
    """
    return _attach.decode(data)


def decode_attached(data: bytes) -> Attached:
    """Reads the hub's answer to them.

    Raises:
        ValueError: it is none.
    """
    return _attached.decode(data)


def decode_app(data: bytes | memoryview) -> Any:
    """Reads what an application has sent.

    Raises:
        ValueError: it is no message.
    """
    return _app.decode(data)


def decode_hub(data: bytes | memoryview) -> Any:
    """Reads what the hub has sent to an application.

    Raises:
        ValueError: it is no message.
    """
    return _hub.decode(data)
