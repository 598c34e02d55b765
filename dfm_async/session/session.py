"""Sessions: prepare pipelines, execute them, find jobs again."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import logging
import operator
import os
import secrets
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from dfm_async.base.completion import completed
from dfm_async.base.descriptors import OwnLoop
from dfm_async.errors import DfmError, JobExists, JobNotFound, ParameterError, PipelineError, Problem, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Operation
from dfm_async.model.flare import FlareOptions
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.info import JobInfo
from dfm_async.model.limits import ResultLimits
from dfm_async.model.options import LocalOptions
from dfm_async.model.policies import RetryPolicy
from dfm_async.model.stats import SessionStats
from dfm_async.model.status import JobStatus
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.pipeline.statements import walk_statements
from dfm_async.planner.explain import net_text
from dfm_async.planner.plan import Plan, misfits, prepare, retry_policies
from dfm_async.planner.profile import Profile
from dfm_async.planner.types import warm
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import JobActivity
from dfm_async.runtime.faults import cancel_task
from dfm_async.runtime.once import in_thread
from dfm_async.session.callbacks import Callback, CallbackDispatcher, LoopDispatcher
from dfm_async.session.job import Job, check_places, record_info, summary_info
from dfm_async.session.parameters import ParameterSets
from dfm_async.session.profiling import Profiling, SessionProfile
from dfm_async.session.watch import JobWatch, SiteWatch
from dfm_async.store import open_store
from dfm_async.targets.base import AlreadySubmitted, Target
from dfm_async.targets.control import JobControl
from dfm_async.targets.frames import FRAME_WINDOW, Row
from dfm_async.targets.inline import InlineTarget
from dfm_async.targets.jobs import JobTable
from dfm_async.targets.local.runner import FederationRunner
from dfm_async.targets.rules import JobRules
from dfm_async.telemetry.metrics import observed
from dfm_async.telemetry.sinks import Sink, sink_of
from dfm_async.telemetry.traces import Traces
from dfm_async.wire.codec import Codec
from dfm_async.workers.process import memory_of

if TYPE_CHECKING:
    from dfm_async.discovery.discovery import Discovery
    from dfm_async.session.durable import DurableJobs
    from dfm_async.store.base import Store

__all__ = ["Session"]

_log = logging.getLogger(__name__)

_PLANS: Final = 128
_LARGE: Final = 500
"""From how many statements on a pipeline is prepared in a thread."""
_connected: Final[weakref.WeakSet[Session]] = weakref.WeakSet()
_inside: Final[contextvars.ContextVar[Session | None]] = contextvars.ContextVar("dfm_async session", default=None)
"""The session that owns the running task, such as one that calls callbacks, or owns what has started it."""

Params = Mapping[str, Any] | Sequence[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]] | None


class Session:
    """Connects an application to a federation.

    ``async with Session(federation) as session``, or ``await session.connect()`` and ``await session.close()``. It
    may be entered and left in different tasks, and used by many at once.

    Args:
        federation: the sites and their operations; or the path of their file, ``federation.dfm.yaml``.
        homesite: the name of the application's own site.
        target: "local" (worker processes), "inline" (everything on this loop), "flare" (a federation of machines on
            NVIDIA FLARE), or a target object.
        options: how the sites run: ``LocalOptions``; with "flare" where they are: ``FlareOptions``.
        callback_dispatcher: where callbacks run; by default on this loop.
        store: where jobs are written down, so that they outlive the application: ``"sqlite:///jobs.db"``, or a store.
            By default they are kept in memory.
        trace: the file that spans are appended to, one JSON object per line, or a sink for them. The OpenTelemetry SDK
            gets them, too, if it is set up in this process; that needs no setting here.
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
        self.federation = federation
        self.homesite = homesite
        self.options = options.local if isinstance(options, FlareOptions) else options or LocalOptions()
        self._target = self._choose(target, options)
        self._where = target if isinstance(target, str) else type(target).__name__
        self._dispatcher = callback_dispatcher or LoopDispatcher()
        self._jobs = self._target.jobs
        self._lanes = self.options.lanes_for(site.workers for site in federation.sites.values())
        self._plans: OrderedDict[int, tuple[Any, Plan]] = OrderedDict()
        self._planned_at = self._connected_at = -1
        codec = self._target.codec
        self._durable = (
            None if store is None else _durable(store, self._jobs, self._spawn, codec, self.options.keep_summaries)
        )
        self._params = ParameterSets(federation, codec, None if self._durable is None else self._durable.codec)
        self._traces = Traces(sink_of(trace))
        self._profile = SessionProfile(self._traces, homesite)
        self._reruns_of: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._supervisor: asyncio.Task[None] | None = None
        self._owner = 0
        self._group: asyncio.TaskGroup | None = None
        self._closing = asyncio.Event()
        self._starting = False
        self._entrance = _Entrance()
        self._tasks: set[asyncio.Task[None]] = set()

    def _choose(
        self, target: Literal["local", "inline", "flare"] | Target, options: LocalOptions | FlareOptions | None
    ) -> Target:
        if isinstance(options, FlareOptions):
            from dfm_async.targets.flare.target import FlareTarget  # whoever stays on one machine does not load it

            return FlareTarget(options)
        if target == "local":
            return FederationRunner(self.options)
        if target == "inline":
            return InlineTarget(self.options)
        if isinstance(target, str) or not isinstance(target, Target):
            raise ValueError(  # noqa: TRY004 - a wrong name is the usual case
                f"target must be 'local', 'inline', 'flare' or a Target object, not {target!r}"
            )
        return target

    # life

    async def connect(self) -> None:
        """Starts the target, and opens the store.

        Raises:
            StoreError: the store cannot be opened.
            OSError: the file for spans cannot be written.
            ShippingError: the code of an operation cannot be sent to the processes of its site.
        """
        if self._supervisor is not None:
            raise SessionClosed("the session is connected already, or was closed; make a new one")
        self._connected_at = self.federation.revision
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled caller does not ask
        self._supervisor = asyncio.create_task(self._supervise(ready), name="dfm_async session")
        self._owner = os.getpid()
        self._loop = OwnLoop(self._supervisor.get_loop())
        self._supervisor.add_done_callback(lambda _: self._loop.release())
        _connected.add(self)
        self.when_closed(lambda: _connected.discard(self))
        try:
            await asyncio.shield(ready)
        except asyncio.CancelledError:
            await completed(self.close())
            raise
        except BaseException:
            self._closing.set()
            await asyncio.wait([self._supervisor])
            self._supervisor.exception()
            raise

    async def close(self) -> None:
        """Ends running jobs and the target. Safe to call more than once, also while jobs run.

        Jobs that are kept in memory are aborted. Those that are written down are interrupted, and can go on in
        another session.

        Cancelling it skips the grace period of what still runs: it then ends by force, before this returns.
        """
        self._closing.set()
        supervisor = self._supervisor
        if supervisor is None or self._owner != os.getpid():  # a forked child has nothing to close
            return
        if self._starting:  # the store may be locked, or a site may wait for something that never comes
            self._starting = False
            supervisor.cancel()
        try:
            await asyncio.wait([supervisor])
        except asyncio.CancelledError:
            if _inside.get() is not self:  # the supervisor waits for its own tasks: they cannot wait for it
                supervisor.cancel()
                await completed(_settled(supervisor))
            raise
        await _settled(supervisor)

    def __enter__(self) -> NoReturn:
        raise TypeError("a session is opened in asynchronous code: write 'async with Session(...)', not 'with'")

    def __exit__(self, *_: object) -> None:
        """Is never called: it is needed for :meth:`__enter__` to be."""

    async def __aenter__(self) -> Session:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _supervise(self, ready: asyncio.Future[None]) -> None:
        """Owns the target and all tasks of the session, so that others may enter and leave where they like."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(self._traces.opened())
                await self._start(stack)
                group = self._group = await stack.enter_async_context(asyncio.TaskGroup())
                if self._durable is not None:
                    await self._durable.refresh()
                if any(operation.signature.types for operation in self.federation.operations.values()):
                    group.create_task(in_thread(warm, "types"))  # while the first workers start
                stack.enter_context(observed(self.federation.name, self.stats))
                ready.set_result(None)
                try:
                    await self._closing.wait()
                    await self._end_jobs()
                finally:
                    for task in self._tasks:
                        cancel_task(task)
        except BaseException as error:  # noqa: BLE001 - goes to whoever waits for connect, or to close
            if not ready.done():
                ready.set_exception(_unwrapped(error))
                return
            raise _unwrapped(error) from None
        finally:
            self._group = None
            self._closing.set()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        closed = SessionClosed("the session was closed while it started")
        if self._closing.is_set():
            raise closed
        self._starting = True
        try:
            if self._durable is not None:
                await stack.enter_async_context(self._durable.opened())
            stack.callback(self._abandon_jobs)  # while the store can still record how they ended
            await stack.enter_async_context(self._target.running(self.federation, self.homesite))
        except asyncio.CancelledError:
            if self._closing.is_set():
                raise closed from None
            raise
        finally:
            self._starting = False

    def _abandon_jobs(self) -> None:
        """End jobs that the target has left running, because closing was cancelled or failed."""
        for coordinator in self._jobs.coordinators:
            coordinator.shut_down("the session was closed", 0)
            for at in range(len(coordinator.plan.locations)):
                coordinator.abandon(at)

    async def _end_jobs(self) -> None:
        reason, grace = "the session was closed", self.options.shutdown_grace
        await self._target.shutdown(reason, grace)
        await self._entrance.empty()  # whoever was on the way in has been sent away, or got in
        await self._target.shutdown(reason, grace)

    @property
    def connected(self) -> bool:
        """Whether the session can be used: it is connected, and nobody has begun to close it."""
        return self._group is not None and not self._closing.is_set()

    def _check_open(self) -> asyncio.TaskGroup:
        if self._supervisor is not None and self._owner != os.getpid():
            raise SessionClosed(f"the session belongs to process {self._owner}, which forked this one; make a new one")
        if self._group is None or self._closing.is_set():
            state = "is not connected; use 'async with Session(...)'" if self._supervisor is None else "was closed"
            raise SessionClosed(f"the session {state}")
        return self._group

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(_inside.set, self)
        task: asyncio.Task[None] = self._check_open().create_task(_guarded(work), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled early has not begun it
        return task

    @property
    def traces(self) -> Traces:
        """What begins its traces; for services whose requests belong to them."""
        return self._traces

    # for those who test

    @property
    def target(self) -> Target:
        """What runs the sites."""
        return self._target

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it was connected on.

        Raises:
            SessionClosed: it was not connected.
        """
        if self._supervisor is None:
            raise SessionClosed("the session is not connected; use 'async with Session(...)'")
        return self._supervisor.get_loop()

    def when_closed(self, callback: Callable[[], object]) -> None:
        """Calls back when everything of a connected session has ended."""
        if self._supervisor is not None:
            self._supervisor.add_done_callback(lambda _: callback())

    @staticmethod
    def connected_to(federation: Federation) -> list[Session]:
        """The sessions of this process that are connected to a federation."""
        return [session for session in _connected if session.federation is federation]

    # pipelines

    async def prepare(
        self,
        pipeline: Pipeline,
        restrict_to_sites: Iterable[str] | str | None = None,
        costs: Literal["configured", "measured"] | Profile = "configured",
    ) -> Plan:
        """Checks a pipeline and makes a plan of it, which can be executed many times.

        Args:
            pipeline: the pipeline.
            restrict_to_sites: the sites that may be used; "homesite" means only the application's own.
            costs: what placement reckons with: what the federation says ("configured"), or what this session has
                measured with :meth:`profile`, or a given profile. What was not measured counts as configured.

        Raises:
            PipelineError: with everything that is wrong; also if nothing was measured.
        """
        return await self._prepare(pipeline, restrict_to_sites, self._measured(pipeline, costs))

    def profile(self) -> Profiling:
        """Measures the jobs that are executed while it is open: ``with session.profile() as profile``.

        It measures how long operations take, how large their inputs and outputs are, and how long values take from
        site to site. Other jobs are not measured, and cost nothing more. ``async with`` works, too.
        """
        return Profiling(self._profile)

    def _measured(self, pipeline: Pipeline, costs: Literal["configured", "measured"] | Profile) -> Profile | None:
        if isinstance(costs, Profile):
            return costs
        if costs == "configured":
            return None
        if costs != "measured":
            raise ValueError(f"costs must be 'configured', 'measured' or a Profile, not {costs!r}")
        found = self._profile.measured()
        if not found:
            message = "nothing was measured: execute jobs in a block 'with session.profile()', or give a profile"
            raise PipelineError(pipeline.name, [Problem("costs", message)])
        return found

    async def _prepare(
        self,
        pipeline: Pipeline,
        restrict_to_sites: Iterable[str] | str | None = None,
        measured: Profile | None = None,
    ) -> Plan:
        if not isinstance(pipeline, Pipeline):
            raise TypeError(_not_a_pipeline(pipeline))
        revision = self.federation.revision
        if self._planned_at != revision:  # what operations are, and where, may be another
            self._planned_at = revision
            self._plans.clear()
        body = pipeline.body
        usual = restrict_to_sites is None and measured is None
        known = self._plans.get(id(body)) if usual else None
        if known is not None and known[0] is body:
            return known[1]

        def make() -> Plan:
            return prepare(pipeline, self.federation, self.homesite, restrict_to_sites, self._lanes, measured)

        # A large one takes seconds, in which others of this loop want their turn.
        large = next(islice(walk_statements(body), _LARGE, None), None) is not None
        plan = await in_thread(make, "prepare") if large else make()
        await self._check_possible(plan)
        if usual and self._planned_at == revision:
            self._plans[id(body)] = (body, plan)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return plan

    async def _check_possible(self, plan: Plan) -> None:
        problems = await self._target.refusals(plan)
        if problems:
            raise PipelineError(plan.pipeline, problems)

    async def discover(self, pipeline: Pipeline, restrict_to_sites: Iterable[str] | str | None = None) -> Discovery:
        """Asks the sites which values the parameters of operations may have.

        Every site that can run a node is asked: the one that it is fixed to, those of its ``BestOf``, or all that offer
        the operation. What an advisor raises is a part of the answer. Cancelling it cancels the asking.

        Args:
            pipeline: a pipeline with ``mode="discovery"``. ``Advise()`` asks for a parameter, and so do parameters that
                are left out, or whose values come from nodes or from parameters of the pipeline.
            restrict_to_sites: the sites that may be asked; "homesite" means only the application's own.

        Raises:
            PipelineError: with everything that is wrong.
            JobFailed: a site cannot start, so that nobody is there to be asked.
            JobAborted: a worker was lost, or the session was closed.
        """
        from dfm_async.session.discovery import discover

        return await discover(self, pipeline, restrict_to_sites)

    def debug_show_nets(self, plan: Plan) -> dict[str, str]:
        """Gives each location's net in readable form."""
        return {location: net_text(net) for location, net in zip(plan.locations, plan.nets, strict=True)}

    # jobs

    async def execute(
        self,
        pipeline: Pipeline | Plan,
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
    ) -> Job:
        """Starts a job and returns when it runs, or waits for its turn.

        As many jobs run at the same time as ``LocalOptions`` says; further ones wait. It waits itself only while more
        jobs wait than ``LocalOptions(queue_limit=...)`` allows; cancelling it then withdraws the job.

        Args:
            pipeline: what to run; a plan saves the preparation.
            input_params: a dict is one parameter set, a list several, an async iterable a stream of them (pulled with
                backpressure), None none yet: they come by ``job.send_input_params``, until ``job.send_stop_frame``.
            autostop: whether the job ends with these parameter sets, or stays open for more.
            job_id: the caller's id for the job. Executing the same again with the same id gives the same job.
            default_callback: is called for every result that no place callback takes.
            place_callbacks: are called for the results of their place.
            on_error: whether other work goes on after an error, or the job stops at once.
            deadline: after how many seconds the job is aborted; the time that it waits counts.
            options: what the job's log may hold.
            priority: jobs that wait are run highest priority first, and among equals in the order they came. Of
                jobs that run, those with a higher priority get free threads of a site first.
            concurrency: how many parameter sets are under way at the same time; 256 if it is not given.
            retry: ``RetryPolicy(on_worker_lost=n)``: how often a parameter set runs again after a worker was lost.
            label: a note about the job, such as whose it is; kept with it, also in the store.
            watch: whether calls of operations are counted, for ``job.activity()``.

        Raises:
            PipelineError: the pipeline cannot be prepared.
            ParameterError: parameters are missing, unknown, of the wrong type, or cannot be sent.
            JobExists: the job id is that of another job.
            QueueFull: too many jobs wait, and ``LocalOptions(queue_overflow="fail")`` was chosen.
        """
        self._check_open()
        began, start = asyncio.get_running_loop().time(), time.time_ns()
        if isinstance(pipeline, Plan):
            plan = pipeline
            if self.federation.revision != self._connected_at:  # it may be older than what was defined since
                self._check_offered(plan)
            await self._check_possible(plan)
        else:
            plan = await self._prepare(pipeline)
            self._check_open()  # preparing may have taken a while
        if on_error not in ("continue", "stop"):
            raise ValueError(f"on_error must be 'continue' or 'stop', not {on_error!r}")
        if deadline is not None and deadline <= 0:
            raise ValueError(f"the deadline must be positive, not {deadline}")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        if not isinstance(priority, int):
            raise TypeError(f"priority must be a whole number, not {priority!r}")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, not {retry!r}")
        if retry is not None and retry != RetryPolicy(attempts=1, on_worker_lost=retry.on_worker_lost):
            raise ValueError(
                "the retry of a job is only about lost workers, RetryPolicy(attempts=1, on_worker_lost=n), but this is "
                f"{retry!r}. attempts, backoff and on belong to an operation, @site.operation(retry=...), or to a "
                "call in the pipeline, operation(..., retry=...)"
            )
        if options is not None and not isinstance(options, ResultLimits):
            raise TypeError(f"options must be ResultLimits, not {options!r}")
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label must be a string, not {label!r}")
        if job_id is not None:
            _check_job_id(job_id)
        place_callbacks = self._placed(place_callbacks, plan)
        limits = options or self.options.results
        if limits.overflow == "spill" and self._durable is None:
            raise ValueError("overflow='spill' needs a store: Session(..., store='sqlite:///jobs.db')")
        stream = input_params if isinstance(input_params, AsyncIterable) else None
        given = stream is None and input_params is not None
        rows = await self._params.pack_in_turns(plan, input_params) if given else []  # type: ignore[arg-type]
        fingerprint = None if job_id is None else self._params.fingerprint(plan, input_params)
        record = JobRecord(JobId(job_id or secrets.token_hex(8)), JobNumber(-1), plan, limits)
        record.fingerprint, record.label = fingerprint, label
        record.activity = JobActivity() if watch else None
        if job_id is not None and (known := self._jobs.find(job_id)) is not None:
            return self._same(known, record)
        rules = JobRules(
            on_error=on_error,
            reruns=self._reruns(plan) if retry is None else retry.on_worker_lost,
            window=concurrency or FRAME_WINDOW,
            grace=self.options.cancel_grace,
        )
        coordinator = self._coordinate(record, rules)
        coordinator.add(rows)
        if autostop and stream is None and input_params is not None:
            coordinator.stop()
        with self._entrance, self._traces.execution(start, plan.pipeline) as execution:
            if self._durable is not None and not await self._write_down(
                coordinator, rows, unique=job_id is None, fed=stream is not None and autostop
            ):
                return self._same(await self._durable.find(record.job_id), record)
            job = Job(self, record.job_id, record)
            if execution is not None:
                coordinator.trace = execution.job(record.job_id, plan.pipeline, plan.sites_at)
                self._profile.watch(coordinator)
            try:
                self._check_open()
                job.start_callbacks(self._spawn, self._dispatcher, default_callback, place_callbacks)
                if deadline is not None:
                    coordinator.deadline(deadline, began)
                if stream is not None:
                    self._spawn(self._feed(stream, coordinator, autostop))
                await self._target.submit(coordinator, priority)
            except AlreadySubmitted:
                return self._same(await self._target.find(record.job_id), record)
            except BaseException:
                await completed(self._withdraw(coordinator))
                raise
        return job

    def _same(self, known: JobRecord | None, wanted: JobRecord) -> Job:
        """The job that was submitted before with the same id and the same content."""
        if known is None or known.fingerprint != wanted.fingerprint:
            raise JobExists(wanted.job_id)
        return Job(self, known.job_id, known)

    def _coordinate(self, record: JobRecord, rules: JobRules) -> JobControl:
        return self._target.coordinate(record, rules, functools.partial(self._params.pack, record.plan))

    async def _write_down(self, coordinator: JobControl, rows: list[Row], *, unique: bool, fed: bool) -> bool:
        """Writes a new job to the store; False if its id is taken. Whoever cancels this leaves nothing there."""
        assert self._durable is not None  # noqa: S101 - the caller has seen it
        durable, stopped = self._durable, coordinator.frames.stopped
        # Two with one id must not meet: the second has to find the first.
        async with contextlib.AsyncExitStack() if unique else durable.lock:
            work = durable.create(coordinator.record, coordinator.rules, rows, stopped=stopped, fed=fed)
            undo = functools.partial(self._uncreate, coordinator.record)
            return await completed(work, undo, lambda _: durable.withdraw(coordinator.record))

    async def _uncreate(self, record: JobRecord, created: bool) -> None:
        """Deletes a job from the store whose submission was cancelled."""
        assert self._durable is not None  # noqa: S101 - the caller has seen it
        if created:
            self._jobs.forget(record.job_id)
            await self._durable.forget(record)

    async def _withdraw(self, coordinator: JobControl) -> None:
        """Takes back a job that was not submitted after all."""
        record = coordinator.record
        self._jobs.forget(record.job_id)
        if self._durable is not None:
            await self._durable.forget(record)
        coordinator.halt(JobStatus.ABORTED, "it was not submitted", coordinator.rules.grace)

    async def resume(self, job_id: str, priority: int = 0, input_params: Params = None, watch: bool = False) -> Job:
        """Goes on with a job that was interrupted: the parameter sets that were not done run again.

        Results that the log has already are not added again.

        Args:
            job_id: the job.
            priority: as in :meth:`execute`.
            input_params: further parameter sets. A job whose parameter sets came as a stream that had not ended needs
                the rest of them, or an empty list if there is none.
            watch: as in :meth:`execute`; what was counted before is not known any more.

        Raises:
            JobNotFound: the store has no such job.
            JobOwned: another process runs it.
            PipelineError: the federation does not offer what it needs, or operations take other parameters now. The job
                stays interrupted.
            ParameterError: parameter sets are missing, or do not fit.
            StoreError: what is stored of it is damaged.
            DfmError: it has ended, or the session has no store.
        """
        self._check_open()
        if self._durable is None and self._where == "flare":
            raise DfmError("jobs on FLARE go on without the application: session.reattach(job_id) finds them")
        if self._durable is None:
            raise DfmError("only sessions with a store can resume jobs: Session(..., store='sqlite:///jobs.db')")
        stream = input_params if isinstance(input_params, AsyncIterable) else None
        start = time.time_ns()
        with self._entrance:
            async with self._durable.lock:
                running = self._jobs.coordinator(job_id)
                if running is not None:
                    return Job(self, job_id, running.record)
                known = await self._durable.find(job_id)
                rows: list[Row] = []
                if known is not None:
                    self._check_offered(known.plan)
                    if stream is None and input_params is not None:
                        rows = self._params.pack(known.plan, input_params)  # type: ignore[arg-type]
                work = self._durable.take_over(job_id, more=input_params is not None)
                left = await completed(work, self._durable.give_back, asyncio.Task.cancel)
                left.record.activity = JobActivity() if watch else None
                coordinator = self._coordinate(left.record, left.rules(self.options.cancel_grace))
                coordinator.resume(left.rows, left.frames, left.history.seen, left.history.failed)
                coordinator.frames.stopped = left.stopped
                coordinator.add(rows)
                if left.options.fed and stream is None:
                    coordinator.stop()
            plan = left.record.plan
            with self._traces.execution(start, plan.pipeline, resumed=True) as execution:
                if execution is not None:
                    coordinator.trace = execution.job(job_id, plan.pipeline, plan.sites_at)
                    self._profile.watch(coordinator)
                try:
                    self._check_open()
                    if stream is not None:
                        self._spawn(self._feed(stream, coordinator, left.options.fed))
                    await self._target.submit(coordinator, priority)
                except BaseException:
                    coordinator.shut_down("it was not submitted again", coordinator.rules.grace)
                    raise
        return Job(self, job_id, left.record)

    def _check_offered(self, plan: Plan) -> None:
        problems = misfits(plan, self.federation)
        if plan.homesite != self.homesite:
            text = f"the federation {self.federation.name!r} has no homesite {plan.homesite!r}"
            problems.append(Problem("", text))
        if problems:
            raise PipelineError(plan.pipeline, problems)

    def claim_service(self) -> None:
        """Makes this the one session on its store that a web service serves; what ``Service`` calls.

        Raises:
            StoreError: a service in another process has the same store.
        """
        if self._durable is not None:
            self._durable.claim_service()

    async def check_steerable(self, job_id: str) -> None:
        """Raises ``JobOwned`` if another process runs a job."""
        if self._durable is not None:
            await self._durable.check_steerable(job_id)

    async def abort_interrupted(self, job_id: str, reason: str) -> None:
        """Ends an interrupted job for good; what :meth:`Job.cancel` calls."""
        self._check_open()
        if self._durable is not None:
            await self._durable.abort(job_id, reason)

    async def refresh_jobs(self) -> list[Job]:
        """Reads the store again, and gives all jobs: also those that other processes have started or ended."""
        self._check_open()
        if self._durable is not None:
            await self._durable.refresh()
        else:
            await self._target.refresh()
        return self.jobs()

    def _reruns(self, plan: Plan) -> int:
        """How often parameter sets may run again after a worker was lost: as often as every operation allows."""
        key = (plan.hash, self.federation.revision)
        found = self._reruns_of.get(key)
        if found is None:
            policies = retry_policies(plan, self.federation)
            found = min((policy.on_worker_lost if policy else 0 for policy in policies), default=0)
            self._reruns_of[key] = found
            if len(self._reruns_of) > _PLANS:
                self._reruns_of.popitem(last=False)
        return found

    async def _feed(self, stream: AsyncIterable[Mapping[str, Any]], coordinator: JobControl, autostop: bool) -> None:
        """Pulls parameter sets from the application as fast as the job takes them."""
        try:
            async for params in stream:
                coordinator.add(self._params.pack(coordinator.plan, params))
                await coordinator.room()
                if not coordinator.accepts:
                    return
        except DfmError as error:
            coordinator.fail(error)
        except Exception as error:  # noqa: BLE001 - the application's own iterator: its failure is the job's
            failed = ParameterError([f"the stream of parameters raised {type(error).__name__}: {error}"])
            failed.__cause__ = error
            coordinator.fail(failed)
        else:
            if autostop:
                coordinator.stop()
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                try:
                    await close()
                except Exception:  # noqa: BLE001 - the job has what it needs, or has failed already
                    _log.warning("the stream of parameters raised when it was closed", exc_info=True)

    async def send_params(self, job_id: str, coordinator: JobControl | None, params: Any) -> None:
        """Adds parameter sets to a job; what :meth:`Job.send_input_params` calls."""
        if coordinator is None and self._durable is not None:
            await self._durable.check_steerable(job_id)
        if coordinator is None or not coordinator.accepts:
            raise ParameterError(["the job takes no further parameter sets: it was told to stop, or has ended"])
        rows = await self._params.pack_in_turns(coordinator.plan, params)
        for start in range(0, len(rows), 64):
            await coordinator.room()
            if not coordinator.accepts:
                raise ParameterError(["the job ended before it took all parameter sets"])
            coordinator.add(rows[start : start + 64])
        if self._durable is not None:
            await self._durable.flush()

    async def reattach(
        self,
        job_id: str,
        after: int | None = None,
        default_callback: Callback | None = None,
        place_callbacks: Mapping[str, Callback] | None = None,
    ) -> Job:
        """Finds a job again.

        Args:
            job_id: its id. An unknown one gives a job with status UNKNOWN, whose methods raise ``JobNotFound``.
            after: where its iterators and callbacks begin: behind this offset.
            default_callback: as in :meth:`execute`.
            place_callbacks: as in :meth:`execute`.
        """
        self._check_open()
        record = await (self._target if self._durable is None else self._durable).find(job_id)
        job = Job(self, job_id, record, after)
        if record is not None:
            placed = self._placed(place_callbacks, record.plan)
            job.start_callbacks(self._spawn, self._dispatcher, default_callback, placed)
        return job

    def _placed(self, callbacks: Mapping[str, Callback] | None, plan: Plan) -> Mapping[str, Callback] | None:
        """Checks the places of callbacks. With ``compat``, those that the plan lacks are never called, as in DFM."""
        if callbacks and self.federation.compat:
            return {place: callback for place, callback in callbacks.items() if place in plan.places}
        if callbacks:
            check_places(callbacks, plan)
        return callbacks

    def jobs(self) -> list[Job]:
        """Gives the jobs that the session knows, in the order of their submission."""
        records = self._jobs.records
        if self._durable is not None:
            records = [*self._durable.listed(), *records]
        return [Job(self, found.job_id, found) for found in records]

    def infos(self) -> list[JobInfo]:
        """Gives what is known of all jobs that the session knows; cheaper than asking each of :meth:`jobs`."""
        durable, jobs = self._durable, self._jobs
        listed = [] if durable is None else durable.listed()
        return [
            *(record_info(found, None) for found in listed),
            *(summary_info(found, readable=durable is not None) for found in jobs.summaries),
            *(
                record_info(found, None if found.status.ended else jobs.coordinator(found.job_id))
                for found in jobs.kept
            ),
        ]

    def recent(self, before: tuple[float, str] | None = None) -> Iterator[JobInfo]:
        """Gives what is known of the jobs, the newest first, one by one; jobs may come and go between two of them.

        Args:
            before: when a job was created, and its id: only older ones are given.
        """
        durable, jobs = self._durable, self._jobs
        stored: Iterable[JobRecord] = () if durable is None else durable.newest(before)
        order = operator.attrgetter("created", "job_id")
        for found in heapq.merge(jobs.newest(before), stored, key=order, reverse=True):
            if isinstance(found, JobRecord):
                yield record_info(found, None if found.status.ended else jobs.coordinator(found.job_id))
            else:
                yield summary_info(found, readable=durable is not None)

    def changes(self, interval: float = 0.1) -> JobWatch:
        """Gives an iterator over what happens to all jobs: first one item for each that is known, then for each change.

        A job that comes, changes its state, fails at something or is done with a parameter set gives an item that tells
        how it is then. It is a state and not a history: changes that come faster than they are read, or than the
        interval, are joined. It ends with the session.

        Args:
            interval: how many seconds lie at least between looks at the jobs.
        """
        self._check_open()
        return JobWatch(self._jobs, self._jobs.changes.reader(interval), self.infos())

    def health(self, interval: float = 1.0) -> SiteWatch:
        """Gives an iterator over how the workers of all sites are: first as they are now, then whenever that changes.

        It is a state and not a history, as with :meth:`changes`. Workers that have no jobs say nothing. It ends with
        the session.

        Args:
            interval: how many seconds lie at least between looks at the workers.
        """
        self._check_open()
        return SiteWatch(self._target, interval)

    def coordinator(self, job_id: str) -> JobControl | None:
        """The one who runs a job, while it runs here; what :class:`Job` steers it by."""
        return self._jobs.coordinator(job_id)

    async def forget(self, job_id: str) -> None:
        """Forgets a job that has ended, with its log, also in the store.

        Raises:
            JobNotFound: it is not known.
            JobOwned: another process runs it.
            DfmError: it runs.
        """
        self._check_open()
        if self._jobs.coordinator(job_id) is not None:
            raise DfmError(f"job {job_id} has not ended: cancel it, or wait for it")
        if self._durable is not None:
            await self._durable.flush()  # its end may not be written yet, and somebody may wait for that
            await self._durable.delete(job_id)
        elif self._jobs.find(job_id) is None:
            raise JobNotFound(job_id)
        self._jobs.forget(job_id)
        await self._target.forget(job_id)

    def stats(self) -> SessionStats:
        """Tells what runs, what waits, how the workers are, and what the logs hold."""
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
            way=found.way,
        )

    def __repr__(self) -> str:
        if self._supervisor is None:
            state = "not connected"
        elif self._group is None or self._closing.is_set():
            state = "closed"
        else:
            found, unended = self._target.stats(), len(self._jobs.coordinators)
            waiting = f", {found.waiting} waiting" if found.waiting else ""
            running = f"{found.running} job{'s' * (found.running != 1)} running"
            state = f"{running}{waiting}, {len(self._jobs) - unended} ended"
        return f"<Session of {self.federation.name!r} on {self._where}: {state}>"


