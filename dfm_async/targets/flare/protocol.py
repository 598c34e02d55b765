"""The messages between applications, the hub and the sites of a federation on FLARE, and who may send which.

Messages of jobs are those of :mod:`dfm_async.wire.messages`; here is what surrounds them. Nothing in them is ever
unpickled, apart from the code of operations, and that only at sites that allow it (``allow_code``).
"""

from __future__ import annotations

import functools
import operator
import sys
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from dfm_async.engine.coordinator import FROM_LOCATIONS
from dfm_async.engine.machine import Phase, StopOutcome
from dfm_async.model.call_limits import SiteCapacity
from dfm_async.model.ids import Frame, Location
from dfm_async.model.info import WaitInfo
from dfm_async.model.job_spec import JobSpec, Seconds
from dfm_async.model.pool_size import IDLE_AFTER, Workers
from dfm_async.model.stats import LimitStats, WorkerStats
from dfm_async.model.status import JobStatus
from dfm_async.results.event_codec import Head
from dfm_async.wire import messages as msg

PROTOCOL: Final = 7
"""The version of the protocol: raised when an older hub or site would not understand a message."""
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Which Python this is. Code that is pickled can only be loaded by the same."""


class _FlareMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class _OfLocation(_FlareMessage, frozen=True):
    """About one location of a run."""

    job: int
    at: int


class _OfJob(_FlareMessage, frozen=True):
    job_id: str


class _Numbered(_FlareMessage, frozen=True):
    """A request, or the answer with the same number."""

    request: int


# Between the hub and the sites.


class SiteHello(_FlareMessage, frozen=True, kw_only=True, tag=100):
    """A site is ready.

    ``operations``: what it offers, and the fingerprint of each; ``gateway``: where applications of its machine find it;
    ``incarnation``: names the site from now on until it starts again; ``python``: its Python, as :data:`PYTHON`.
    """

    site: str
    protocol: int
    version: str
    host: str
    operations: dict[str, str]
    allow_code: bool
    gateway: str = ""
    problem: str = ""
    incarnation: str = ""
    python: str = ""


class Offer(_FlareMessage, frozen=True, kw_only=True, tag=101):
    """The code of a site's operations, from the application; only sites that allow it take it.

    ``key``: its hash; jobs name it. ``workers``, ``threads``, ``lanes``, ``idle_after``: how it runs. ``python``:
    which Python it is from, as :data:`PYTHON`. ``capacity``: what the site has for its calls.
    """

    key: str
    site: str
    shipped: bytes
    workers: Workers
    threads: int
    lanes: int
    python: str
    idle_after: Seconds = IDLE_AFTER
    capacity: SiteCapacity = SiteCapacity()


class Drop(_FlareMessage, frozen=True, tag=102):
    """No application needs this code any longer."""

    key: str


class Assign(_OfLocation, frozen=True, kw_only=True, tag=103):
    """Assign one location of a job to a worker.

    Answered by :class:`Assigned`, :class:`AssignmentRefused` or :class:`AssignmentLost`.

    ``sites``: the site of every location of the job. ``offer``: which code, or empty for what is installed.
    ``size``: the number of bytes of its first parameters.
    """

    job_id: str
    pipeline: str
    location: Location
    sites: tuple[str, ...]
    offer: str
    plan: str
    net: bytes
    lane: int
    size: int


class Assigned(_OfLocation, frozen=True, tag=104):
    """A worker is ready for the location."""


class AssignmentRefused(_OfLocation, frozen=True, tag=105):
    """The location cannot run here. ``kind``: whether the site does not allow it, or cannot."""

    kind: Literal["denied", "failed"]
    reason: str


class AssignmentLost(_OfLocation, frozen=True, tag=106):
    """The worker of a location has ended."""

    exit_code: int | None
    detail: str
    lines: tuple[str, ...]
    out_of_memory: bool


class WorkerUnresponsive(_OfLocation, frozen=True, tag=107):
    """The worker of a location does not respond."""

    seconds: float


class WorkerResponsive(_OfLocation, frozen=True, tag=108):
    """The worker of a location responds again."""


class WorkerRetired(_OfLocation, frozen=True, tag=152):
    """The worker of a location takes no further jobs: calls on it do not return."""

    why: str


class WorkerBound(_OfLocation, frozen=True, tag=124):
    """The job computes on one core at a location, although it could use more."""

    why: str


class Unassign(_OfLocation, frozen=True, tag=109):
    """The job has left the location; ``succeeded``: it has finished."""

    succeeded: bool


class StopByForce(_OfLocation, frozen=True, tag=110):
    """The job was to stop, and did not within its grace period. ``seen``: the loop of its worker still responds."""

    seen: bool


class Abandoned(_OfLocation, frozen=True, tag=111):
    """Nobody waits for the location any longer: ``how`` as in ``Job.cancel``."""

    how: StopOutcome


class PeerLost(_FlareMessage, frozen=True, tag=112):
    """A site cannot reach another one any longer. ``incarnation``: that of the other one, if it is known."""

    site: str
    reason: str
    incarnation: str = ""


class SiteLost(_FlareMessage, frozen=True, tag=123):
    """Another site was lost: what is sent to it from now on is for its next incarnation."""

    site: str


class Undeliverable(_OfLocation, frozen=True, tag=118):
    """What a job sends to a location, of this or another site, can never be delivered. ``at``: that location."""

    reason: str


class SiteReport(_FlareMessage, frozen=True, tag=113):
    """How the workers of a location are, for one version of its code (``offer``).

    ``tokens``: how many values it has sent to others, and their bytes. ``limits``: those of the site, as in
    ``LimitStats``.
    """

    offer: str
    location: Location
    workers: tuple[WorkerStats, ...]
    restarts: int
    tokens: tuple[int, int]
    limits: tuple[LimitStats, ...] = ()


class LogLine(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
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


class LogLines(_FlareMessage, frozen=True, tag=114):
    """Log records of a site. ``left_out``: the number of records that were dropped."""

    site: str
    lines: list[LogLine]
    left_out: int = 0


class Echo(_Numbered, frozen=True, tag=116):
    """Sent back as it is, after everything that the site has sent before."""


class Heartbeat(_FlareMessage, frozen=True, tag=119):
    """Sent while there is nothing else to send, to detect a lost peer."""


class Evicted(_FlareMessage, frozen=True, tag=122):
    """The hub has taken the site for lost, and its jobs with it: it must connect again, if it has not already.

    ``incarnation``: which incarnation of the site that was.
    """

    incarnation: str


class Echoed(_Numbered, frozen=True, tag=117):
    """Answers :class:`Echo`."""


class Bye(_FlareMessage, frozen=True, tag=115):
    """The host job ends: the site may leave."""

    reason: str


# Between applications and the hub.


class AppHello(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The description of an application.

    ``lanes``, ``slots``, ``queue_limit``, ``overflow``: the limits of its jobs that run, and that wait.
    ``linger``: for how many seconds the host job stays when nobody needs it. ``start``: for how many seconds a job
    waits for an absent site. ``keep``: for how many seconds a job waits for a reader. ``timeout``: for how many
    seconds the hub keeps what is for an application that cannot be reached.
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
    timeout: Seconds


class Attach(msgspec.Struct, frozen=True, array_like=True):
    """The first message of an application over a new transport; answered by :class:`Attached`.

    ``session``: names the application's session, and no other. ``new``: it has sent nothing before. ``have``: how many
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
    """What the hub reports about a site."""

    operations: dict[str, str]
    allow_code: bool
    problem: str = ""
    python: str = ""


