"""The runtime of one site in one process: one event loop, many jobs."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from dfm_async.errors import DfmError
from dfm_async.model.resources import SiteConfig
from dfm_async.net import spec
from dfm_async.net.checking import check_net
from dfm_async.net.program import Program
from dfm_async.runtime.cache import SiteCache
from dfm_async.runtime.faults import broken_record, cancel_task
from dfm_async.runtime.job import SiteJob
from dfm_async.runtime.objects import JobObjects
from dfm_async.runtime.once import in_thread
from dfm_async.runtime.operations import OperationTable
from dfm_async.runtime.stored_values import StoredValues
from dfm_async.runtime.threads import ThreadCall, Threads, ThreadSource
from dfm_async.site import shim
from dfm_async.site.loading import Loader
from dfm_async.site.secrets import Secrets
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import size_of

__all__ = ["PROGRAMS_KEPT", "SiteRuntime", "decode_net", "encode_net"]

_log = logging.getLogger(__name__)

PROGRAMS_KEPT: Final = 256
"""How many nets a site remembers; the oldest are forgotten first."""
_REMEMBERED: Final = 4096
_EARLY_BYTES: Final = 64 * 1024 * 1024
"""How many bytes may come for an announced job before it begins: the other sites began a moment ago."""
_EARLY_EACH: Final = 64
"""What a message weighs, besides its values."""

_net_decoder = msgspec.msgpack.Decoder(spec.Net)


def encode_net(net: spec.Net, codec: Codec) -> bytes:
    """Makes a net ready to be sent."""
    codec = codec.plain
    return codec.dumps(msgspec.structs.replace(net, literals=tuple(codec.pack(value) for value in net.literals)))


def decode_net(data: bytes, codec: Codec) -> spec.Net:
    """Rebuilds a net.

    Raises:
        ValueError: it is none, or not one that can be played.
    """
    net = _net_decoder.decode(data)
    check_net(net)
    # Once more through the codec: extensions inside the literals are not plain MessagePack.
    literals = codec.loads(msgspec.msgpack.encode(net.literals))
    return msgspec.structs.replace(net, literals=tuple(literals))


class _Announced:
    """A job that will begin: its net, and what other sites have sent for it."""

    __slots__ = ("early", "failed", "operations", "program", "size")

    def __init__(self, program: Program | Exception, operations: frozenset[str]) -> None:
        self.program = program
        self.operations = operations
        self.early: list[msg.Message] = []
        self.size = 0
        self.failed: Exception | None = None


class SiteRuntime:
    """Runs the parts of jobs that belong to one site.

    Args:
        site: its name.
        table: its operations.
        codec: how values travel.
        report: sends a message to the application.
        send: sends a message to another location, by its address.
        threads: how many synchronous calls run at the same time.
        grace: how long leaving waits for tasks that do not heed their cancellation.
        flush: writes what was sent; called once per turn of the loop in which something was.
        on_abandoned: is called when calls do not return that nobody waits for: with their number, whether they are so
            many that the process cannot go on, and a text. Whoever is called replaces the process; if nobody is, calls
            fail when there are too many.
        on_busy: is called with True before the first of several jobs begins, and with False after the last has ended.
        config: what the code at this site can use.
        announced: whether every job is announced before messages for it may come. Else their numbers only grow: what
            comes for one with a larger number than all before is early, anything else is late.
    """

    def __init__(
        self,
        site: str,
        table: OperationTable,
        codec: Codec,
        *,
        report: Callable[[msg.Message], None],
        send: Callable[[str, msg.Message], None],
        threads: int,
        grace: float = 5.0,
        flush: Callable[[], None] | None = None,
        on_busy: Callable[[bool], None] | None = None,
        config: SiteConfig | None = None,
        announced: bool = False,
        on_abandoned: Callable[[int, bool, str], None] | None = None,
    ) -> None:
        self.site = site
        self.table = table
        self.codec = codec
        self.report = report
        self.send = send
        self._flush_channels = flush
        self._on_busy = on_busy
        self._on_abandoned = on_abandoned
        self.config = config or SiteConfig()
        self.loader = Loader(site, self.config)
        """Finds classes that are named by a path."""
        self.secrets = Secrets(site, self.config.vault, self.loader, in_thread)
        """The secrets of the site."""
        cache = self.config.cache
        self.cache = SiteCache(codec.own, None if cache is None else StoredValues(cache, self.config.federation, site))
        self.stored_codec = Codec(trusted=False, stored=True)
        """How results are encoded that are written down: without pickle."""
        self.tokens = 0
        """How many values were sent to other locations."""
        self.token_bytes = 0
        """How many bytes they had."""
        self._closed = False
        self._thread_limit = threads
        self._threads: Threads | None = None
        self._grace = grace
        self._tasks: set[asyncio.Task[None]] = set()
        self._programs: OrderedDict[tuple[str, int], Program | Exception] = OrderedDict()
        self._jobs: dict[tuple[int, int], SiteJob] = {}
        self._stopping: dict[tuple[int, int], SiteJob] = {}
        self._holding: dict[SiteJob, JobObjects] = {}
        self._early: dict[tuple[int, int], list[msg.Message]] = {}
        self._announced: dict[tuple[int, int], _Announced] | None = {} if announced else None
        self._latest = -1
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._dirty: set[SiteJob] = set()
        self._scheduled = False
        self._thread = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers: dict[type, Callable[[SiteJob, Any], None]] = {
            msg.OpenFrames: SiteJob.open_frames,
            msg.Tokens: SiteJob.tokens,
            msg.LoopEnded: SiteJob.loop_ended,
            msg.ElementDone: SiteJob.elements_done,
            msg.Credit: SiteJob.credit,
            msg.StreamPull: SiteJob.stream_pull,
            msg.StreamItems: SiteJob.stream_items,
            msg.StreamClose: SiteJob.stream_close,
            msg.PlaceTaken: SiteJob.place_taken,
            msg.SpansTaken: SiteJob.spans_taken,
        }

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self.config.compat:
            shim.install()
        await self.secrets.open()
        self._threads = Threads(self._thread_limit, self.site, replaced=self._on_abandoned is not None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed = True
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            job.cancel()
        async with AsyncExitStack() as stack:  # in reverse order; a step that is cancelled does not skip the others
            stack.callback(self._close_threads)
            stack.callback(self.cache.close)
            stack.push_async_callback(self._close_vault)
            stack.push_async_callback(self._close_objects)
            for job in jobs:
                stack.push_async_callback(job.release)
            stack.push_async_callback(self._stop_tasks, self._tasks)

    async def _close_vault(self) -> None:
        try:
            async with asyncio.timeout(self._grace):
                await self.secrets.aclose()
        except TimeoutError:
            _log.warning("the vault of site %s does not close, and is left alone", self.site)

    def _close_threads(self) -> None:
        if self.threads.abandoned and self._on_abandoned is None:
            _log.warning("site %s: %d calls do not return and are left alone", self.site, self.threads.abandoned)
        self.threads.close()

    async def _stop_tasks(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            cancel_task(task)
        # Threads that are inside an operation, and tasks that do not heed their cancellation, cannot be stopped.
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=self._grace)
            for task in stubborn:
                _log.warning("%s at site %s ignores its cancellation and is left alone", task.get_name(), self.site)

    async def _close_objects(self) -> None:
        """The last chance to close objects of jobs that have not ended, whether their calls have returned or not."""
        closing = {objects.close() for objects in self._holding.values() if not objects.closing}
        if closing:
            _, late = await asyncio.wait(closing, timeout=self._grace)
            await self._stop_tasks(late)

    def on_loop(self) -> bool:
        """Whether this is the thread of the loop."""
        return threading.get_ident() == self._thread

    @property
    def threads(self) -> Threads:
        """The threads for synchronous operations."""
        assert self._threads is not None  # noqa: S101 - set on entry
        return self._threads

    def spawn(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None, name: str
    ) -> asyncio.Task[None]:
        """Starts a task that this runtime owns. What it raises must have been dealt with in ``work``."""
        task = asyncio.get_running_loop().create_task(work, name=name, context=context or contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def receive(self, message: msg.Message) -> None:
        """Takes a message, from the application or from another location."""
        if isinstance(message, msg.SendNet):
            try:
                program: Program | Exception = Program(decode_net(message.net, self.codec))
            except Exception as error:  # noqa: BLE001 - a literal that cannot be rebuilt here: told when a job comes
                program = error
            self._keep_program(message.plan, message.at, program)
        elif isinstance(message, msg.StartJob):
            self._start(message)
        elif isinstance(message, msg.CancelJob):
            self._cancel(message)
        elif isinstance(message, msg.AbandonJob):
            stopping = self._stopping.get((message.job, message.at))
            if stopping is not None:
                stopping.abandon()
        elif isinstance(message, msg.Announce):
            self._announce(message)
        elif isinstance(message, msg.Withdraw):
            if self._announced is not None:
                self._announced.pop((message.job, message.at), None)
        else:
            self._to_job(message)

    def add_program(self, plan: str, at: int, net: spec.Net) -> None:
        """Makes a net known without sending it."""
        if (plan, at) not in self._programs:
            self._keep_program(plan, at, Program(net))

    def _keep_program(self, plan: str, at: int, program: Program | Exception) -> None:
        self._programs[plan, at] = program
        while len(self._programs) > PROGRAMS_KEPT:
            self._programs.popitem(last=False)

    def _announce(self, message: msg.Announce) -> None:
        program = self._program(message.plan, message.at)  # kept with the job: others may push it out meanwhile
        if self._announced is not None:
            self._announced[message.job, message.at] = _Announced(program, frozenset(message.operations))

    def _program(self, plan: str, at: int) -> Program | Exception:
        return self._programs.get((plan, at)) or LookupError(f"net {at} of plan {plan} is not known here")

    def _start(self, message: msg.StartJob) -> None:
        key = (message.job, message.at)
        self._latest = max(self._latest, message.job)
        early = self._early.pop(key, [])
        announced = None if self._announced is None else self._announced.pop(key, None)
        if announced is not None:
            early, program = announced.early, announced.failed or announced.program
        elif self._announced is not None:
            program = LookupError(f"job {message.job} was not announced here")
        else:
            program = self._program(message.plan, message.at)
        if isinstance(program, Exception):
            self.report(msg.JobBroken(message.job, message.at, broken_record(self.site, program)))
            self._remember(key)
            return
        if self._on_busy is not None and not self._jobs:
            self._on_busy(True)
        job = self._jobs[key] = SiteJob(self, message, program)
        job.operations = None if announced is None else announced.operations
        try:
            job.open(message.first, message.count, message.payload, message.last)
        except BaseException as error:  # noqa: BLE001 - one job's trouble must not become the site's
            job.broken(error)
        for waiting in early:
            self._to_job(waiting)

    def _to_job(self, message: Any) -> None:
        key = (message.job, message.at)
        job = self._jobs.get(key)
        if job is not None:
            try:
                self._handlers[type(message)](job, message)
            except BaseException as error:  # noqa: BLE001 - one job's trouble must not become the site's
                job.broken(error)
        elif self._announced is not None:
            if key in self._announced:
                self._keep_early(self._announced[key], message)
        elif message.job >= self._latest and key not in self._ended:
            # From a site that has been told of the job before us. Numbers only grow: anything else is late.
            self._early.setdefault(key, []).append(message)

    def _keep_early(self, announced: _Announced, message: Any) -> None:
        announced.size += _EARLY_EACH + (size_of(message.payload) if type(message) in msg.CARRIERS else 0)
        if announced.size <= _EARLY_BYTES:
            announced.early.append(message)
        elif announced.failed is None:
            text = f"other sites have sent more than {_EARLY_BYTES:,} bytes to site {self.site!r} before the job began"
            announced.failed = DfmError(f"{text} there")
            announced.early.clear()
            self.report(msg.JobBroken(message.job, message.at, broken_record(self.site, announced.failed)))

    def _cancel(self, message: msg.CancelJob) -> None:
        key = (message.job, message.at)
        self._early.pop(key, None)
        if self._announced is not None:
            self._announced.pop(key, None)
        job = self._jobs.pop(key, None)
        self._remember(key)
        if job is None:
            self.report(msg.JobStopped(message.job, message.at))
        else:
            self._dirty.discard(job)
            self._job_left()
            waiting = job.cancel()
            self.report(msg.CancelSeen(message.job, message.at, waiting))
            self._stopping[key] = job
            self.spawn(self._stop(job, message), None, f"stop of job {job.job_id}")

    async def _stop(self, job: SiteJob, message: msg.CancelJob) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await job.close()
            await job.stopped()
            if job in self._holding:
                await asyncio.wait([self._holding[job].close()])
        finally:
            self._stopping.pop((message.job, message.at), None)
        job.let_go()
        self.report(msg.JobStopped(message.job, message.at, loop.time() - began))

    # calls that do not return

    def abandon(self, job: SiteJob, call: ThreadCall, grace: float, error: TimeoutError) -> None:
        """Fail a call that runs in a thread, and free its place for another one.

        If it has not returned after the grace, the process is to be replaced.
        """
        what = job.threads.running.get(call, "")
        if self.threads.abandon(call, error):
            self._check_later(call, job, what, grace)

    def abandon_source(self, job: SiteJob, source: ThreadSource) -> None:
        """The same for a generator, which has a thread of its own, of a job that was cancelled."""
        if source.abandon():
            self._check_later(source, job, source.name, 0.0)

    def _check_later(self, call: ThreadCall | ThreadSource, job: SiteJob, what: str, grace: float) -> None:
        if self.threads.exhausted:
            self._hangs(call, job.job_id, what)
        else:
            asyncio.get_running_loop().call_later(grace, self._hangs, call, job.job_id, what)

    def _hangs(self, call: ThreadCall | ThreadSource, job_id: str, what: str) -> None:
        if call.ended or self._closed:
            return
        count, exhausted = self.threads.abandoned, self.threads.exhausted
        text = f"a call of {what!r} of job {job_id} was abandoned and does not return"
        if count > 1:
            text += f" ({count} such calls)"
        if self._on_abandoned is not None:
            self._on_abandoned(count, exhausted, text)
        else:
            _log.warning("site %s: %s", self.site, text, extra={"job": job_id, "site": self.site})

    @property
    def exhausted(self) -> bool:
        """Whether the site serves no further synchronous calls, because too many do not return."""
        return self._threads is not None and self._threads.exhausted

    # objects of jobs

    def hold(self, job: SiteJob, objects: JobObjects) -> None:
        """A job has objects that must be closed before it has ended: the application waits for that."""
        self._holding[job] = objects
        self.report(msg.ObjectsBuilt(job.number, job.at))

    def released(self, job: SiteJob) -> None:
        """The objects of a job are closed."""
        self._holding.pop(job, None)

    def end(self, job: SiteJob, objects: JobObjects) -> None:
        """A job is done, but its objects are not closed: drops it when they are."""
        if not objects.ending:
            objects.ending = True
            self.spawn(self._end(job, objects), None, f"the end of job {job.job_id}")

    async def _end(self, job: SiteJob, objects: JobObjects) -> None:
        try:
            async with asyncio.timeout(self._grace):
                await job.finished()
        except TimeoutError:  # a generator that does not end must not keep the job for ever
            _log.warning("a call of job %s at site %s does not return; its objects are closed", job.job_id, self.site)
        await asyncio.wait([objects.close()])
        if not job.stopping:  # else it was cancelled in the meantime, and its stop is told
            job.let_go()
            self.report(msg.ObjectsClosed(job.number, job.at))
            self.forget(job)

    def forget(self, job: SiteJob) -> None:
        """Drops a job that is done."""
        key = (job.number, job.at)
        if self._jobs.pop(key, None) is not None:
            self._job_left()
        self._remember(key)

    def _job_left(self) -> None:
        if self._on_busy is not None and not self._jobs:
            self._on_busy(False)

    def _remember(self, key: tuple[int, int]) -> None:
        self._ended[key] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def touch(self, job: SiteJob) -> None:
        """Notes that a job has something to send; it is sent at the end of this turn of the loop."""
        if not self._scheduled:
            assert self._loop is not None  # noqa: S101 - set on entry
            self._scheduled = True
            self._loop.call_soon(self._flush_later)
        self._dirty.add(job)

    def _flush_later(self) -> None:
        self._scheduled = False
        self._flush()

    def flush_now(self, job: SiteJob) -> None:
        """Sends what a job has to send, at once if no other job is about to."""
        self.touch(job)
        if len(self._dirty) == 1:
            self._flush()

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for job in dirty:
            try:
                job.flush()
            except BaseException as error:  # noqa: BLE001 - one job's trouble must not become the site's
                job.broken(error)
        if self._flush_channels is not None:
            self._flush_channels()

    @property
    def jobs(self) -> int:
        """How many jobs are under way here."""
        return len(self._jobs)
