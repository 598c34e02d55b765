"""What the calls of one job share at one location: tasks, threads, objects, and what their code can request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dfm_async.base.signals import Outcome
from dfm_async.federation.operation import Adapter
from dfm_async.model.events import OperationEvent
from dfm_async.model.ids import Frame
from dfm_async.model.resources import CacheConfig
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.context import OperationContext
from dfm_async.runtime.job_objects import JobObjects
from dfm_async.runtime.observer import CallObserver, Observation
from dfm_async.runtime.operation_errors import broken_record, cancel_task, is_our_cancellation
from dfm_async.runtime.outbox import Outbox
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.threads import JobThreads, ThreadCall
from dfm_async.site.cache_storage import cache_storage
from dfm_async.telemetry.recorder import Recorder
from dfm_async.telemetry.spans import Origin, encode_made
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import Payload, size_of

if TYPE_CHECKING:
    from upath import UPath

_log = logging.getLogger(__name__)

T = TypeVar("T")


class JobHost(Protocol):
    """The runtime that a job belongs to."""

    def touch(self, job: Any) -> None:
        """Flush the job at the end of this turn of the loop."""

    def flush_now(self, job: Any) -> None:
        """Flush the job at once, if it is the only one."""

    def objects_built(self, job: Any) -> None:
        """Note that a job has objects which must be closed before it has ended."""

    def objects_closed(self, job: Any) -> None:
        """Note that the objects of a job are closed."""

    def job_done(self, job: Any) -> None:
        """Drop a job that is done, once its objects are closed."""


class Reports(Protocol):
    """Takes what calls report: the outbox of the job, or the connection to the worker that has it."""

    def add_progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Add a report of how far a call is."""

    def add_event(self, event: OperationEvent) -> None:
        """Add an event of an operation."""

    def drop_progress(self) -> None:
        """Send the events now, but no progress: the job was cancelled."""


