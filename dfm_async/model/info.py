"""The state of a job at one moment, and failures that pipelines handle, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dfm_async.errors import DfmError
from dfm_async.model.ids import Frame
from dfm_async.model.status import JobStatus


@dataclass(frozen=True, slots=True)
class FailureInfo:
    """A failure as data: takes the place of a missing value where a pipeline handles failures.

    Attributes:
        site: the site where it happened.
        operation: the operation that failed; for other statements, their label.
        node: the label of the statement that failed.
        frame: the execution that it belongs to.
        type_name: the type of the exception.
        message: the text of the exception.
    """

    site: str
    operation: str
    node: str
    frame: Frame
    type_name: str
    message: str

    def __str__(self) -> str:
        return f"{self.node} at {self.site}: {self.type_name}: {self.message}"


class WaitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter set that waits in a ``Wait`` or a ``Sleep``.

    Attributes:
        name: the name of the event that it waits for; empty if it waits only for a time.
        frame: the execution that waits; its first part is the number of the parameter set.
        node: the label of the statement.
        until: when it stops to wait, in seconds since 1970; None if there is no limit.
    """

    name: str
    frame: Frame
    node: str
    until: float | None = None


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that is open: an element of ``session.schedules()``.

    Attributes:
        name: its name.
        timetable: when its ticks are, in words.
        next_at: when the next tick is, in seconds since 1970; None if there is none.
        last_job: the id of the job of the last tick that ran, here or in another replica; None if there is none.
        missed: what happens to ticks that were missed.
    """

    name: str
    timetable: str
    next_at: float | None
    last_job: str | None
    missed: str


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job at one moment: the result of :meth:`Job.info`.

    Attributes:
        job_id: its id.
        status: its state.
        reason: the reason for the state, if known.
        pipeline: the name of its pipeline.
        places: the places that its pipeline yields to.
        label: the label that was passed to ``execute``.
        created: when it was submitted, in seconds since 1970.
        finished: when it ended; None if it has not ended.
        first: the offset of the oldest event that can be read.
        events: the offset that the next event will get.
        errors: the number of its errors.
        sets: the number of parameter sets so far; None if it is not known here.
        done: the number of completed parameter sets; None if it is not known here.
        accepts: whether it accepts further parameter sets here.
        retry_of: the id of the job whose failed parameter sets it runs again; None if it is no retry.
        start_at: its time to start, in seconds since 1970; None without ``execute(start_at=...)``.
        fork_of: the id of the job that it is a fork of; None if it is not a fork.
        stored: whether it is in a store, so that it can be resumed and forked.
        waits_for: what it waits for, in words, such as ``gpus of site 'lab': 1 of 1 in use, 3 calls waiting``; None if
            it has ended, or is not known to wait for anything.
        waits: the parameter sets that wait for events or times: the first 100. Only known where the job runs.
        events_awaited: the events that its pipeline waits for, each with the JSON schema of its value.
    """

    job_id: str
    status: JobStatus
    reason: str | None
    pipeline: str | None
    places: tuple[str, ...]
    label: str | None
    created: float
    finished: float | None
    first: int
    events: int
    errors: int
    sets: int | None
    done: int | None
    accepts: bool
    retry_of: str | None = None
    fork_of: str | None = None
    stored: bool = False
    waits_for: str | None = None
    start_at: float | None = None
    waits: tuple[WaitInfo, ...] = ()
    events_awaited: dict[str, dict[str, Any]] = {}


class FailedSet(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter set that has failed, or was not completed because its job ended early.

    Attributes:
        index: its number in the job, counted from 0: the first part of the frames of its results.
        params: its parameters.
        error: its first error; for a set that was not completed, the error of the job.
    """

    index: int
    params: dict[str, Any]
    error: DfmError
