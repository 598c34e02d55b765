"""Sessions: prepare pipelines, execute them, find jobs again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal

from dfm_async.errors import DfmError, EncodingError, ParameterError, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.model.ids import JobId, JobNumber
from dfm_async.model.limits import ResultLimits
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.planner.explain import net_text
from dfm_async.planner.plan import Plan, prepare
from dfm_async.planner.types import validate, warm
from dfm_async.results.record import JobRecord
from dfm_async.results.retention import Retention
from dfm_async.runtime.once import in_thread
from dfm_async.session.callbacks import Callback, CallbackDispatcher, LoopDispatcher
from dfm_async.session.job import Job
from dfm_async.targets.base import Target
from dfm_async.targets.coordinator import Coordinator, Row
from dfm_async.targets.inline import InlineTarget
from dfm_async.targets.local.target import LocalTarget
from dfm_async.wire.codec import Codec

__all__ = ["Session"]

_log = logging.getLogger(__name__)

_PLANS: Final = 128
_PROBLEMS: Final = 10

Params = Mapping[str, Any] | Sequence[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]] | None


class Session:
    """Connects an application to a federation.

    ``async with Session(federation) as session``, or ``await session.connect()`` and ``await session.close()``. It
    may be entered and left in different tasks, and used by many at once.

    Args:
        federation: the sites and their operations.
        homesite: the name of the application's own site.
        target: "local" (worker processes), "inline" (everything on this loop), or a target object.
        options: how the sites run.
        callback_dispatcher: where callbacks run; by default on this loop.
    """

    def __init__(
        self,
        federation: Federation,
        homesite: str = "home",
        target: Literal["local", "inline"] | Target = "local",
        options: LocalOptions | None = None,
        callback_dispatcher: CallbackDispatcher | None = None,
    ) -> None:
        self.federation = federation
        self.homesite = homesite
        self.options = options or LocalOptions()
        self._target = self._choose(target)
        self._dispatcher = callback_dispatcher or LoopDispatcher()
        self._records: OrderedDict[str, JobRecord] = OrderedDict()
        self._coordinators: dict[str, Coordinator] = {}
        self._finished: deque[str] = deque()
        self._retention = Retention()
        self._plans: OrderedDict[int, tuple[Any, Plan]] = OrderedDict()
        self._hints: OrderedDict[str, dict[str, list[Any]]] = OrderedDict()
        self._supervisor: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def _choose(self, target: Literal["local", "inline"] | Target) -> Target:
        if target == "local":
            return LocalTarget(self.options)
        if target == "inline":
            return InlineTarget(self.options.shutdown_grace)
        if isinstance(target, str) or not isinstance(target, Target):
            raise ValueError(  # noqa: TRY004 - a wrong name is the usual case
                f"target must be 'local', 'inline' or a Target object, not {target!r}"
            )
        return target

    # life

    async def connect(self) -> None:
        """Starts the target.

        Raises:
            ShippingError: the code of an operation cannot be sent to the processes of its site.
        """
        if self._supervisor is not None:
            raise SessionClosed("the session is connected already, or was closed; make a new one")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(ready), name="dfm_async session")
        try:
            await asyncio.shield(ready)
        except asyncio.CancelledError:
            await self.close()
            if ready.done() and not ready.cancelled():
                ready.exception()  # nobody else will ask
            raise
        except BaseException:
            self._closing.set()
            await asyncio.wait([self._supervisor])
            self._supervisor.exception()
            raise

    async def close(self) -> None:
        """Ends running jobs and the target. Safe to call more than once, also while jobs run."""
        self._closing.set()
        if self._supervisor is not None:
            await asyncio.wait([self._supervisor])
            if not self._supervisor.cancelled():
                error = self._supervisor.exception()
                if error is not None:
                    raise error

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
            async with self._target.running(self.federation, self.homesite), asyncio.TaskGroup() as group:
                self._group = group
                if any(operation.signature.types for operation in self.federation.operations.values()):
                    group.create_task(in_thread(warm, "types"))  # while the first workers start
                ready.set_result(None)
                try:
                    await self._closing.wait()
                    await self._end_jobs()
                finally:
                    for task in self._tasks:
                        task.cancel()
        except BaseException as error:  # noqa: BLE001 - goes to whoever waits for connect, or to close
            if not ready.done():
                ready.set_exception(_unwrapped(error))
                return
            raise _unwrapped(error) from None
        finally:
            self._group = None
            self._closing.set()
            for coordinator in list(self._coordinators.values()):
                coordinator.halt(JobStatus.ABORTED, "the session has ended", 0)
                for at in range(len(coordinator.plan.locations)):
                    coordinator.abandon(at)

    async def _end_jobs(self) -> None:
        grace = self.options.shutdown_grace
        running = list(self._coordinators.values())
        for coordinator in running:
            coordinator.halt(JobStatus.ABORTED, "the session was closed", grace)
        for coordinator in running:
            await coordinator.record.completion_event.wait()

    def _check_open(self) -> asyncio.TaskGroup:
        if self._group is None or self._closing.is_set():
            state = "is not connected; use 'async with Session(...)'" if self._supervisor is None else "was closed"
            raise SessionClosed(f"the session {state}")
        return self._group

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._check_open().create_task(_guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled early has not begun it
        return task

    # pipelines

    async def prepare(self, pipeline: Pipeline, restrict_to_sites: Iterable[str] | str | None = None) -> Plan:
        """Checks a pipeline and makes a plan of it, which can be executed many times.

        Args:
            pipeline: the pipeline.
            restrict_to_sites: the sites that may be used; "homesite" means only the application's own.

        Raises:
            PipelineError: with everything that is wrong.
        """
        return self._prepare(pipeline, restrict_to_sites)

    def _prepare(self, pipeline: Pipeline, restrict_to_sites: Iterable[str] | str | None = None) -> Plan:
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"a Pipeline is needed, not {pipeline!r}")
        if restrict_to_sites is not None:
            return prepare(pipeline, self.federation, self.homesite, restrict_to_sites)
        key = id(pipeline.body)
        known = self._plans.get(key)
        if known is not None and known[0] is pipeline.body:
            return known[1]
        plan = prepare(pipeline, self.federation, self.homesite)
        self._plans[key] = (pipeline.body, plan)
        if len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        return plan

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
    ) -> Job:
        """Starts a job and returns at once.

        Args:
            pipeline: what to run; a plan saves the preparation.
            input_params: a dict is one parameter set, a list several, an async iterable a stream of them (pulled with
                backpressure), None none yet: they come by ``job.send_input_params``, until ``job.send_stop_frame``.
            autostop: whether the job ends with these parameter sets, or stays open for more.
            job_id: the caller's id for the job. Executing the same again with the same id gives the same job.
            default_callback: is called for every result that no place callback takes.
            place_callbacks: are called for the results of their place.
            on_error: whether other work goes on after an error, or the job stops at once.
            deadline: after how many seconds the job is aborted.
            options: what the job's log may hold.

        Raises:
            PipelineError: the pipeline cannot be prepared.
            ParameterError: parameters are missing, unknown, of the wrong type, or cannot be sent.
        """
        self._check_open()
        plan = pipeline if isinstance(pipeline, Plan) else self._prepare(pipeline)
        if on_error not in ("continue", "stop"):
            raise ValueError(f"on_error must be 'continue' or 'stop', not {on_error!r}")
        if deadline is not None and deadline <= 0:
            raise ValueError(f"the deadline must be positive, not {deadline}")
        stream = input_params if isinstance(input_params, AsyncIterable) else None
        rows = [] if stream is not None or input_params is None else self._rows(plan, input_params)  # type: ignore[arg-type]
        if job_id is not None:
            fingerprint = self._fingerprint(plan, input_params)
            known = self._records.get(job_id)
            if known is not None:
                if known.fingerprint != fingerprint:
                    raise ParameterError([f"a job {job_id!r} exists already, with other content"])
                return Job(self, job_id, known, self._coordinators.get(job_id))
        else:
            job_id = secrets.token_hex(8)
            fingerprint = None
        self._retention.tidy()
        record = JobRecord(JobId(job_id), JobNumber(-1), plan, options or self.options.results)
        record.fingerprint = fingerprint
        coordinator = Coordinator(record, self._target.codec, on_error)
        coordinator.on_end(self._ended)
        job = Job(self, job_id, record, coordinator)
        job.start_callbacks(self._spawn, self._dispatcher, default_callback, place_callbacks)
        self._records[job_id] = record
        self._coordinators[job_id] = coordinator
        coordinator.add(rows)
        if deadline is not None:
            coordinator.deadline(deadline)
        if stream is not None:
            self._spawn(self._feed(stream, coordinator, autostop))
        elif autostop and input_params is not None:
            coordinator.stop()
        try:
            self._target.submit(coordinator)
        except BaseException:
            coordinator.halt(JobStatus.ABORTED, "it could not be submitted", 0)
            self._records.pop(job_id, None)
            raise
        return job

    def _ended(self, coordinator: Coordinator) -> None:
        self._coordinators.pop(coordinator.record.job_id, None)
        self._finished.append(coordinator.record.job_id)
        self._retention.ended(coordinator.record.log)
        while len(self._finished) > self.options.keep_finished:
            self._records.pop(self._finished.popleft(), None)

    async def _feed(self, stream: AsyncIterable[Mapping[str, Any]], coordinator: Coordinator, autostop: bool) -> None:
        """Pulls parameter sets from the application as fast as the job takes them."""
        try:
            async for params in stream:
                coordinator.add(self._rows(coordinator.plan, params))
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

    async def send_params(self, coordinator: Coordinator | None, params: Any) -> None:
        """Adds parameter sets to a job; what :meth:`Job.send_input_params` calls."""
        if coordinator is None or not coordinator.accepts:
            raise ParameterError(["the job takes no further parameter sets: it was told to stop, or has ended"])
        rows = self._rows(coordinator.plan, params)
        for start in range(0, len(rows), 64):
            await coordinator.room()
            if not coordinator.accepts:
                raise ParameterError(["the job ended before it took all parameter sets"])
            coordinator.add(rows[start : start + 64])

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
        record = self._records.get(job_id)
        job = Job(self, job_id, record, self._coordinators.get(job_id), after)
        if record is not None:
            job.start_callbacks(self._spawn, self._dispatcher, default_callback, place_callbacks)
        return job

    def jobs(self) -> list[Job]:
        """Gives the jobs that the session knows, in the order of their submission."""
        return [Job(self, key, record, self._coordinators.get(key)) for key, record in self._records.items()]

    # parameters

    def _rows(self, plan: Plan, params: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Row]:
        if isinstance(params, Mapping):
            given: list[Any] = [params]
        elif isinstance(params, (list, tuple)):
            given = list(params)
        else:
            raise ParameterError([f"a parameter set is a dict, not {type(params).__name__}"])
        problems: list[str] = []
        rows = [self._row(plan, row, "" if len(given) == 1 else f"set {i}: ", problems) for i, row in enumerate(given)]
        if problems:
            more = len(problems) - _PROBLEMS
            raise ParameterError(problems[:_PROBLEMS] + ([f"and {more} more"] if more > 0 else []))
        return rows

    def _row(self, plan: Plan, row: Any, where: str, problems: list[str]) -> Row:
        if not isinstance(row, Mapping):
            problems.append(f"{where}a parameter set is a dict, not {type(row).__name__}")
            return {}
        packed: dict[str, Any] = {}
        names = plan.params
        if len(row) != len(names) or any(name not in row for name in names):
            missing = [name for name in names if name not in row]
            unknown = [name for name in row if name not in names]
            if missing:
                problems.append(f"{where}missing parameter {', '.join(map(repr, missing))}")
            if unknown:
                known = ", ".join(map(repr, names)) or "none"
                problems.append(f"{where}unknown parameter {', '.join(map(repr, unknown))} (the pipeline has: {known})")
        hints = self._types_of(plan)
        codec = self._target.codec
        for name in names:
            if name not in row:
                continue
            value = row[name]
            declared = hints.get(name)
            if declared is not None:
                for hint in declared:
                    found, wrong = validate(hint, value)
                    if wrong is not None:
                        problems.append(f"{where}parameter {name!r}: {wrong}")
                    elif len(declared) == 1:
                        value = found
            try:
                packed[name] = codec.pack(value)
            except EncodingError as error:
                problems.append(f"{where}parameter {name!r}: {error}")
        return packed

    def _fingerprint(self, plan: Plan, params: Params) -> str:
        """What a job computes. A stream of parameters cannot be known beforehand: there the plan must do."""
        codec = Codec(trusted=self._target.codec.trusted, canonical=True)
        content = b"" if isinstance(params, AsyncIterable) else codec.encode(params)
        return hashlib.sha256(plan.hash.encode() + content).hexdigest()

    def _types_of(self, plan: Plan) -> dict[str, list[Any]]:
        key = plan.hash
        hints = self._hints.get(key)
        if hints is None:
            hints = self._hints[key] = {}
            for use in plan.uses:
                operation = self.federation.operations.get(use.operation)
                hint = Any if operation is None else operation.signature.types.get(use.argument, Any)
                if hint is not Any and hint not in hints.setdefault(use.name, []):
                    hints[use.name].append(hint)
            if len(self._hints) > _PLANS:
                self._hints.popitem(last=False)
        return hints

    def __repr__(self) -> str:
        if self._supervisor is None:
            state = "not connected"
        elif self._group is None or self._closing.is_set():
            state = "closed"
        else:
            state = f"{len(self._coordinators)} jobs running, {len(self._records) - len(self._coordinators)} ended"
        return f"<Session of {self.federation.name!r} on {type(self._target).__name__}: {state}>"


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