class Welcome(_FlareMessage, frozen=True, kw_only=True, tag=131):
    """The first message to an application, and again when a site comes or goes.

    ``deployed``: the sites that the host job was sent to. ``gone``: sites that were lost, and why. ``gateway``: host
    and address of the homesite's gateway, or empty. ``largest``: the size limit of a message to the hub. ``began``:
    since when there has been a hub; ``since``: since when each site of ``gone`` has been missing; both by the clock of
    the server. ``journal``: whether the jobs outlive the host job.
    """

    protocol: int
    version: str
    host_job: str
    sites: dict[str, SiteInfo]
    deployed: list[str]
    gone: dict[str, str]
    gateway: tuple[str, str]
    largest: int
    began: float
    since: dict[str, float]
    journal: bool = False


class Traced(msgspec.Struct, frozen=True, array_like=True):
    """The trace that a job belongs to: its id, the job's span, and the span of each location."""

    trace_id: str
    span: int
    spans: tuple[int, ...]


class Submit(_FlareMessage, frozen=True, kw_only=True, tag=132):
    """A new job; answered by :class:`Submitted`.

    The application follows it from its beginning, and has room for the events before ``until``.

    ``rows``: a batch of parameter sets, each a dict of values. ``nets``: the net of each location. ``offers``: which
    code each site runs, or empty. ``elapsed``: how many seconds of its deadline are over. ``token``: names this
    submission, and no other.
    """

    spec: JobSpec
    plan: bytes
    nets: tuple[bytes, ...]
    offers: dict[str, str]
    rows: bytes
    stopped: bool
    elapsed: Seconds
    trace: Traced | None
    token: str
    until: int


class Submitted(_OfJob, frozen=True, tag=133):
    """What became of a new job: it is ``new``, the ``same`` was there, ``other`` has its id, the queue is ``full``."""

    outcome: Literal["new", "same", "other", "full"]
    reason: str = ""


