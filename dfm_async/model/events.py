"""What happens in a job: the events of its log, the activity of its operations, errors as they travel.

Every event has an offset in the log: 0, 1, 2, ... A new kind of event is a class of the union here, and a row of the
table in ``results/event_codec.py``. One that operations make is also in :data:`OperationEvent`; the method that makes
it is in ``runtime/context.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, SupportsIndex, TypeAlias, overload

import msgspec

from dfm_async.base.rendering import Shown
from dfm_async.errors import DfmError
from dfm_async.model.ids import Frame
from dfm_async.model.status import JobStatus

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    V_co = TypeVar("V_co", covariant=True, default=Any)
    Item = TypeVar("Item", bound="Result", default="Result")
else:
    from typing import TypeVar

    V_co = TypeVar("V_co", covariant=True)
    Item = TypeVar("Item")

Scalar: TypeAlias = bool | int | float | str
"""The value of a metric."""


class Result(Shown, msgspec.Struct, Generic[V_co], frozen=True):
    """A value that a pipeline yielded.

    Attributes:
        offset: its position in the job's log.
        place: the place that it was yielded to.
        value: the value.
        frame: the execution of the pipeline and its loops that it belongs to.
        site: the site that sent it.
        node: the label of the node whose value it is.
    """

    offset: int
    place: str
    value: V_co
    frame: Frame
    site: str
    node: str


class Failure(Shown, msgspec.Struct, frozen=True):
    """A failed operation (``place`` is None), or a yield that a failure prevented.

    Attributes:
        offset: its position in the job's log.
        place: the place of the prevented yield; None for the failure itself.
        error: the error.
        frame: the execution that it belongs to.
        site: the site that reported it.
        node: the label of the failed node, or of the node whose value would have been yielded.
    """

    offset: int
    place: str | None
    error: DfmError
    frame: Frame
    site: str
    node: str


class FrameCompleted(msgspec.Struct, frozen=True, gc=False):
    """All sites have completed one parameter set; all its results precede this event."""

    offset: int
    frame: Frame


class StatusChanged(msgspec.Struct, frozen=True, gc=False):
    """The job entered another state."""

    offset: int
    status: JobStatus
    reason: str | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """An operation has reported its progress.

    Reports of one call that are faster than the transmission are coalesced: the latest one is sent.

    Attributes:
        offset: its position in the job's log.
        frame: the execution that the call belongs to.
        site: the site that the operation runs at.
        node: the label of its node.
        done: the completed amount.
        total: the total amount, if it is known.
        note: the current step, in words.
    """

    offset: int
    frame: Frame
    site: str
    node: str
    done: float
    total: float | None = None
    note: str = ""


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """An operation reported metrics. Every report is one event, in the order of the reports of its call.

    All reports of a parameter set precede its ``FrameCompleted``. A set that runs again after a lost worker reports
    again: its earlier reports stay in the log.

    Attributes:
        offset: its position in the job's log.
        frame: the execution that the call belongs to.
        site: the site that the operation runs at.
        node: the label of its node.
        values: the metrics by their names.
        step: the step that they belong to, if the operation counts steps.
    """

    offset: int
    frame: Frame
    site: str
    node: str
    values: dict[str, Scalar]
    step: int | None = None


class FailureHandled(msgspec.Struct, frozen=True, kw_only=True, tag="handled"):
    """A failure that the pipeline handles, and that is therefore not an error of the job.

    Attributes:
        offset: its position in the job's log.
        frame: the execution that it belongs to.
        site: the site where it failed.
        node: the label of the statement that failed.
        type_name: the type of the exception.
        message: the text of the exception.
        attempt: the number of the attempt, counted from 1.
    """

    offset: int
    frame: Frame
    site: str
    node: str
    type_name: str
    message: str
    attempt: int = 1


class WaitBegan(msgspec.Struct, frozen=True):
    """A parameter set waits for an event, or for a time to be over: a ``Wait`` or a ``Sleep`` was reached.

    One that runs again, after a lost worker or an interruption, goes on waiting: this event is not repeated.

    Attributes:
        offset: its position in the job's log.
        frame: the execution that it belongs to.
        site: the site of the statement.
        node: the label of the statement.
        name: the name of the event; empty if it waits only for a time.
        until: when it stops to wait, in seconds since 1970; None if there is no limit.
    """

    offset: int
    frame: Frame
    site: str
    node: str
    name: str
    until: float | None = None


class EventSent(msgspec.Struct, frozen=True):
    """An event was sent to a parameter set. It is kept until a ``Wait`` takes it.

    Attributes:
        offset: its position in the job's log.
        frame: the parameter set: its number.
        name: the name of the event.
        value: its value.
        sent: when it was sent, in seconds since 1970.
    """

    offset: int
    frame: Frame
    name: str
    value: Any
    sent: float


class WaitEnded(msgspec.Struct, frozen=True):
    """A parameter set goes on: it has taken an event, or the time is over.

    Attributes:
        offset: its position in the job's log.
        frame: the execution that it belongs to.
        site: the site of the statement.
        node: the label of the statement.
        name: the name of the event; empty if it has waited only for a time.
        by: "event" if it has taken the first event of that name which no other has taken, "time" if the time was over.
    """

    offset: int
    frame: Frame
    site: str
    node: str
    name: str
    by: Literal["event", "time"]


OperationEvent: TypeAlias = Metrics | FailureHandled
"""An event that an operation makes, in the order of its calls and never coalesced. Each kind has a tag.

