"""The runtime of one site in one process: one event loop, many jobs."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final

import msgspec

from dfm_async.model.resources import SiteConfig
from dfm_async.net import spec
from dfm_async.net.program import Program
from dfm_async.runtime.cache import SiteCache
from dfm_async.runtime.faults import broken_record
from dfm_async.runtime.job import SiteJob
from dfm_async.runtime.objects import JobObjects
from dfm_async.runtime.once import in_thread
from dfm_async.runtime.operations import OperationTable
from dfm_async.runtime.stored_values import StoredValues
from dfm_async.runtime.threads import Threads
from dfm_async.site import shim
from dfm_async.site.loading import Loader
from dfm_async.site.secrets import Secrets
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec

__all__ = ["PROGRAMS_KEPT", "SiteRuntime", "decode_net", "encode_net"]

_log = logging.getLogger(__name__)

PROGRAMS_KEPT: Final = 256
"""How many nets a site remembers; the oldest are forgotten first."""
_REMEMBERED: Final = 4096

_net_decoder = msgspec.msgpack.Decoder(spec.Net)


def encode_net(net: spec.Net, codec: Codec) -> bytes:
    """Makes a net ready to be sent."""
    codec = codec.plain
    return codec.dumps(msgspec.structs.replace(net, literals=tuple(codec.pack(value) for value in net.literals)))


def decode_net(data: bytes, codec: Codec) -> spec.Net:
    """Rebuilds a net."""
    net = _net_decoder.decode(data)
    # Once more through the codec: extensions inside the literals are not plain MessagePack.
    literals = codec.loads(msgspec.msgpack.encode(net.literals))
    return msgspec.structs.replace(net, literals=tuple(literals))


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
        on_busy: is called with True before the first of several jobs begins, and with False after the last has ended.
        config: what the code at this site can use.
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
    ) -> None:
        self.site = site
        self.table = table
        self.codec = codec
        self.report = report
        self.send = send
        self._flush_channels = flush
        self._on_busy = on_busy
        self.config = config or SiteConfig()
        self.loader = Loader(site, self.config)
        """Finds classes that are named by a path."""
        self.secrets = Secrets(site, self.config.vault, self.loader, in_thread)
        """The secrets of the site."""
        cache = self.config.cache
        self.cache = SiteCache(codec, None if cache is None else StoredValues(cache, self.config.federation, site))
        self.stored_codec = Codec(trusted=False, stored=True)
        """How results are encoded that are written down: without pickle."""
        self.tokens = 0
        """How many values were sent to other locations."""
        self.token_bytes = 0
        """How many bytes they had."""
        self._thread_limit = threads
        self._threads: Threads | None = None
        self._grace = grace
        self._tasks: set[asyncio.Task[None]] = set()
        self._programs: OrderedDict[tuple[str, int], Program | Exception] = OrderedDict()
        self._jobs: dict[tuple[int, int], SiteJob] = {}
        self._holding: dict[SiteJob, JobObjects] = {}
        self._early: dict[tuple[int, int], list[msg.Message]] = {}
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

    async def __aenter__(self) -> SiteRuntime:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self.config.compat:
            shim.install()
        await self.secrets.open()
        self._threads = Threads(self._thread_limit, self.site)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            job.cancel()
        await self._stop_tasks(self._tasks)
        for job in jobs:
            await job.release()
        if self._holding:
            await self._close_objects()
        try:
            async with asyncio.timeout(self._grace):
                await self.secrets.aclose()
        except TimeoutError:
            _log.warning("the vault of site %s does not close, and is left alone", self.site)
        self.cache.close()
        self.threads.close()

    async def _stop_tasks(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
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

    def _start(self, message: msg.StartJob) -> None:
        key = (message.job, message.at)
        self._latest = max(self._latest, message.job)
        program = self._programs[message.plan, message.at]
        if isinstance(program, Exception):
            self.report(msg.JobBroken(message.job, message.at, broken_record(self.site, program)))
            self._remember(key)
            return
        if self._on_busy is not None and not self._jobs:
            self._on_busy(True)
        job = self._jobs[key] = SiteJob(self, message, program)
        try:
            job.open(message.first, message.count, message.payload, message.last)
        except Exception as error:  # noqa: BLE001 - one job's trouble must not become the site's
            job.broken(error)
        for early in self._early.pop(key, ()):
            self._to_job(early)

    def _to_job(self, message: Any) -> None:
        key = (message.job, message.at)
        job = self._jobs.get(key)
        if job is not None:
            try:
                self._handlers[type(message)](job, message)
            except Exception as error:  # noqa: BLE001 - one job's trouble must not become the site's
                job.broken(error)
        elif message.job >= self._latest and key not in self._ended:
            # From a site that has been told of the job before us. Numbers only grow: anything else is late.
            self._early.setdefault(key, []).append(message)

    def _cancel(self, message: msg.CancelJob) -> None:
        key = (message.job, message.at)
        self._early.pop(key, None)
        job = self._jobs.pop(key, None)
        self._remember(key)
        if job is None:
            self.report(msg.JobStopped(message.job, message.at))
        else:
            self._dirty.discard(job)
            self._job_left()
            job.cancel()
            self.report(msg.CancelSeen(message.job, message.at))
            self.spawn(self._stop(job, message), None, f"stop of job {job.job_id}")

    async def _stop(self, job: SiteJob, message: msg.CancelJob) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await job.close()
        await job.stopped()
        if job in self._holding:
            await asyncio.wait([self._holding[job].close()])
        job.let_go()
        self.report(msg.JobStopped(message.job, message.at, loop.time() - began))

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
        except TimeoutError:  # a call whose deadline is over must not keep the job for ever
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
            except Exception as error:  # noqa: BLE001 - one job's trouble must not become the site's
                job.broken(error)
        if self._flush_channels is not None:
            self._flush_channels()

    @property
    def jobs(self) -> int:
        """How many jobs are under way here."""
        return len(self._jobs)
