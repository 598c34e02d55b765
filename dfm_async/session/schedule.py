"""Schedules: a job for each tick of a timetable, as long as they are open."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypedDict, TypeVar

import msgspec

from dfm_async.base.signals import Signal
from dfm_async.base.wall_clock import moment_text, sleep_until, wall_time
from dfm_async.errors import DfmError, JobExists, SessionClosed
from dfm_async.model.info import JobInfo, ScheduleInfo
from dfm_async.model.options import ResultLimits
from dfm_async.model.policies import RetryPolicy
from dfm_async.planning.plan import Plan
from dfm_async.runtime.operation_errors import cancel_task
from dfm_async.session.callbacks import Callback
from dfm_async.session.job import Job
from dfm_async.session.stream import ClosableIterator
from dfm_async.session.timetables import Missed, Ticks, Timetable

_log = logging.getLogger(__name__)

R = TypeVar("R")

JOBS_KEPT: Final = 100
"""The number of jobs that are kept for the iteration over a schedule; of more, the oldest are left out."""
_NAME: Final = re.compile(r"[A-Za-z0-9._~-]{1,100}")

ParameterSets: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One parameter set, or several."""
TickParams: TypeAlias = ParameterSets | Callable[[datetime], ParameterSets] | None
"""The parameter sets of all jobs of a schedule, or a function of the time of the tick that returns those of a job."""


class ScheduleOptions(TypedDict, total=False):
    """The options of :meth:`~dfm_async.Session.execute` that all jobs of a schedule have."""

    default_callback: Callback | None
    place_callbacks: Mapping[str, Callback] | None
    on_error: Literal["continue", "stop"]
    deadline: float | None
    options: ResultLimits | None
    priority: int
    concurrency: int | None
    retry: RetryPolicy | None
    watch: bool
    checkpoint: Literal["marked", "calls"]