class AddRows(_OfJob, frozen=True, tag=134):
    """Further parameter sets."""

    rows: bytes


class RowsStored(_OfJob, frozen=True, tag=155):
    """Answers :class:`AddRows` of a hub with a journal, when it has ``count`` sets from the number ``first`` on."""

    first: int
    count: int


class StopFrames(_OfJob, frozen=True, tag=135):
    """No further parameter set will come."""


class SendEvent(_OfJob, frozen=True, tag=153):
    """Send an event to a parameter set, or to the only one; answered by :class:`EventTaken`. ``value``: as JSON."""

    request: int
    name: str
    frame: int | None
    value: str


class EventTaken(_OfJob, frozen=True, tag=154):
    """Answers :class:`SendEvent`. ``problems``: why the event was not taken, if it was not.

    ``full``: it would be taken later.
    """

    request: int
    problems: tuple[str, ...] = ()
    full: bool = False


class Halt(_OfJob, frozen=True, tag=136):
    """Stop a job; with a token: only the job of that submission."""

    token: str
    status: Literal["aborted", "failed", "interrupted"]
    reason: str
    grace: Seconds


class Fail(_OfJob, frozen=True, tag=137):
    """Ends a job with an error of the application's side; ``token`` as in :class:`Halt`."""

    token: str
    error: bytes


class Follow(_OfJob, frozen=True, tag=138):
    """Send the events of a job from an offset on, as far as they are taken."""

    start: int


class Unfollow(_OfJob, frozen=True, tag=139):
    """The application does not want to know more of a job."""


class EventsTaken(_OfJob, frozen=True, tag=140):
    """The application has events, and room for more.

    Those before ``have`` are not needed again, those before ``until`` may be sent; ``size``: how many bytes it has
    taken so far.
    """

    have: int
    until: int
    size: int


class Expired(_OfJob, frozen=True, tag=151):
    """Answers :class:`Follow`: events from that offset on are gone; ``first``: the oldest that there is.

    Without it, the job itself is not known any longer.
    """

    first: int | None


class Events(_OfJob, frozen=True, kw_only=True, tag=141):
    """Events of a job. ``values``: those of the results, encoded; ``errors``: those of the failures, each once.

    The number of an error is the same in all messages. ``end``: the offset after the newest event of the log.
    """

    first: int
    heads: list[Head]
    values: bytes
    errors: list[tuple[int, bytes]]
    end: int
    size: int


class JobState(_OfJob, frozen=True, kw_only=True, tag=142):
    """How far a job is. ``outcomes``: how its locations stopped, if it was cancelled; ``end``: how long its log is.

    ``waiting_for``: what it waits for before it can start, as in ``JobWait``. ``cause``: the error that it was aborted
    for, if it was for one. ``waits``: its parameter sets that wait for events or times, as in ``JobInfo``.
    """

    status: JobStatus
    reason: str | None = None
    phase: Phase
    waiting_for: str = ""
    added: int
    opened: int
    open: int
    stopped: bool
    outcomes: dict[str, str] = {}
    finished: float | None = None
    end: int
    cause: bytes = b""
    waits: tuple[WaitInfo, ...] = ()


class Find(_Numbered, frozen=True, tag=143):
    """Asks for a job; answered by :class:`FoundJob`."""

    job_id: str


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What an application needs to follow a job that it did not start."""

    spec: JobSpec
    plan: bytes
    first: int
    end: int
    open: list[int]
    state: JobState


class FoundJob(_Numbered, frozen=True, tag=144):
    """Answers :class:`Find`. ``elsewhere``: another host job of the user has the job.

    ``missing``: sites that the job needs to go on, and that this host job was not sent to.
    """

    known: Known | None
    elsewhere: bool = False
    missing: tuple[str, ...] = ()


class ListJobs(_Numbered, frozen=True, tag=145):
    """Asks for all jobs; answered by :class:`Listed`."""


class Listed(_Numbered, frozen=True, tag=146):
    """Answers :class:`ListJobs`: their ids, in the order of their submission."""

    job_ids: list[str]


class Asked(_Numbered, frozen=True, tag=147):
    """Sent back when everything that the sites have sent before was forwarded."""


class Relayed(_OfJob, frozen=True, tag=148):
    """A location's report of calls or spans, for an application that follows the job."""

    message: bytes


class Forget(_OfJob, frozen=True, tag=149):
    """An ended job is not needed any longer."""


class Read(_OfJob, frozen=True, tag=152):
    """The application has read the results of a job up to an offset."""

    position: int


class Leave(_FlareMessage, frozen=True, tag=150):
    """The application leaves."""


class AppBytes(_FlareMessage, frozen=True, tag=120):
    """Messages between an application and the hub, forwarded by the gateway. ``app``: the application."""

    app: str
    data: list[bytes]


