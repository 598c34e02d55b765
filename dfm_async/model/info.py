"""What is known of a job at one moment."""

from __future__ import annotations

import msgspec

from dfm_async.model.status import JobStatus

__all__ = ["JobInfo"]


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job at one moment: what :meth:`Job.info` gives.

    Attributes:
        job_id: its id.
        status: its state.
        reason: why it is in this state, if that is known.
        pipeline: the name of its pipeline.
        places: the places that its pipeline yields to.
        label: what ``execute(label=...)`` was given.
        created: when it was submitted, in seconds since 1970.
        finished: when it ended; None while it has not.
        first: the offset of the oldest event that can be read.
        events: the offset that the next event will get.
        errors: how many errors there were.
        sets: how many parameter sets have come; None if that is not known here.
        done: how many of them are done; None if that is not known here.
        accepts: whether it takes further parameter sets here.
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
