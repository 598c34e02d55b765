"""The runtime of one site in one process: one event loop, many jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final, Self

import msgspec

from dfm_async.base.containers import BoundedDict
from dfm_async.errors import DfmError
from dfm_async.model.resources import SiteConfig
from dfm_async.net import spec
from dfm_async.net.checking import check_net
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.guests import Guests
from dfm_async.runtime.job_objects import JobObjects
from dfm_async.runtime.operation_errors import broken_record
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.site_job import SiteJob
from dfm_async.runtime.spread import ABOUT_CALLS
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from dfm_async.wire.memory import size_of

_log = logging.getLogger(__name__)

PROGRAMS_KEPT: Final = 256
"""The number of nets that a site keeps; the oldest are evicted first."""
_ENDED_KEPT: Final = 4096
"""The number of ended jobs that a site remembers, to ignore late messages for them."""
_EARLY_BYTES: Final = 64 * 1024 * 1024
"""The number of bytes that may arrive for an announced job before it begins: other sites began a moment ago."""
_EARLY_EACH: Final = 64
"""The size that a message counts with, besides its values."""

_net_decoder = msgspec.msgpack.Decoder(spec.Net)


def encode_net(net: spec.Net, codec: Codec) -> bytes:
    """Encode a net for another process."""
    codec = codec.plain
    return codec.dumps(msgspec.structs.replace(net, literals=tuple(codec.pack(value) for value in net.literals)))


def decode_net(data: bytes, codec: Codec) -> spec.Net:
    """Decode a net.

    Raises:
        ValueError: this is not a valid net.
    """
    net = _net_decoder.decode(data)
    check_net(net)
    # Once more through the codec: extensions inside the literals are not plain MessagePack.
    literals = codec.loads(msgspec.msgpack.encode(net.literals))
    return msgspec.structs.replace(net, literals=tuple(literals))


class _Announced(msgspec.Struct):
    """A job that will begin: its net, and the messages that other sites have sent for it."""

    program: CompiledNet | Exception
    operations: frozenset[str]
    early: list[msg.Message] = []
    size: int = 0
    failed: Exception | None = None


class SiteRuntime:
    """Run the parts of jobs that belong to one site.

    Args:
        resources: the site.
        flush: writes what was sent; called once per turn of the loop in which something was.
        on_busy: is called with True before the first of several jobs begins, and with False after the last has ended.
        announced: whether every job is announced before messages for it may come. If not, job numbers only grow: a
            message for a larger number than all before is early, any other one is late.
    """

    def __init__(
        self,
        resources: SiteResources,
        *,
        flush: Callable[[], None] | None = None,
        on_busy: Callable[[bool], None] | None = None,
        announced: bool = False,
    ) -> None:
        self.resources = resources
        self.site = resources.site
        self._guests = Guests(resources)
        self._report = resources.report
        self._flush_channels = flush
        self._on_busy = on_busy
        self._programs: BoundedDict[tuple[str, int], CompiledNet | Exception] = BoundedDict(PROGRAMS_KEPT)
        self._jobs: dict[tuple[int, int], SiteJob] = {}
        self._stopping: dict[tuple[int, int], SiteJob] = {}
        self._holding: set[SiteJob] = set()
        self._early: dict[tuple[int, int], list[msg.Message]] = {}
        self._announced: dict[tuple[int, int], _Announced] | None = {} if announced else None
        self._latest = -1
        self._ended: BoundedDict[tuple[int, int], None] = BoundedDict(_ENDED_KEPT)
        self._dirty: set[SiteJob] = set()
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def jobs(self) -> list[SiteJob]:
        """The jobs whose nets run here. Any thread may read it."""
        return list(self._jobs.values())

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self.resources.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        resources = self.resources
        resources.threads.ending = True
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            job.cancel()
        async with AsyncExitStack() as stack:  # in reverse order; a step that is cancelled does not skip the others
            stack.callback(resources.threads.close)
            stack.callback(resources.cache.close)
            if resources.limits is not None:
                stack.callback(resources.limits.close)
            if resources.checkpoints is not None:
                stack.push_async_callback(resources.checkpoints.close)
            stack.push_async_callback(resources.close_vault)
            stack.push_async_callback(self._close_objects)
            for job in jobs:
                stack.push_async_callback(job.release)
            stack.push_async_callback(resources.stop_tasks)

    async def _close_objects(self) -> None:
        """Close the objects of jobs that have not ended, whether their calls have returned or not."""
        if self.resources.spread is not None:
            self.resources.spread.close()
        held = [job.objects for job in self._holding if job.objects is not None]
        closing = {objects.close() for objects in held if not objects.closing} | self._guests.close_all()
        if closing:
            _, late = await asyncio.wait(closing, timeout=self.resources.grace)
            await self.resources.stop_tasks(late)

    def replace(self, table: OperationTable, config: SiteConfig) -> None:
        """Offer these operations and this configuration to new jobs."""
        self.resources.table, self.resources.config = table, config

    def receive(self, message: msg.Message) -> None:
        """Handle a message from the application or from another location."""
        handler = _RECEIVERS.get(type(message))
        if handler is None:
            self._to_job(message)
        else:
            handler(self, message)

    def _take_net(self, message: msg.SendNet) -> None:
        try:
            program: CompiledNet | Exception = CompiledNet(decode_net(message.net, self.resources.codec))
        except Exception as error:  # noqa: BLE001 - a literal that cannot be decoded here: reported when a job needs it
            program = error
        self._programs[message.plan, message.at] = program

    def _abandon(self, message: msg.AbandonJob) -> None:
        stopping = self._stopping.get((message.job, message.at))
        if stopping is not None:
            stopping.abandon()

    def _about_call(self, message: Any) -> None:
        if self.resources.spread is None:
            _log.warning("site %s ignores a message: its calls run in one process", self.site)
        elif type(message) is msg.RunCall:
            self._guests.run(message)
        else:
            self.resources.spread.receive(message)

    def _place_taken(self, message: msg.PlaceTaken) -> None:
        if not self._guests.place_taken(message):
            self._to_job(message)

    def _announce(self, message: msg.Announce) -> None:
        program = self._program(message.plan, message.at)  # kept with the job: others may evict it meanwhile
        if self._announced is not None:
            self._announced[message.job, message.at] = _Announced(program, frozenset(message.operations))

    def _withdraw(self, message: msg.Withdraw) -> None:
        if self._announced is not None:
            self._announced.pop((message.job, message.at), None)

    def add_program(self, plan: str, at: int, net: spec.Net) -> None:
        """Add a net without a message."""
        if (plan, at) not in self._programs:
            self._programs[plan, at] = CompiledNet(net)

    def _program(self, plan: str, at: int) -> CompiledNet | Exception:
        return self._programs.get((plan, at)) or LookupError(f"net {at} of plan {plan} is not known here")

    def _start(self, message: msg.StartJob) -> None:
        key = (message.job, message.at)
        if message.job > self._latest:
            self._latest = message.job
        early = self._early.pop(key, ()) if self._early else ()
        announced = None if self._announced is None else self._announced.pop(key, None)
        if announced is not None:
            early, program = announced.early, announced.failed or announced.program
        elif self._announced is not None:
            program = LookupError(f"job {message.job} was not announced here")
        else:
            program = self._program(message.plan, message.at)
        if isinstance(program, Exception):
            self._report(msg.JobBroken(message.job, message.at, broken_record(self.site, program)))
            self._ended[key] = None
            return
        if self._on_busy is not None and not self._jobs:
            self._on_busy(True)
        operations = None if announced is None else announced.operations
        job = self._jobs[key] = SiteJob(self.resources, self, message, program, operations)
        try:
            job.open(message.first, message.count, message.payload, message.last)
        except BaseException as error:  # noqa: BLE001 - the failure of one job must not affect others
            job.broken(error)
        for waiting in early:
            self._to_job(waiting)
        if message.incarnation:
            self._report(msg.JobRestarted(message.job, message.at))

    def _to_job(self, message: Any) -> None:
        key = (message.job, message.at)
        job = self._jobs.get(key)
        if job is not None:
            try:
                _HANDLERS[type(message)](job, message)
            except BaseException as error:  # noqa: BLE001 - the failure of one job must not affect others
                job.broken(error)
        elif type(message) is msg.LocationBack:  # the job is done here, so that it needs nothing of that location
            to, number = message.location, message.incarnation
            done = msg.RestoreJob(message.job, to, message.frames, [], message.at, number)
            self.resources.send(message.address, done)
            if self._flush_channels is not None:
                self._flush_channels()
        elif self._announced is not None:
            if key in self._announced:
                self._keep_early(self._announced[key], message)
        elif message.job >= self._latest and key not in self._ended:
            # From a site that has received the job before us. Numbers only grow: any other message is late.
            self._early.setdefault(key, []).append(message)

    def _keep_early(self, announced: _Announced, message: Any) -> None:
        announced.size += _EARLY_EACH + (size_of(message.payload) if type(message) in msg.WITH_PAYLOAD else 0)
        if announced.size <= _EARLY_BYTES:
            announced.early.append(message)
        elif announced.failed is None:
            text = f"other sites have sent more than {_EARLY_BYTES:,} bytes to site {self.site!r} before the job began"
            announced.failed = DfmError(f"{text} there")
            announced.early.clear()
            self._report(msg.JobBroken(message.job, message.at, broken_record(self.site, announced.failed)))

    def _cancel(self, message: msg.CancelJob) -> None:
        key = (message.job, message.at)
        self._early.pop(key, None)
        if self._announced is not None:
            self._announced.pop(key, None)
        job = self._jobs.pop(key, None)
        self._ended[key] = None
        if job is None:
            self._report(msg.JobStopped(message.job, message.at))
        else:
            self._dirty.discard(job)
            self._job_left()
            waiting = job.cancel()
            self._report(msg.CancelSeen(message.job, message.at, waiting))
            self._stopping[key] = job
            self.resources.spawn(self._stop(job, message), None, f"stop of job {job.job_id}")

    async def _stop(self, job: SiteJob, message: msg.CancelJob) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await job.close()
            await job.stopped()
            if job in self._holding and job.objects is not None:
                await asyncio.wait([job.objects.close()])
        finally:
            self._stopping.pop((message.job, message.at), None)
        job.let_go()
        self._report(msg.JobStopped(message.job, message.at, loop.time() - began))

    # objects of jobs

    def objects_built(self, job: SiteJob) -> None:
        """Note that a job has objects which must be closed before it has ended: the application waits for that."""
        self._holding.add(job)
        self._report(msg.ObjectsBuilt(job.number, job.at))

    def objects_closed(self, job: SiteJob) -> None:
        """Note that the objects of a job are closed."""
        self._holding.discard(job)

    def job_done(self, job: SiteJob) -> None:
        """Drop a job that is done, once its objects are closed."""
        objects = job.objects
        if objects is None or not objects.held:
            self._forget(job)
        elif not objects.ending:
            objects.ending = True
            self.resources.spawn(self._end(job, objects), None, f"the end of job {job.job_id}")

    async def _end(self, job: SiteJob, objects: JobObjects) -> None:
        try:
            async with asyncio.timeout(self.resources.grace):
                await job.finished()
        except TimeoutError:  # a generator that does not end must not keep the job forever
            _log.warning("a call of job %s at site %s does not return; its objects are closed", job.job_id, self.site)
        await asyncio.wait([objects.close()])
        if not job.stopping:  # else it was cancelled in the meantime, and its stop is reported
            job.let_go()
            self._report(msg.ObjectsClosed(job.number, job.at))
            self._forget(job)

    def _forget(self, job: SiteJob) -> None:
        key = (job.number, job.at)
        if self._jobs.pop(key, None) is not None and not self._jobs:
            self._job_left()
        if job.number >= self._latest:  # messages for jobs with smaller numbers are late in any case
            self._ended[key] = None

    def _job_left(self) -> None:
        if self._on_busy is not None and not self._jobs:
            self._on_busy(False)

    def touch(self, job: SiteJob) -> None:
        """Flush a job at the end of this turn of the loop."""
        if not self._scheduled:
            assert self._loop is not None  # noqa: S101 - set on entry
            self._scheduled = True
            self._loop.call_soon(self._flush_later)
        self._dirty.add(job)

    def _flush_later(self) -> None:
        self._scheduled = False
        self._flush()

    def flush_now(self, job: SiteJob) -> None:
        """Flush a job at once, if it is the only one; what several jobs send is written together."""
        self.touch(job)
        if len(self._jobs) == 1:
            self._flush()

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for job in dirty:
            try:
                job.flush()
            except BaseException as error:  # noqa: BLE001 - the failure of one job must not affect others
                job.broken(error)
        if self._flush_channels is not None:
            self._flush_channels()


_HANDLERS: Final[dict[type, Callable[[SiteJob, Any], None]]] = {
    msg.OpenFrames: SiteJob.open_frames,
    msg.Tokens: SiteJob.tokens,
    msg.LoopEnded: SiteJob.loop_ended,
    msg.ElementDone: SiteJob.elements_done,
    msg.LocationLost: SiteJob.location_lost,
    msg.LocationBack: SiteJob.location_back,
    msg.RestoreJob: SiteJob.restore,
    msg.Credit: SiteJob.credit,
    msg.StreamPull: lambda job, message: job.streams.wanted_elsewhere(message),
    msg.StreamItems: lambda job, message: job.streams.items(message),
    msg.StreamClose: lambda job, message: job.streams.closed_elsewhere(message),
    msg.PlaceTaken: SiteJob.place_taken,
    msg.CallReports: SiteJob.call_reports,
    msg.RelayToPlace: SiteJob.relay_to_place,
    msg.SpansTaken: SiteJob.spans_taken,
    msg.WaitAnswer: SiteJob.wait_answered,
}


_RECEIVERS: Final[dict[type, Callable[[SiteRuntime, Any], None]]] = {
    msg.SendNet: SiteRuntime._take_net,  # noqa: SLF001 - same module
    msg.StartJob: SiteRuntime._start,  # noqa: SLF001
    msg.CancelJob: SiteRuntime._cancel,  # noqa: SLF001
    msg.AbandonJob: SiteRuntime._abandon,  # noqa: SLF001
    **dict.fromkeys((msg.RunCall, *ABOUT_CALLS), SiteRuntime._about_call),  # noqa: SLF001
    msg.PermitGranted: lambda site, message: site.resources.permits.granted(message),
    msg.StopCalls: lambda site, message: site._guests.stop(message),  # noqa: SLF001
    msg.ElementsTaken: lambda site, message: site._guests.steer(message),  # noqa: SLF001
    msg.CloseCall: lambda site, message: site._guests.steer(message),  # noqa: SLF001
    msg.CloseCallObjects: lambda site, message: site._guests.close_objects(message),  # noqa: SLF001
    msg.PlaceTaken: SiteRuntime._place_taken,  # noqa: SLF001
    msg.Announce: SiteRuntime._announce,  # noqa: SLF001
    msg.Withdraw: SiteRuntime._withdraw,  # noqa: SLF001
}
"""What the runtime handles itself; everything else is for a job."""