All begin with ``offset``, ``frame``, ``site`` and ``node``; the job's log sets the offset and the site.
"""


NoticeKind = Literal["unresponsive", "responsive", "retired", "bound"]
"""What happens to workers while jobs run on them."""


class WorkerNotice(msgspec.Struct, frozen=True):
    """A state change of a worker process that the job runs on.

    Attributes:
        offset: its position in the job's log.
        site: the worker's site.
        kind: "unresponsive", "responsive" (again), "retired" (calls on it do not return: it takes no further jobs),
            "lost" (its parameter sets run again on another worker), or "bound" (the job computes on one core, although
            it could use more).
        seconds: the time since the worker's event loop was last known to run; 0 if it responds again.
        detail: the same in words.
    """

    offset: int
    site: str
    kind: Literal["unresponsive", "responsive", "retired", "lost", "bound"]
    seconds: float = 0.0
    detail: str = ""


Event: TypeAlias = (
    Result
    | Failure
    | FrameCompleted
    | StatusChanged
    | Progress
    | Metrics
    | FailureHandled
    | WorkerNotice
    | WaitBegan
    | EventSent
    | WaitEnded
)


class Results(Shown, list[Item]):
    """A list of results. It is a list in every way; notebooks show it as a table."""

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> Item: ...
    @overload
    def __getitem__(self, at: slice, /) -> Results[Item]: ...
    def __getitem__(self, at: SupportsIndex | slice, /) -> Item | Results[Item]:
        return Results(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)


class NodeActivity(msgspec.Struct, frozen=True):
    """How often the operation of a node was called, since the job began. Calls that were cut short are not counted.

    Attributes:
        node: the label of the node.
        site: the site that it runs at.
        started: how many calls have begun, every attempt counted.
        done: how many have returned.
        failed: how many have raised.
    """

    node: str
    site: str
    started: int
    done: int
    failed: int

    @property
    def running(self) -> int:
        """The number of running calls."""
        return self.started - self.done - self.failed


class CallMade(msgspec.Struct, frozen=True, gc=False):
    """A call that has ended.

    Attributes:
        node: the label of its node.
        site: the site that it ran at.
        frame: the execution that it belongs to.
        attempt: which try it was, counted from 1.
        start: when it began to run, in seconds since 1970, by the clock of its site.
        end: when it ended.
        failed: whether it raised.
        waited: for how many seconds it had waited before, such as for a thread or for another worker.
    """

    node: str
    site: str
    frame: Frame
    attempt: int
    start: float
    end: float
    failed: bool
    waited: float = 0.0


class Activity(msgspec.Struct, frozen=True):
    """The changes since the last item of the reader; the first item has everything.

    Attributes:
        nodes: the nodes that were called since then, with their totals.
        calls: calls that have ended since then. They are a sample of bounded size: the newest ones.
        left_out: how many calls of the job are counted in its nodes, but were never among ``calls``.
    """

    nodes: tuple[NodeActivity, ...]
    calls: tuple[CallMade, ...]
    left_out: int


class ErrorRecord(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels. ``id`` is unique in its job; ``cause`` is the pickled exception, or empty."""

    id: str
    site: str
    operation: str
    node: str
    frame: Frame
    attempt: int
    type_name: str
    message: str
    traceback: str
    cause: bytes = b""
