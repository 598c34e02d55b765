"""Sessions: prepare pipelines, execute them, find jobs again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar, Unpack, overload

import msgspec

from dfm_async.base.tasks import in_thread
from dfm_async.base.wall_clock import wall_time
from dfm_async.engine.job_table import JobControl
from dfm_async.engine.target import Target
from dfm_async.errors import DfmError, JobNotFound, StoreError
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.checks import check_number, moment, unexpected
from dfm_async.model.flare import FlareOptions
from dfm_async.model.ids import JobId
from dfm_async.model.info import JobInfo, ScheduleInfo
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.job_spec import FRAME_WINDOW, JobSpec
from dfm_async.model.options import LocalOptions, ResultLimits
from dfm_async.model.policies import RetryPolicy
from dfm_async.model.stats import SessionStats
from dfm_async.model.status import JobStatus, check_status
from dfm_async.planning.net_text import net_text
from dfm_async.planning.plan import Plan
from dfm_async.planning.profile import Profile
from dfm_async.planning.types import is_plain, warm
from dfm_async.results.record import JobRecord, JobSummary
from dfm_async.session.callbacks import Callback, CallbackDispatcher, Callbacks, LoopDispatcher
from dfm_async.session.direct_calls import DirectCalls
from dfm_async.session.hints import IN_SESSIONS, keywords_explained, no_attribute
from dfm_async.session.job import Job, check_places
from dfm_async.session.lifecycle import Supervisor
from dfm_async.session.parameters import ParameterSets, is_stream
from dfm_async.session.preparation import Preparation
from dfm_async.session.profiling import Profiling, SessionProfile
from dfm_async.session.schedule import Schedule, ScheduleOptions, ScheduleOwner, TickParams
from dfm_async.session.submission import Params, Submission
from dfm_async.session.timetables import timetable
from dfm_async.session.watch import JobWatch, SiteWatch, Waits, job_info
from dfm_async.store import open_store
from dfm_async.targets.local import FederationRunner
from dfm_async.telemetry.cpu_profile import CpuProfile
from dfm_async.telemetry.session_metrics import observed
from dfm_async.telemetry.sinks import Sink, sink_of
from dfm_async.telemetry.traces import Traces
from dfm_async.workers.process_memory import memory_of

if TYPE_CHECKING:
    from dfm_async.discovery.advice import Discovery
    from dfm_async.session.durable import SessionJobs
    from dfm_async.store.base import Store

R = TypeVar("R")

_connected: Final[weakref.WeakSet[Session]] = weakref.WeakSet()


class Session(DirectCalls):
    """Connect an application to a federation.

    Use ``async with Session(federation) as session``, or ``await session.connect()`` and ``await session.close()``. A
    session may be opened and closed in different tasks, and used by many tasks at the same time.

    Args:
        federation: the sites and their operations; or the path of their file, ``federation.dfm.yaml``.
        homesite: the name of the application's own site.
        target: "local" (worker processes), "inline" (everything on this loop), "flare" (a federation of machines on
            NVIDIA FLARE), or a target object.
        options: ``LocalOptions``; with "flare", ``FlareOptions``.
        callback_dispatcher: determines where callbacks run; by default on this loop.
        store: the URL of a store for durable jobs, such as ``"sqlite:///jobs.db"``, or a store object. By default, jobs
            are kept in memory.
        trace: the file that spans are appended to, one JSON object per line, or a sink for them. The OpenTelemetry SDK
            receives the spans as well if it is set up in this process, without any setting here.

    Attributes:
        federation: the sites and their operations.
        homesite: the name of the application's own site.
        options: the options of the session.
    """

    def __init__(
        self,
        federation: Federation | str | os.PathLike[str],
        homesite: str = "home",
        target: Literal["local", "inline", "flare"] | Target = "local",
        options: LocalOptions | FlareOptions | None = None,
        callback_dispatcher: CallbackDispatcher | None = None,
        store: str | Store | None = None,
        trace: str | os.PathLike[str] | Sink | None = None,
    ) -> None:
        if options is not None and not isinstance(options, LocalOptions | FlareOptions):
            raise TypeError(f"options must be LocalOptions(...) or FlareOptions(...), not {options!r}")
        if isinstance(options, FlareOptions) is not (target == "flare"):
            raise ValueError("target='flare' and options=FlareOptions(startup_kit=..., user=...) belong together")
        if target == "flare" and store is not None:
            raise ValueError("jobs on FLARE live in the federation: session.reattach finds them, without a store")
        if not isinstance(federation, Federation):
            federation = Federation.from_yaml(federation)
        super().__init__()
        self.federation = federation
        self.homesite = homesite
        opened = None if store is None else _store(store)
        self.options = options.local if isinstance(options, FlareOptions) else options or LocalOptions()
        if opened is not None and self.options.checkpoints is None:
            self.options = msgspec.structs.replace(self.options, checkpoints=opened.checkpoints)
        self._target = self._choose(target, options)
        self._where = target if isinstance(target, str) else type(target).__name__
        self._dispatcher = callback_dispatcher or LoopDispatcher()
        self._jobs = self._target.jobs
        self._traces = Traces(sink_of(trace))
        self._profile = SessionProfile(self._traces, homesite)
        self._supervisor = Supervisor(start=self._start, started=self._started, stop=self._end_jobs)
        self._durable = None if opened is None else self._open_durable(opened)
        self._schedules: dict[str, Schedule[Any]] = {}
        self._preparation = Preparation(federation, homesite, self._target, self.options, self._profile)
        stored = None if self._durable is None else self._durable.codec
        self._params = ParameterSets(federation, self._target.codec, stored)
        self._submission = Submission(
            target=self._target,
            federation=federation,
            durable=self._durable,
            preparation=self._preparation,
            params=self._params,
            traces=self._traces,
            profile=self._profile,
            supervisor=self._supervisor,
            grace=self.options.cancel_grace,
        )

    def _choose(
        self, target: Literal["local", "inline", "flare"] | Target, options: LocalOptions | FlareOptions | None
    ) -> Target:
        if isinstance(options, FlareOptions):
            from dfm_async.targets.flare.flare_target import FlareTarget  # sessions on one machine do not load it

            return FlareTarget(options)
        if target == "local":
            return FederationRunner(self.options)
        if target == "inline":
            from dfm_async.targets.inline import InlineTarget  # only here: it loads the runtime of sites

            return InlineTarget(self.options)
        if isinstance(target, str) or not isinstance(target, Target):
            raise ValueError(  # noqa: TRY004 - a wrong name is the usual case
                f"target must be 'local', 'inline', 'flare' or a Target object, not {target!r}"
            )
        return target

    def _open_durable(self, store: Store) -> SessionJobs:
        from dfm_async.session.durable import SessionJobs  # sessions without a store do not load the database

        options = self.options
        spawn, codec = self._supervisor.spawn, self._target.codec
        return SessionJobs(store, self._jobs, spawn, codec, options.keep_summaries, options.checkpoints)

    # connecting and closing

    async def connect(self) -> None:
        """Start the target, and open the store.

        Raises:
            StoreError: the store cannot be opened.
            OSError: the file for spans cannot be written.
            ShippingError: the code of an operation cannot be sent to the processes of its site.
        """
        self._supervisor.begin()
        self._preparation.connected()
        _connected.add(self)
        self._supervisor.when_ended(lambda: _connected.discard(self))
        await self._supervisor.wait_started()

    async def close(self) -> None:
        """End running jobs and the target. Safe to call more than once, and while jobs run.

        Jobs that are kept in memory are aborted. Jobs in a store are interrupted, and can be resumed in another
        session.

        Cancelling this call skips the grace period: operations that are still running are killed before it returns.
        """
        await self._supervisor.close()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "a session of dfm_async is opened in asynchronous code: write 'async with Session(...)', not 'with'. "
            "In a program without asyncio, use 'from dfm_async.sync import Session'"
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing: Python requires it for :meth:`__enter__`."""

    async def __aenter__(self) -> Session:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        stack.enter_context(self._traces.opened())
        if self._durable is not None:
            await stack.enter_async_context(self._durable.opened())
        stack.callback(self._abandon_jobs)  # while the store can still record how they ended
        await stack.enter_async_context(self._target.running(self.federation, self.homesite))

    async def _started(self, stack: contextlib.AsyncExitStack) -> None:
        if self._durable is not None:
            await self._durable.refresh()
            self._durable.serve(self._params)
            if self.options.keep_stored_for is not None:
                self._supervisor.spawn(self._durable.keep_for(self.options.keep_stored_for))
        signatures = [operation.signature.types for operation in self.federation.operations.values()]
        if not all(is_plain(hint) for types in signatures for hint in types.values()):
            self._supervisor.spawn(in_thread(warm, "types"))  # while the first workers start
        stack.enter_context(observed(self.federation.name, self.stats))

    async def _end_jobs(self) -> None:
        await self._target.shutdown("the session was closed", self.options.shutdown_grace)

    def _abandon_jobs(self) -> None:
        """End jobs that the target has left running, because closing was cancelled or failed."""
        for coordinator in self._jobs.coordinators:
            coordinator.shut_down("the session was closed", 0)
            for at in range(len(coordinator.plan.locations)):
                coordinator.abandon(at)

    @property
    def connected(self) -> bool:
        """Whether the session can be used: it is connected, and closing has not begun."""
        return self._supervisor.connected

    @property
    def target(self) -> Target:
        """The target that runs the jobs."""
        return self._target

    # for other parts of the package

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that the session was connected on."""
        return self._supervisor.loop

    def _when_closed(self, callback: Callable[[], object]) -> None:
        """Call back when everything of a connected session has ended."""
        self._supervisor.when_ended(callback)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._supervisor.spawn(work)

    @staticmethod
    def _connected_to(federation: Federation) -> list[Session]:
        """Return the sessions of this process that are connected to a federation."""
        return [session for session in _connected if session.federation is federation]

    def _coordinator(self, job_id: str) -> JobControl | None:
        """Return what runs a job, while it runs here."""
        return self._submission.coordinator(job_id)

    @property
    def _has_store(self) -> bool:
        """Whether jobs are kept in a store."""
        return self._durable is not None

    async def _jobs_interrupted(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - it ends the wait only
        """Wait until there may be interrupted jobs, or for a limited time, and read the store again.

        Raises:
            StoreError: it cannot be read.
        """
        assert self._durable is not None  # noqa: S101 - the caller has checked it
        interrupted = self._durable.interrupted
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await interrupted.wait()
        interrupted.clear()
        try:
            await self._durable.refresh()
        except StoreError:
            interrupted.set()
            raise

    def _claim_service(self) -> None:
        """Reserve the store of this session for a web service.

        Raises:
            StoreError: a service in another process has the same store.
        """
        if self._durable is not None and not self._durable.store.claim_service():
            advice = "Each would list other jobs: serve a store from one process, as with uvicorn --workers 1"
            raise StoreError(self._durable.store.path, "another process serves it already", advice)

    # pipelines

    @keywords_explained
    async def prepare(
        self,
        pipeline: Pipeline[..., R],
        restrict_to_sites: Iterable[str] | str | None = None,
        costs: Literal["configured", "measured"] | Profile = "configured",
    ) -> Plan[R]:
        """Check a pipeline, and return its plan, which can be executed many times.

        Args:
            pipeline: the pipeline.
            restrict_to_sites: the sites that may be used; "homesite" means only the application's own.
            costs: the costs that placement uses: those of the federation ("configured"), those that this session has
                measured with :meth:`profile`, or a profile. Costs that were not measured are those of the federation.

        Raises:
            PipelineError: the pipeline cannot run, or nothing was measured; lists all problems.
        """
        return await self._preparation.prepare(pipeline, restrict_to_sites, costs)

    @overload
    def profile(self, *, cpu: Literal[False] = False) -> Profiling[Profile]: ...
    @overload
    def profile(self, *, cpu: Literal[True]) -> Profiling[CpuProfile]: ...
    @overload
    def profile(self, *, cpu: bool) -> Profiling[Any]: ...
    def profile(self, *, cpu: bool = False) -> Profiling[Any]:
        """Measure the jobs that are executed while the profile is open: ``with session.profile() as profile``.

        The profile contains the costs that placement needs: the time of operations, the size of their inputs and
        outputs, and the time of transfers between sites. With ``cpu=True``, it is a profile of processor time instead:
        the functions that calls spend their time in, by operation and worker, as tables and as a flame graph. Other
        jobs are not measured, and have no overhead. ``async with`` works as well.
        """
        return Profiling(self._profile, CpuProfile()) if cpu else Profiling(self._profile, Profile())

    @keywords_explained
    async def discover(self, pipeline: Pipeline, restrict_to_sites: Iterable[str] | str | None = None) -> Discovery:
        """Query the sites for the valid values of the parameters of operations.

        Every site that can run a node is queried: the site that the call names, those of its ``BestOf``, or all that
        offer the operation. An exception of an advisor is part of the result. Cancelling the call cancels the queries.

        Args:
            pipeline: a pipeline with ``mode="discovery"``. ``Advise()`` queries a parameter, and so do parameters that
                are left out, or whose values come from nodes or from parameters of the pipeline.
            restrict_to_sites: the sites that may be queried; "homesite" means only the application's own.

        Raises:
            PipelineError: the pipeline is invalid; lists all problems.
            JobFailed: a site cannot start, so that it cannot be queried.
            JobAborted: a worker was lost, or the session was closed.
        """
        from dfm_async.session.discovery import discover

        execute = functools.partial(self.execute, label="discovery")
        return await discover(
            pipeline, self.federation, self.homesite, restrict_to_sites, execute=execute, forget=self.forget
        )

    def debug_show_nets(self, plan: Plan) -> dict[str, str]:
        """Return each location's net in readable form."""
        return {str(location): net_text(net) for location, net in zip(plan.locations, plan.nets, strict=True)}

    # jobs

    @keywords_explained
    async def execute(
        self,
        pipeline: Pipeline[..., R] | Plan[R],
        input_params: Params = {},  # noqa: B006 - never changed; an empty set is what most pipelines without parameters want
        autostop: bool = True,
        job_id: str | None = None,
        default_callback: Callback | None = None,
        place_callbacks: Mapping[str, Callback] | None = None,
        on_error: Literal["continue", "stop"] = "continue",
        deadline: float | None = None,
        options: ResultLimits | None = None,
        priority: int = 0,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        label: str | None = None,
        watch: bool = False,
        checkpoint: Literal["marked", "calls"] = "marked",
        start_at: float | datetime | None = None,
    ) -> Job[R]:
        """Submit a job, and return when it runs, or waits in the queue or for its time to start.

        ``LocalOptions`` limits the number of jobs that run at the same time; further jobs wait in the queue. This call
        waits only while the queue is full (``LocalOptions(queue_limit=...)``); cancelling it then withdraws the job.

        Args:
            pipeline: a pipeline, or a plan from :meth:`prepare`, which does not have to be prepared again.
            input_params: a dict is one parameter set, a list several, an async iterable a stream of them (pulled with
                backpressure), None means no set yet: send them with ``job.send_input_params``, and then call
                ``job.send_stop_frame``.
            autostop: whether the job ends with these parameter sets, or stays open for more.
            job_id: the caller's id for the job. Executing the same content again with the same id returns the same job.
            default_callback: called for every result whose place has no callback.
            place_callbacks: callbacks by place, called for the results of the place.
            on_error: whether other work continues after an error, or the job stops immediately.
            deadline: the number of seconds after which the job is aborted; the time in the queue counts, but not the
                time before ``start_at``.
            options: the limits of the job's log.
            priority: waiting jobs run highest priority first, and in the order of their submission if it is equal. Of
                running jobs, those with a higher priority get free threads of a site first.
            concurrency: the maximum number of parameter sets in flight; 256 by default.
            retry: the policy of calls whose operation has none, and the number of times that a parameter set runs again
                after a worker was lost (``on_worker_lost``).
            label: a note about the job, such as its owner; kept with the job, and in the store.
            watch: whether calls of operations are counted, for ``job.activity()``.
            checkpoint: in a session with a store, which calls are recorded at their sites, so that a job that runs
                again does not repeat them: those of operations with ``checkpoint=True``, or all.
            start_at: when the job starts, as a datetime with a time zone, or in seconds since 1970; a time in the past
                means immediately. Until then, the job takes no slot, and can be cancelled. The clock of this machine
                determines the time; on FLARE, the clock of the server. With a store, a job that is interrupted before
                its time waits again when it is resumed.

        Raises:
            PipelineError: the pipeline cannot be prepared.
            ParameterError: parameters are missing, unknown, of the wrong type, or cannot be sent.
            JobExists: a job with this id and different content exists.
            QueueFull: too many jobs wait, and ``LocalOptions(queue_overflow="fail")`` was chosen; or
                ``queue_limit`` jobs wait for their ``start_at``.
        """
        self._supervisor.check_open()
        if not isinstance(autostop, bool):
            raise TypeError(
                f"autostop must be True or False, not {autostop!r}; several parameter sets are one list: "
                "session.execute(pipeline, [{...}, {...}])"
            )
        began = asyncio.get_running_loop().time(), time.time_ns()
        plan = await self._planned(pipeline)
        if not isinstance(priority, int):
            raise TypeError(f"priority must be a whole number, not {priority!r}")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, not {retry!r}")
        if options is not None and not isinstance(options, ResultLimits):
            raise TypeError(f"options must be ResultLimits, not {options!r}")
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label must be a string, not {label!r}")
        if job_id is not None:
            _check_job_id(job_id)
        start = None if start_at is None else moment("start_at", start_at)
        limits = options or self.options.results
        if limits.overflow == "spill" and self._durable is None:
            raise ValueError("overflow='spill' needs a store: Session(..., store='sqlite:///jobs.db')")
        if checkpoint == "calls" and self._durable is None:
            raise ValueError("checkpoint='calls' needs a store: Session(..., store='sqlite:///jobs.db')")
        spec = JobSpec(
            job_id=JobId(job_id or os.urandom(8).hex()),
            created=wall_time(),
            limits=limits,
            on_error=on_error,
            reruns=self._reruns(plan, retry),
            retry=None if retry is None or retry.attempts == 1 else retry,
            window=FRAME_WINDOW if concurrency is None else concurrency,
            grace=self.options.cancel_grace,
            priority=_bounded(priority) if priority else 0,
            deadline=deadline,
            label=label,
            watch=watch,
            checkpoint=checkpoint,
            start_at=start,
            checkpoints="" if self._durable is None else os.urandom(16).hex(),
            code=() if self._durable is None else self._preparation.code(plan),
            measured=self._profile.measuring,
            sampled=self._profile.sampling,
            stored=self._durable is not None,
            fed=autostop and is_stream(input_params),
        )
        return await self._submission.execute(
            plan,
            input_params,
            spec,
            autostop=autostop,
            id_chosen=job_id is not None,
            callbacks=self._callbacks(default_callback, place_callbacks, plan),
            began=began,
        )

    def _reruns(self, plan: Plan, retry: RetryPolicy | None) -> int:
        """Return how often parameter sets may run again after a worker was lost."""
        if retry is None or (retry.attempts != 1 and not retry.on_worker_lost):
            return self._preparation.reruns(plan)
        return retry.on_worker_lost

    def _callbacks(
        self, default: Callback | None, places: Mapping[str, Callback] | None, plan: Plan
    ) -> Callbacks | None:
        """Check the places of callbacks. With ``compat``, those that the plan lacks are never called, as in DFM."""
        if default is None and not places:
            return None
        found = dict(places or {})
        if self.federation.compat:
            found = {place: callback for place, callback in found.items() if place in plan.places}
        check_places(found, plan)
        return Callbacks(self._dispatcher, default, found)

    def schedule(
        self,
        name: str,
        pipeline: Pipeline[..., R] | Plan[R],
        params: TickParams = None,
        *,
        cron: str | None = None,
        every: int | None = None,
        tz: str = "UTC",
        missed: Literal["skip", "once", "all"] = "skip",
        overlap: Literal["allow", "skip"] = "allow",
        **options: Unpack[ScheduleOptions],
    ) -> Schedule[R]:
        """Return a schedule, which starts a job at every tick while it is open: ``async with session.schedule(...)``.

        The id of a job is the name and the time of its tick in UTC, such as ``nightly@2026-11-20T02:00:00Z``. Therefore
        several replicas of a program with one store run each tick once. Cron expressions need the extra ``schedule``.

        Args:
            name: the name of the schedule, the same in all replicas.
            pipeline: what to run.
            params: the parameter sets of all jobs; or a function that gets the time of a tick as a datetime, and
                returns the parameter sets of its job. It should return the same sets for the same time in all replicas.
            cron: the times of ticks: minute, hour, day of month, month and day of week. A time that does not exist,
                because clocks are set forward, is moved to the end of the gap; if a time exists twice, the first one is
                used.
            every: instead of ``cron``, the number of whole seconds between two ticks, counted from the beginning of
                1970.
            tz: the time zone of ``cron``, and of the times that ``params`` gets.
            missed: what happens to ticks that were missed since the last one in the store, or while the machine was
                suspended: "skip" runs none of them, "once" the newest, "all" all of them, at most the newest 100. A
                tick counts as missed if it is more than a minute late, or if the time of the next tick has come.
            overlap: whether a tick starts a job while the previous job has not ended.
            options: options of :meth:`execute` for all jobs.

        Raises:
            TypeError: neither or both of ``cron`` and ``every`` are given, or an option does not exist.
            ValueError: one of the options is invalid.
            ImportError: the extra ``schedule`` is not installed.
        """
        self._supervisor.check_open()
        for option in options:
            if option not in ScheduleOptions.__annotations__:
                raise TypeError(f"schedule() {unexpected(option, ScheduleOptions.__annotations__)}")
        JobSpec(  # which refuses invalid values now, and not at the first tick
            on_error=options.get("on_error", "continue"),
            window=options.get("concurrency") or FRAME_WINDOW,
            deadline=options.get("deadline"),
            checkpoint=options.get("checkpoint", "marked"),
        )
        owner: ScheduleOwner[R] = ScheduleOwner(
            prepare=lambda: self._planned(pipeline),
            check=self._submission.check_params,
            execute=lambda plan, given, job_id, label: self.execute(plan, given, job_id=job_id, label=label, **options),
            reattach=self.reattach,
            find_jobs=lambda label: self.find_jobs(label=label),
            spawn=self._supervisor.spawn,
            opened=self._schedules,
        )
        return Schedule(name, timetable(cron, every, tz), params, missed=missed, overlap=overlap, owner=owner)

    def schedules(self) -> list[ScheduleInfo]:
        """Return the schedules that are open in this session, by name."""
        return [self._schedules[name].info() for name in sorted(self._schedules)]

    async def _planned(self, pipeline: Pipeline[..., R] | Plan[R]) -> Plan[R]:
        if isinstance(pipeline, Plan):
            await self._preparation.check(pipeline)
            return pipeline
        return await self._preparation.prepare(pipeline)

    @keywords_explained
    async def resume(
        self,
        job_id: str,
        priority: int = 0,
        input_params: Params = None,
        watch: bool = False,
        accept_changes: bool = False,
    ) -> Job:
        """Resume an interrupted job: its incomplete parameter sets run again.

        Results that are already in the log are not added again.

        Args:
            job_id: the job.
            priority: as in :meth:`execute`.
            input_params: further parameter sets. If the parameter sets of the job came from a stream that had not
                ended, pass the rest, or an empty list if there are no more.
            watch: as in :meth:`execute`; earlier counts are lost.
            accept_changes: resume even if the code of operations has changed since the job was submitted. Recorded
                values are used in any case.

        Raises:
            JobNotFound: the store has no such job.
            JobOwned: another process runs it.
            PipelineError: the federation does not offer the operations of the job, or their parameters or code have
                changed. The job stays interrupted.
            ParameterError: parameter sets are missing, or do not fit.
            StoreError: the stored job is damaged.
            DfmError: it has ended, or the session has no store.
        """
        self._supervisor.check_open()
        if self._durable is None and self._where == "flare":
            raise DfmError("jobs on FLARE continue without the application: session.reattach(job_id) finds them")
        if self._durable is None:
            raise DfmError("only sessions with a store can resume jobs: Session(..., store='sqlite:///jobs.db')")
        return await self._submission.resume(
            job_id, _bounded(priority), input_params, watch, accept_changes=accept_changes
        )

    async def refresh_jobs(self) -> list[Job]:
        """Read the store again, and return all jobs, including those that other processes have started or ended."""
        self._supervisor.check_open()
        if self._durable is not None:
            await self._durable.refresh()
        else:
            await self._target.refresh()
        return self.jobs()

    async def reattach(
        self,
        job_id: str,
        after: int | None = None,
        default_callback: Callback | None = None,
        place_callbacks: Mapping[str, Callback] | None = None,
    ) -> Job:
        """Return a job by its id, such as one of an earlier session or of another process.

        Args:
            job_id: its id. For an unknown id, the job has the status UNKNOWN, and its methods raise ``JobNotFound``.
            after: the offset after which its iterators and callbacks begin.
            default_callback: as in :meth:`execute`.
            place_callbacks: as in :meth:`execute`.
        """
        self._supervisor.check_open()
        record = await (self._target if self._durable is None else self._durable).find(job_id)
        job = Job(self._submission, job_id, record, after)
        if record is not None:
            callbacks = self._callbacks(default_callback, place_callbacks, record.plan)
            if callbacks is not None:
                job._start_callbacks(self._supervisor.spawn, callbacks)
        return job

    def jobs(self) -> list[Job]:
        """Return the jobs that the session knows, in the order of their submission."""
        records = self._jobs.records
        if self._durable is not None:
            records = [*self._durable.listed(), *records]
        return [Job(self._submission, found.job_id, found) for found in records]

    def infos(self) -> list[JobInfo]:
        """Return the states of all jobs that the session knows; cheaper than ``info()`` of each of :meth:`jobs`."""
        return self._infos()

    def _infos(self, *, active: bool = False) -> list[JobInfo]:
        listed = () if self._durable is None else self._durable.listed()
        waits = self._submission.waits()
        known = (*listed, *self._jobs.summaries, *self._jobs.kept)
        return [self._info(found, waits) for found in known if not (active and found.status.ended)]

    def _info(self, found: JobRecord | JobSummary, waits: Waits) -> JobInfo:
        coordinator = None if found.status.ended else self._jobs.coordinator(found.job_id)
        return job_info(found, coordinator, waits, stored=self._durable is not None)

    def find_jobs(
        self,
        *,
        status: JobStatus | None = None,
        pipeline: str | None = None,
        label: str | None = None,
        since: float | datetime | None = None,
        until: float | datetime | None = None,
        search: str | None = None,
        before: JobInfo | tuple[float, str] | None = None,
    ) -> AsyncGenerator[JobInfo]:
        """Yield the states of the jobs that match all conditions, the newest first.

        With a store, all its jobs are searched, including those of other processes. They are read page by page during
        the loop.

        Args:
            status: their state.
            pipeline: the name of their pipeline.
            label: the label that was passed to ``execute``.
            since: only jobs that were created at this time or later: in seconds since 1970, or as a datetime.
            until: only jobs that were created before this time.
            search: words that must all occur in their id, the name of their pipeline or their label, also within others
                and whatever their case (of ASCII letters).
            before: only jobs older than this one: a job, or its time of creation and its id.

        Raises:
            StoreError: the store cannot be read.
            ValueError: ``status`` is not a ``JobStatus``, a time is invalid, or ``search`` has more than 16 words.
        """
        self._supervisor.check_open()
        wanted = JobFilter(
            status=status,
            pipeline=pipeline,
            label=label,
            since=_seconds("since", since),
            until=_seconds("until", until),
            search=search,
        )
        start = (before.created, before.job_id) if isinstance(before, JobInfo) else before
        return self._find_jobs(wanted, start)

    async def _find_jobs(self, wanted: JobFilter, start: tuple[float, str] | None) -> AsyncGenerator[JobInfo, None]:
        waits = self._submission.waits()
        known = (self._info(found, waits) for found in self._jobs.newest(start, wanted.label))
        following = next(known, None)
        if self._durable is not None:
            async with contextlib.aclosing(self._durable.search(wanted, start)) as stored:
                async for record in stored:
                    while following is not None and _position(following) > (record.created, record.job_id):
                        if wanted.fits(following):
                            yield following
                        following = next(known, None)
                    if wanted.fits(found := self._info(record, waits)):
                        yield found
        while following is not None:
            if wanted.fits(following):
                yield following
            following = next(known, None)

    def changes(self, interval: float = 0.1, *, active: bool = False) -> JobWatch:
        """Return an iterator over the states of all jobs: first one item for each known job, then one for each change.

        A job that is submitted, changes its status, has an error or completes a parameter set yields an item with its
        new state. The iterator yields states, not a history: changes that occur faster than they are read, or than the
        interval, are coalesced. It ends with the session.

        With a store, the iterator also yields the active jobs of other processes, after those of the session. With
        PostgreSQL, it also yields jobs that other processes submit later.

        Args:
            interval: the smallest number of seconds between items of one job.
            active: whether to begin only with the jobs that have not ended.
        """
        self._supervisor.check_open()
        watch = JobWatch(self._jobs, self._jobs.changes.reader(interval), self._infos(active=active))
        if self._durable is not None:
            self._durable.watch()
        return watch

    def health(self, interval: float = 1.0) -> SiteWatch:
        """Return an iterator over the state of the workers of all sites: first the current state, then each change.

        The iterator yields states, not a history, as :meth:`changes` does. Workers without jobs send no heartbeats. The
        iterator ends with the session.

        Args:
            interval: the smallest number of seconds between items.
        """
        self._supervisor.check_open()
        return SiteWatch(self._target, interval)

    async def forget(self, job_id: str) -> None:
        """Delete an ended job with its log, in the store as well.

        Raises:
            JobNotFound: there is no such job.
            JobOwned: another process runs it.
            DfmError: the job has not ended.
        """
        self._supervisor.check_open()
        if self._jobs.coordinator(job_id) is not None:
            raise DfmError(f"job {job_id} has not ended: cancel it, or wait for it")
        if self._durable is not None:
            await self._durable.store.flush()  # its end may not be committed yet, and a task may wait for that
            await self._durable.delete(job_id)
        elif self._jobs.find(job_id) is None:
            raise JobNotFound(job_id)
        else:
            self._jobs.forget(job_id)
        await self._target.forget(job_id)

    async def prune(self, older_than: float | timedelta, status: JobStatus | None = None) -> int:
        """Delete the jobs of the store that ended some time ago, with their logs and checkpoints.

        Jobs are deleted in small batches, so that other jobs continue. Interrupted jobs are kept.

        Args:
            older_than: the minimum time since the end of a job, as a timedelta or in seconds.
            status: only jobs with this status, such as ``JobStatus.FINISHED``.

        Returns: the number of deleted jobs.

        Raises:
            DfmError: the session has no store.
        """
        durable = self._with_store("delete old jobs")
        seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
        check_number("older_than", seconds)
        if status is not None:
            check_status("status", status)
        if status is not None and not status.terminal:
            raise ValueError(f"status must be that of jobs that have ended for good, not {status.value!r}")
        return await durable.prune(time.time() - seconds, status)

    def check_store(self, progress: Callable[[int, int | None], object] | None = None) -> AsyncGenerator[StoreError]:
        """Yield an error for each damaged job, event and parameter set in the store.

        Damage affects one job, not the store.

        Args:
            progress: called with the number of jobs that were checked, and the total number. The jobs are read twice:
                first as rows of the store, when the total number is not yet known (None), and then decoded.

        Raises:
            DfmError: the session has no store.
        """
        return self._with_store("check it").check(progress)

    def _with_store(self, what: str) -> SessionJobs:
        self._supervisor.check_open()
        if self._durable is None:
            raise DfmError(f"only sessions with a store can {what}: Session(..., store='sqlite:///jobs.db')")
        return self._durable

    def stats(self) -> SessionStats:
        """Return the numbers of jobs, the state of the workers, and the sizes of the logs."""
        found = self._target.stats()
        results, result_bytes = self._jobs.held
        return SessionStats(
            running=found.running,
            waiting=found.waiting,
            ended={status.value: count for status, count in self._jobs.totals.items()},
            remembered=len(self._jobs),
            lanes=found.lanes,
            sites=found.sites,
            memory=memory_of(os.getpid()),
            results=results,
            result_bytes=result_bytes,
            yielded=self._jobs.yielded,
            tokens=sum((site.tokens for site in found.sites.values()), found.tokens),
            lag=found.lag,
            unready=(*found.exhausted, *(name for name, site in found.sites.items() if not site.ready)),
            transport=found.transport,
        )

    if not TYPE_CHECKING:  # type checkers refuse unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name, IN_SESSIONS)

    def __repr__(self) -> str:
        state = self._supervisor.state
        if self.connected:
            found, unended = self._target.stats(), len(self._jobs.coordinators)
            waiting = f", {found.waiting} waiting" if found.waiting else ""
            running = f"{found.running} job{'s' * (found.running != 1)} running"
            state = f"{running}{waiting}, {len(self._jobs) - unended} ended"
        return f"<Session of {self.federation.name!r} on {self._where}: {state}>"


def _store(given: str | Store) -> Store:
    if isinstance(given, str):
        return open_store(given)
    if not hasattr(given, "take_over"):
        raise TypeError(f"store must be a URL such as 'sqlite:///jobs.db', or a store, not {given!r}")
    return given


def _bounded(priority: int) -> int:
    return max(-(1 << 31), min(priority, 1 << 31))


def _seconds(name: str, value: float | datetime | None) -> float | None:
    """Return a moment in seconds since 1970."""
    if isinstance(value, datetime):
        return value.timestamp()
    if value is not None:
        check_number(name, value)
    return value


def _position(info: JobInfo) -> tuple[float, str]:
    return info.created, info.job_id


def _check_job_id(job_id: object) -> None:
    if not isinstance(job_id, str):
        raise TypeError(f"job_id must be a string, not {job_id!r}")
    if not job_id or job_id.encode("utf-8", "replace").decode() != job_id:
        raise ValueError(f"job_id must be a non-empty string that can be encoded, not {job_id!r}")