class JobScope:
    """One job, as far as its calls need it: in the process that has its net, or in another one of the site.

    It is the :class:`~dfm_async.runtime.context.Caller` of the operations. It may call the given ``operations`` here;
    all if they are None.
    """

    __slots__ = (
        "_operations",
        "_reports",
        "_requested",
        "_requests",
        "_table",
        "_tasks",
        "_threads",
        "at",
        "job_id",
        "number",
        "objects",
        "priority",
        "resources",
        "stopping",
    )

    def __init__(
        self,
        resources: SiteResources,
        reports: Reports,
        *,
        number: int,
        at: int,
        job_id: str,
        priority: int,
        operations: frozenset[str] | None = None,
    ) -> None:
        self.resources = resources
        self.number = number
        self.at = at
        self.job_id = job_id
        self.priority = priority
        self.stopping = False
        self.objects: JobObjects | None = None
        """The objects of classes. Most jobs have none, so this is created with the first."""
        self._reports = reports
        self._operations = operations
        self._table = resources.table  # a job keeps the code that it began with
        self._threads: JobThreads | None = None
        self._tasks: dict[asyncio.Task[None], Coroutine[Any, Any, None]] = {}
        self._requested = 0
        self._requests: dict[int, Outcome[str]] = {}

    # operations

    def find(self, operation: str, provider: str | None) -> Callee:
        """Return an operation of the site.

        Raises:
            LookupError: the site does not offer it.
            PermissionError: the job may not use it.
        """
        if self._operations is not None and operation not in self._operations:
            raise PermissionError(f"job {self.job_id} was not allowed to use operation {operation!r} here")
        return self._table.find(operation, provider)

    def instance(self, callee: Callee) -> Any:
        """Return the object of a class, built once per job; None if the operation is not a class."""
        return self.owned_objects().get(callee) if callee.per_job else None

    def owned_objects(self) -> JobObjects:
        """Return the objects of the job here."""
        if self.objects is None:
            self.objects = self._build_objects()
        return self.objects

    def _build_objects(self) -> JobObjects:
        raise NotImplementedError

    def code_of(self, operation: str, provider: str | None) -> tuple[Adapter, Any]:
        """Return the adapter of an operation, and its code or, for a class, the object of the job."""
        callee = self.find(operation, provider)
        adapter = callee.adapter
        return adapter, self.instance(callee) if adapter.per_job else adapter.code

    def context(
        self, operation: str, node: str, frame: Frame, attempt: int, seen: Observation | None
    ) -> OperationContext:
        """Return what an operation can know about a call."""
        trace = None if seen is None else seen.trace
        return OperationContext(self.job_id, self.resources.site, operation, node, frame, attempt, self, trace)

    # tasks and threads

    @property
    def threads(self) -> JobThreads:
        """The synchronous calls of the job. Many jobs have none, so this is created with the first."""
        if self._threads is None:
            self._threads = JobThreads(self.resources.threads, self.job_id, self.priority)
        return self._threads

    def calls_in_threads(self) -> list[tuple[ThreadCall, str]]:
        """Return the synchronous calls that wait or run, with their operations. Any thread may call this."""
        return [] if self._threads is None else self._threads.pending

    def work_of(self, task: asyncio.Task[Any]) -> Coroutine[Any, Any, None] | None:
        """Return what a task of this job runs. Any thread may call this."""
        return self._tasks.get(task)

    @property
    def task_count(self) -> int:
        """The number of tasks of this job."""
        return len(self._tasks)

    def callee_named(self, operation: str) -> Callee | None:
        """Return an operation that was called, whatever its provider. Any thread may call this."""
        return self._table.named(operation)

    def spawn(self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> asyncio.Task[None]:
        """Start a task of this job."""
        task = self.resources.spawn(self._guard(work), context, f"a task of job {self.job_id}")
        self._tasks[task] = work
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task).close()  # a task that is cancelled early has not begun its work

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except GeneratorExit:  # the task was dropped with its loop
            raise
        except BaseException as error:  # operations' errors are handled inside: this is a bug of this library
            if is_our_cancellation(error):
                raise
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Report an error that no operation has raised: the job cannot go on, but others can."""
        if not self.stopping:
            site = self.resources.site
            _log.error("job %s is broken at site %s", self.job_id, site, exc_info=error)
            self.resources.report(msg.JobBroken(self.number, self.at, broken_record(site, error)))

    async def in_thread(self, what: str, work: Callable[[], T]) -> T:
        """Run synchronous code in a thread of the site."""
        found: T = await self.threads.run(what, work)
        return found

    def wait(self, work: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> T:
        """Run a coroutine as a task of the job, by default in the caller's context, and wait for it in a thread."""
        if self.resources.on_loop():
            work.close()
            raise RuntimeError("context.wait is for synchronous operations, which run in threads; await instead")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = context or contextvars.copy_context()  # here: the loop may begin it in the context of another call

        async def run() -> None:
            try:
                found = await work
            except BaseException as error:
                if is_our_cancellation(error):
                    raise
                future.set_exception(error)
            else:
                future.set_result(found)

        def ended(_task: object = None) -> None:
            self.resources.threads.note_progress()
            work.close()
            if not future.done():
                future.set_exception(RuntimeError("the job was cancelled"))

        threads = self.resources.threads

        def begin() -> None:
            if self.stopping or threads.closed:
                ended()
            else:
                self.spawn(run(), context).add_done_callback(ended)

        if not threads.post(begin):
            ended()
        return future.result()

    # what operations can request

    def progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Report to the application how far a call is. May be called from any thread."""
        if not self.resources.on_loop():
            self.resources.threads.post(functools.partial(self.progress, node, frame, done, total, note))
        elif not self.stopping:
            self._reports.add_progress(node, frame, done, total, note)

    def add_event(self, event: OperationEvent) -> None:
        """Send an event of a call to the application. May be called from any thread."""
        if not self.resources.on_loop():
            self.resources.threads.post(functools.partial(self.add_event, event))
        else:
            self._reports.add_event(event)

    async def send_to_place(self, target: str, place: str, key: str, value: Any) -> None:
        """Send a value to a parameter of another job, and wait until it was accepted."""
        error = await self.deliver(target, place, key, self.resources.codec.plain.encode(value))
        if error:
            raise RuntimeError(error)

    async def deliver(self, target: str, place: str, key: str, payload: bytes) -> str:
        """Send an encoded value to a parameter of another job; return why it was not accepted, or nothing."""
        self._requested += 1
        request = self._requested
        outcome = self._requests[request] = Outcome()
        try:
            self._request(request, target, place, key, payload)
            return await outcome
        finally:
            del self._requests[request]

    def _request(self, request: int, target: str, place: str, key: str, payload: bytes) -> None:
        self.resources.report(
            msg.SendToPlace(
                job=self.number, at=self.at, request=request, target=target, place=place, key=key, payload=payload
            )
        )

    def place_taken(self, message: msg.PlaceTaken) -> None:
        """Handle the answer of the application to a value for another job."""
        outcome = self._requests.get(message.request)
        if outcome is not None:
            outcome.settle(message.error)

    async def secret(self, key: str) -> Any:
        """Return a secret of the site."""
        return await self.resources.secrets.get(key)

    def cache_storage(self, subpath: str | None) -> UPath:
        """Return a directory for files that outlive the job."""
        config = self.resources.config
        cache, site = config.cache or CacheConfig(), self.resources.site
        return cache_storage(cache, config.federation, site, subpath, compat=config.compat)

    # the end

    def cancel(self) -> int:
        """Cancel all tasks, and drop the synchronous calls that wait for a thread. Return the number of the latter."""
        self.stopping = True
        self._reports.drop_progress()
        for task in self._tasks:
            cancel_task(task)
        return 0 if self._threads is None else self._threads.withdraw()

    def abandon(self) -> None:
        """After :meth:`cancel`, when the grace period is over: stop waiting for threads, to be free or to return."""
        if self._threads is not None:
            self._threads.abandon_all()

    async def tasks_ended(self) -> None:
        """Wait until no task of the job runs."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def threads_ended(self) -> None:
        """Wait until no thread runs anything of the job; those of abandoned calls do not count."""
        if self._threads is not None:
            await self._threads.stopped()