def _durable(
    store: str | Store, jobs: JobTable[Any], spawn: Callable[[Any], asyncio.Task[None]], codec: Codec, listed: int
) -> DurableJobs:
    from dfm_async.session.durable import DurableJobs  # whoever has no store does not load the database

    if not isinstance(store, str) and not hasattr(store, "take_over"):
        raise TypeError(f"store must be a URL such as 'sqlite:///jobs.db', or a store, not {store!r}")
    return DurableJobs(open_store(store) if isinstance(store, str) else store, jobs, spawn, codec, listed)


class _Entrance:
    """Counts those who are about to submit a job, so that closing can wait for them."""

    def __init__(self) -> None:
        self._inside = 0
        self._left: asyncio.Future[None] | None = None

    def __enter__(self) -> None:
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside and self._left is not None and not self._left.done():
            self._left.set_result(None)

    async def empty(self) -> None:
        """Waits until nobody is inside."""
        while self._inside:
            self._left = asyncio.get_running_loop().create_future()
            await self._left


def _not_a_pipeline(given: object) -> str:
    if not isinstance(given, Operation):
        return f"expected a Pipeline or a Plan, not {given!r}"
    arguments = ", ".join(f"PlaceParam({name!r})" for name in given.signature.parameters.parameters)
    example = f"with Pipeline() as pipeline: Yield({given.name}({arguments}))"
    return (
        f"expected a Pipeline or a Plan, not the operation {given.name!r}: call it in a pipeline, such as '{example}'"
    )


def _check_job_id(job_id: object) -> None:
    if not isinstance(job_id, str):
        raise TypeError(f"job_id must be a string, not {job_id!r}")
    if not job_id or job_id.encode("utf-8", "replace").decode() != job_id:
        raise ValueError(f"job_id must be a text that is not empty and can be encoded, not {job_id!r}")


async def _settled(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task, and raise its error; that it was cancelled is none."""
    await asyncio.wait([task])
    error = None if task.cancelled() else task.exception()
    if error is not None:
        raise error


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    """Keeps a fault of one task from ending the session with everything in it."""
    try:
        await work
    except Exception:  # noqa: BLE001 - a fault of ours, told as loudly as can be
        _log.exception("a task of the session failed")


def _unwrapped(error: BaseException) -> BaseException:
    """A group with one error in it is that error, for those who look from outside."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