class AppGone(_FlareMessage, frozen=True, tag=121):
    """An application has left the gateway, or the hub wants the gateway to let it go."""

    app: str


# Who may send what to whom.


class Route(Enum):
    """From whom to whom a kind of message goes. Messages of and to locations name a run and a location of it."""

    HUB_TO_LOCATION = "from the hub to a location of a job"
    LOCATION_TO_HUB = "from a location of a job to the hub"
    BETWEEN_LOCATIONS = "between the locations of a job"
    HUB_TO_SITE = "from the hub to a site"
    SITE_TO_HUB = "from a site to the hub"
    ASSIGNMENT_TO_HUB = "from a site to the hub, about a location of a job"
    GATEWAY = "between the hub and the gateway of the homesite"
    HEARTBEAT = "between all"


_TABLE: Final[dict[Route, tuple[type[Any], ...]]] = {
    Route.HUB_TO_LOCATION: (
        msg.StartJob,
        msg.OpenFrames,
        msg.Credit,
        msg.CancelJob,
        msg.PlaceTaken,
        msg.SpansTaken,
        msg.WaitAnswer,
    ),
    Route.LOCATION_TO_HUB: (*FROM_LOCATIONS, msg.SendToPlace),
    Route.BETWEEN_LOCATIONS: (
        msg.Tokens,
        msg.LoopEnded,
        msg.ElementDone,
        msg.StreamPull,
        msg.StreamItems,
        msg.StreamClose,
    ),
    Route.HUB_TO_SITE: (Offer, Drop, Assign, Unassign, StopByForce, Echo, SiteLost, Evicted, Bye),
    Route.SITE_TO_HUB: (SiteHello, SiteReport, LogLines, PeerLost, Echoed),
    Route.ASSIGNMENT_TO_HUB: (
        Assigned,
        AssignmentRefused,
        AssignmentLost,
        WorkerUnresponsive,
        WorkerResponsive,
        WorkerRetired,
        WorkerBound,
        Abandoned,
        Undeliverable,
    ),
    Route.GATEWAY: (AppBytes, AppGone),
    Route.HEARTBEAT: (Heartbeat,),
}
ROUTES: Final[dict[type, Route]] = {kind: route for route, kinds in _TABLE.items() for kind in kinds}
"""The route of each kind of message. What is not in it is only for processes of one machine."""
TO_HUB: Final = frozenset({Route.LOCATION_TO_HUB, Route.ASSIGNMENT_TO_HUB, Route.SITE_TO_HUB, Route.HEARTBEAT})
"""The routes that end at the hub."""
FROM_WORKERS: Final = frozenset(_TABLE[Route.LOCATION_TO_HUB] + _TABLE[Route.BETWEEN_LOCATIONS])
"""What sites only forward from their workers."""
TO_LOCATIONS: Final = frozenset(_TABLE[Route.HUB_TO_LOCATION] + _TABLE[Route.BETWEEN_LOCATIONS]) - {msg.StartJob}
"""What sites only forward to their workers. A start is changed on its way: the site names the net and the routes."""
BRING_VALUES: Final = frozenset(_TABLE[Route.BETWEEN_LOCATIONS]) | {msg.StartJob, msg.OpenFrames}
"""What is not taken when a job has sent too much. The rest only steers it, and may be needed to end it."""

AppMessage: TypeAlias = (
    Offer
    | Submit
    | AddRows
    | StopFrames
    | SendEvent
    | Halt
    | Fail
    | Follow
    | Unfollow
    | EventsTaken
    | Find
    | ListJobs
    | Asked
    | Forget
    | Read
    | Leave
)
"""The messages of an application."""

HubMessage: TypeAlias = (
    Welcome
    | Submitted
    | RowsStored
    | EventTaken
    | Events
    | Expired
    | JobState
    | FoundJob
    | Listed
    | Asked
    | Relayed
    | SiteReport
    | LogLines
    | Bye
)
"""The messages of the hub to an application."""

encode: Final = msgspec.msgpack.Encoder().encode
"""Make a message ready to be sent."""
decode_attach: Final = msgspec.msgpack.Decoder(Attach).decode
decode_attached: Final = msgspec.msgpack.Decoder(Attached).decode
_app: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(AppMessage)
decode_app: Final = _app.decode
_hub: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(HubMessage)
decode_hub: Final = _hub.decode
_node: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, ROUTES, msg.Message)
)


def decode_node(data: bytes | memoryview) -> Any:
    """Decode a message of a site, or of the hub to a site.

    Raises:
        ValueError: it is malformed, or refers to memory that only processes of one machine share.
    """
    message = _node.decode(data)
    if type(message) in msg.WITH_PAYLOAD and type(message.payload) is not bytes:
        raise ValueError("a message from outside must bring its values with it")
    return message