class HomeScope(JobScope):
    """One job at one location, in the process that has its net."""

    __slots__ = (
        "host",
        "observer",
        "outbox",
        "recorder",
    )

    def __init__(
        self, resources: SiteResources, host: JobHost, start: msg.StartJob, operations: frozenset[str] | None
    ) -> None:
        self.host = host
        self.recorder: Recorder | None = None
        """Records spans, if the job is traced."""
        if start.trace is not None:
            self.recorder = Recorder(resources.site, *start.trace, self._spans_full, sampled=start.spec.sampled)
        self.outbox = Outbox(resources, start, self.recorder)
        self.observer: CallObserver | None = None
        """Observes the calls, if they are counted or traced."""
        if start.spec.watch or self.recorder is not None:
            self.observer = CallObserver(resources, start, self.recorder)
        spec = start.spec
        super().__init__(
            resources,
            self.outbox,
            number=start.job,
            at=start.at,
            job_id=spec.job_id,
            priority=spec.priority,
            operations=operations,
        )

    def _build_objects(self) -> JobObjects:
        return JobObjects(self, self.host.objects_built, self.host.objects_closed)

    # spans

    def arrived(self, origin: Origin | None, tokens: int, payload: bytes | Payload) -> None:
        """Record the arrival of values from another location, or from the application."""
        if origin is not None and self.recorder is not None:
            self.recorder.arrived(origin, tokens, size_of(payload))

    def spans_taken(self, message: msg.SpansTaken) -> None:
        """Note that the application has received spans."""
        if self.recorder is not None:
            self.recorder.taken(message.count)

    def _spans_full(self) -> None:
        """Send a batch of spans at the end of this turn of the loop. May be called from any thread."""
        if self.resources.on_loop():
            self.host.touch(self)
        else:
            self.resources.threads.post(functools.partial(self.host.touch, self))

    def send_spans(self, *, end: bool) -> None:
        """Send the spans that have ended; ``end``: these are the last."""
        recorder = self.recorder
        if recorder is None:
            return
        made = recorder.end("the job was stopped" if self.stopping else None) if end else recorder.take()
        if end:
            self.recorder = None
        if made:
            self.resources.report(msg.SpansMade(self.number, self.at, len(made), encode_made(made), end))
