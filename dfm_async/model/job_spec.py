"""What was decided about a job when it was submitted."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from dfm_async.model.checks import LAST_MOMENT, check_number, whole
from dfm_async.model.ids import JobId
from dfm_async.model.options import DEFAULT_GRACE, DEFAULT_LIMITS, ResultLimits
from dfm_async.model.policies import RetryPolicy

FRAME_WINDOW: Final = 256
"""How many parameter sets of a job are in flight, unless the job sets another number."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=366 * 86400)]
"""A duration that may come from another organisation: finite, and not negative."""

Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
"""A time in seconds since 1970 that may come from another organisation: finite, and one that can be written."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Everything that was decided about a job when it was submitted, apart from its plan and its parameter sets.

    ``Session.execute`` builds it once; it goes unchanged into the store, over the wire and to the sites. A new option
    of a job is a field here, its check, and the code that uses it; at a site that is ``StartJob.spec``.
    """

    job_id: JobId = JobId("")
    created: float = 0.0
    """When the job was submitted, in seconds since 1970, by the application's clock."""
    limits: ResultLimits = DEFAULT_LIMITS
    """What its log may hold."""
    on_error: Literal["continue", "stop"] = "continue"
    reruns: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How often a parameter set runs again after a worker was lost."""
    retry: RetryPolicy | None = None
    """How calls are tried again whose operation has no policy of its own."""
    window: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = FRAME_WINDOW
    """How many parameter sets are in flight at the same time."""
    grace: Seconds = DEFAULT_GRACE
    """The grace period of running operations when the job has to stop, in seconds."""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)] = 0
    """Jobs with a higher priority get slots and free threads first."""
    deadline: Seconds | None = None
    """After how many seconds the job is aborted; the time that it waits counts, but not that before ``start_at``."""
    start_at: Moment | None = None
    """When the job starts, in seconds since 1970, by the clock of the machine that runs it; None: at once."""
    label: str | None = None
    """What the application noted about the job."""
    fingerprint: str | None = None
    """A hash of what was submitted, for jobs whose id the caller chose."""
    checkpoint: Literal["marked", "calls"] = "marked"
    """Which calls are recorded, if the job is stored: those of operations with ``checkpoint=True``, or all."""
    checkpoints: str = ""
    """Names the checkpoints of a stored job. No other job has the same name, not even one that gets the same id."""
    code: tuple[tuple[str, str], ...] = ()
    """The operations of a stored job, each with the site, and the fingerprints of their code, as far as it is known."""
    watch: bool = False
    """Whether calls of operations are counted."""
    measured: bool = False
    """Whether spans have the sizes of arguments and results."""
    sampled: bool = False
    """Whether spans of calls have the stacks of their threads."""
    stored: bool = False
    """Whether results are written to a store, so that they must not need pickle."""
    fed: bool = False
    """Whether the job ends with a stream of parameter sets that the application feeds it."""
    retry_of: JobId | None = None
    """The job whose failed parameter sets this one runs again."""
    fork_of: JobId | None = None
    """The job whose recorded calls this one uses, up to a node."""

    def __post_init__(self) -> None:
        if self.on_error not in ("continue", "stop"):
            raise ValueError(f"on_error must be 'continue' or 'stop', not {self.on_error!r}")
        if self.checkpoint not in ("marked", "calls"):
            raise ValueError(f"checkpoint must be 'marked' or 'calls', not {self.checkpoint!r}")
        if self.deadline is not None:
            check_number("deadline", self.deadline, positive=True)
        if self.start_at is not None:
            check_number("start_at", self.start_at, most=LAST_MOMENT)
        whole("concurrency", self.window)