class ScheduleOwner(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """What a schedule needs of its session."""

    prepare: Callable[[], Awaitable[Plan[R]]]
    """Prepares the pipeline."""
    check: Callable[[Plan[R], ParameterSets], Awaitable[object]]
    """Checks parameter sets."""
    execute: Callable[[Plan[R], ParameterSets, str, str], Awaitable[Job[R]]]
    """Starts a job with an id and a label."""
    reattach: Callable[[str], Awaitable[Job[R]]]
    """Finds a job."""
    find_jobs: Callable[[str], AsyncGenerator[JobInfo, None]]
    """Yields the jobs with a label, the newest first."""
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Starts a task of the session."""
    opened: dict[str, Schedule[Any]]
    """The schedules that are open, by name."""


class Schedule(ClosableIterator, Generic[R]):
    """A job for each tick of a timetable, returned by :meth:`~dfm_async.Session.schedule`.

    ``async with`` opens it: its ticks run until the block ends, or the session. The jobs that it has started go on.
    ``async for job in schedule`` yields the job of each tick, also if another replica has started it. The iteration
    ends with the schedule; it keeps 100 jobs that were not read yet, of more the oldest are left out.

    What goes wrong at a tick, such as a queue that is full, is logged, and the schedule goes on.

    Attributes:
        name: its name.
        label: the label of its jobs, for ``session.find_jobs(label=...)``.
    """

    def __init__(
        self,
        name: str,
        timetable: Timetable,
        params: TickParams,
        *,
        missed: Missed,
        overlap: Literal["allow", "skip"],
        owner: ScheduleOwner[R],
    ) -> None:
        _check(name, params, overlap)
        self.name = name
        self.label: str = f"schedule {name}"
        self._timetable = timetable
        self._params = params
        self._missed = missed
        self._overlap = overlap
        self._owner = owner
        self._plan: Plan[R] | None = None
        self._ticks = Ticks(timetable, missed, 0.0)
        self._task: asyncio.Task[None] | None = None
        self._last_job: Job[R] | None = None
        self._jobs: deque[Job[R]] = deque(maxlen=JOBS_KEPT)
        self._changed = Signal()

    # lifecycle

    async def __aenter__(self) -> Self:
        """Open the schedule, and find its last tick in the store, if there is one.

        Raises:
            PipelineError: the pipeline cannot be prepared.
            ParameterError: the parameters do not fit it, unless they come from a function.
            StoreError: the store cannot be read.
            SessionClosed: the schedule was opened before, or the session is closed.
            ValueError: another schedule of this name is open.
        """
        if self._task is not None or self._plan is not None:
            raise SessionClosed(f"the schedule {self.name!r} was opened before; make a new one")
        owner = self._owner
        if self.name in owner.opened:
            raise ValueError(f"a schedule {self.name!r} is open already in this session: choose another name")
        owner.opened[self.name] = self
        try:
            self._plan = await owner.prepare()
            if not callable(self._params):
                await owner.check(self._plan, self._params or {})
            now, last = wall_time(), None
            async with aclosing(owner.find_jobs(self.label)) as found:
                async for info in found:
                    last = self._tick_of(info.job_id)
                    if last is not None:
                        self._last_job = await owner.reattach(info.job_id)
                        break
            self._ticks = Ticks(self._timetable, self._missed, now if last is None else min(last, now))
            self._task = owner.spawn(self._run(self._plan, self._ticks.advance(now)))
            self._task.add_done_callback(self._ended)
        except BaseException:
            del owner.opened[self.name]
            raise
        return self

    async def aclose(self) -> None:
        """End the schedule: no further tick runs. Jobs that run go on. Safe to call more than once."""
        task = self._task
        if task is not None and not task.done():
            cancel_task(task)
            await asyncio.wait([task])

    @property
    def closed(self) -> bool:
        """Whether no further tick runs."""
        return self._task is None or self._task.done()

    # queries

    @property
    def next_at(self) -> datetime | None:
        """The time of the next tick, in the time zone of the schedule; None if it is not open."""
        tick = None if self.closed else self._ticks.following
        return None if tick is None else self._moment(tick)

    @property
    def last_job(self) -> Job[R] | None:
        """The job of the last tick that ran, here or in another replica; None if there is none."""
        return self._last_job

    def info(self) -> ScheduleInfo:
        """Return its state at this moment."""
        following, last = self.next_at, self._last_job
        return ScheduleInfo(
            name=self.name,
            timetable=repr(self._timetable),
            next_at=None if following is None else following.timestamp(),
            last_job=None if last is None else last.job_id,
            missed=self._missed,
        )

    def _moment(self, tick: float) -> datetime:
        return datetime.fromtimestamp(tick, self._timetable.zone)

    def _tick_of(self, job_id: str) -> float | None:
        name, _, text = job_id.rpartition("@")
        try:
            return datetime.fromisoformat(text).timestamp() if name == self.name else None
        except ValueError:
            return None

    def __repr__(self) -> str:
        following = self.next_at
        state = "not open" if self.closed else "no further tick" if following is None else f"next at {following}"
        return f"<Schedule {self.name!r}, {self._timetable!r}: {state}>"

    async def __anext__(self) -> Job[R]:
        await self._changed.wait_until(lambda: self._jobs or self.closed)
        if not self._jobs:
            raise StopAsyncIteration
        return self._jobs.popleft()

    # ticks

    async def _run(self, plan: Plan[R], due: list[float]) -> None:
        try:
            while True:
                for tick in due:
                    await self._start(plan, tick)
                following = self._ticks.following
                if following is None:
                    return
                await sleep_until(following)
                due = self._ticks.advance(wall_time())
        except SessionClosed:
            return

    def _ended(self, _: asyncio.Task[None]) -> None:
        del self._owner.opened[self.name]
        self._changed.notify()

    async def _start(self, plan: Plan[R], tick: float) -> None:
        """Start the job of a tick, or find it, if another replica has started it."""
        job_id = f"{self.name}@{moment_text(tick)}"
        last = self._last_job
        if self._overlap == "skip" and last is not None and not last.status.ended:
            _log.info("job %s is not started: job %s has not ended", job_id, last.job_id, extra={"job": job_id})
            return
        try:
            params = self._params(self._moment(tick)) if callable(self._params) else self._params
        except Exception:  # noqa: BLE001 - of the user's function
            _log.exception("job %s was not started: its parameters cannot be made", job_id, extra={"job": job_id})
            return
        try:
            job = await self._job(plan, params or {}, job_id)
        except SessionClosed:
            raise
        except DfmError as error:
            _log.error("job %s was not started: %s", job_id, error, extra={"job": job_id})
            return
        self._last_job = job
        self._jobs.append(job)
        self._changed.notify()

    async def _job(self, plan: Plan[R], params: ParameterSets, job_id: str) -> Job[R]:
        try:
            return await self._owner.execute(plan, params, job_id, self.label)
        except JobExists:  # started elsewhere, by other code or with other parameters
            return await self._owner.reattach(job_id)


def _check(name: object, params: object, overlap: object) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        problem = f"the name of a schedule has 1 to 100 letters, digits or . _ ~ -, not {name!r}"
        raise ValueError(f"{problem}: it becomes a part of job ids")
    if overlap not in ("allow", "skip"):
        raise ValueError(f"overlap must be 'allow' or 'skip', not {overlap!r}")
    if not (params is None or callable(params) or isinstance(params, Mapping | Sequence)):
        problem = "a function of the time of the tick that returns them"
        raise TypeError(f"params must be one parameter set, a list of them, or {problem}, not {params!r}")
