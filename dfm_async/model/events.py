"""What a job's log holds. Every event has an offset: 0, 1, 2, ..."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from dfm_async.errors import DfmError
from dfm_async.model.ids import Frame
from dfm_async.model.status import JobStatus
from dfm_async.rendering import Shown

__all__ = [
    "Event",
    "Failure",
    "FrameCompleted",
    "Metrics",
    "Progress",
    "Result",
    "Scalar",
    "StatusChanged",
    "WorkerNotice",
]

Scalar: TypeAlias = bool | int | float | str
"""What a metric can be."""


class Result(Shown, msgspec.Struct, frozen=True):
    """A value that a pipeline yielded.

    Attributes:
        offset: its position in the job's log.
        place: the place that it was yielded to.
        value: the value.
        frame: which execution of the pipeline and its loops it belongs to.
        site: the site that sent it.
        node: the label of the node whose value it is.
    """

    offset: int
    place: str
    value: Any
    frame: Frame
    site: str
    node: str


class Failure(Shown, msgspec.Struct, frozen=True):
    """An operation that failed (``place`` is None), or a yield that will not come because of one.

    Attributes:
        offset: its position in the job's log.
        place: the place of the yield that will not come; None for the failure itself.
        error: what went wrong.
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


class FrameCompleted(msgspec.Struct, frozen=True):
    """All sites are done with one parameter set; all its results stand before this event."""

    offset: int
    frame: Frame


class StatusChanged(msgspec.Struct, frozen=True):
    """The job entered another state."""

    offset: int
    status: JobStatus
    reason: str | None = None


class Progress(msgspec.Struct, frozen=True):
    """An operation told how far it is.

    Several reports of one call that come faster than they are sent are joined: the last one counts.

    Attributes:
        offset: its position in the job's log.
        frame: the execution that the call belongs to.
        site: the site that the operation runs at.
        node: the label of its node.
        done: how much is done.
        total: how much there is to do, if that is known.
        note: what is being done.
    """

    offset: int
    frame: Frame
    site: str
    node: str
    done: float
    total: float | None = None
    note: str = ""


class Metrics(msgspec.Struct, frozen=True):
    """An operation reported metrics. Every report is one event, in the order that its call made them.

    All reports of a parameter set stand before its ``FrameCompleted``. A set that runs again after a lost worker
    reports again: what it had reported before stays in the log.

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


class WorkerNotice(msgspec.Struct, frozen=True):
    """Something happened to a worker process that the job runs on.

    Attributes:
        offset: its position in the job's log.
        site: the worker's site.
        kind: "unresponsive", "responsive" (again), "retired" (calls on it do not return: it takes no further jobs), or
            "lost" (its parameter sets run again on another worker).
        seconds: for how long the worker's event loop has not been seen to run; 0 if it responds again.
        detail: the same in words.
    """

    offset: int
    site: str
    kind: Literal["unresponsive", "responsive", "retired", "lost"]
    seconds: float = 0.0
    detail: str = ""


Event: TypeAlias = Result | Failure | FrameCompleted | StatusChanged | Progress | Metrics | WorkerNotice
