"""One worker process of a site, seen from the application: how it starts, speaks, hangs and ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final, Literal, Protocol

from aiomultiprocess.core import Process
from aiomultiprocess.pool import PoolWorker
from aiomultiprocess.types import Unit

from dfm_async.base.descriptors import close_in_children, no_fork
from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.stats import Traffic, WorkerStats
from dfm_async.runtime.once import in_thread
from dfm_async.runtime.site import PROGRAMS_KEPT
from dfm_async.wire import messages as msg
from dfm_async.wire.channel import Channel
from dfm_async.wire.output import Pulse
from dfm_async.workers.fork_server import ForkServer, ForkServerEnded, kill_group
from dfm_async.workers.memory import oom_kills
from dfm_async.workers.output import open_pipe
from dfm_async.workers.output_reader import OutputReader, site_logger
from dfm_async.workers.process import memory_of
from dfm_async.workers.pulse import pulse_interval
from dfm_async.workers.start import WorkerProcess
from dfm_async.workers.watch import Watch
from dfm_async.workers.worker import WorkerSetup, serve

__all__ = ["Seat", "SiteWorker", "WorkerOwner", "remember_net"]

_log = logging.getLogger(__name__)

_SERVER_ENDED: Final = (ForkServerEnded, ConnectionError)
"""What a start raises when the fork server ends in the middle of it."""
_ADVICE: Final = {
    errno.EMFILE: ". Raise the limit of open files of this process (ulimit -n)",
    errno.ENFILE: ". Raise the limit of open files of this machine (fs.file-max)",
    errno.EAGAIN: ". Raise the limit of processes and threads of this user (ulimit -u)",
    errno.ENOMEM: ". The machine has no memory left",
}
_REAP: Final = 0.5
"""How long the end of a channel may come before the end of its process."""


class Seat(Protocol):
    """A job at a worker: what is told when the worker ends, or does not respond."""

    def lost(self, at: int, error: WorkerLost) -> None:
        """The worker has ended."""
        ...

    def unresponsive(self, at: int, site: str, seconds: float) -> None:
        """The worker does not respond."""
        ...

    def responsive(self, at: int, site: str) -> None:
        """The worker responds again."""
        ...

    def retired(self, at: int, site: str, why: str) -> None:
        """The worker takes no further jobs, because calls on it do not return."""
        ...


class WorkerOwner(Protocol):
    """Whoever is told what happens to a worker."""

    @property
    def worker_changed(self) -> Callable[[], None]:
        """Is called when something about a worker has changed."""
        ...

    async def pause(self, seconds: float) -> None:
        """Waits before a start."""
        ...

    def worker_ended(self, worker: SiteWorker) -> None:
        """It has ended."""
        ...

    def worker_is_well(self, worker: SiteWorker) -> None:
        """A job has finished on it."""
        ...

    def worker_unresponsive(self, worker: SiteWorker, seconds: float) -> None:
        """It has jobs, and does not respond."""
        ...

    def worker_responsive(self, worker: SiteWorker) -> None:
        """It responds again."""
        ...

    def worker_hangs(self, worker: SiteWorker, text: str) -> None:
        """It has calls that do not return, and takes no further jobs."""
        ...

    def retire(self, worker: SiteWorker) -> None:
        """It takes no further job."""
        ...


class _Ends:
    """The ends of the connections with one worker: ours, and its own until it has them.

    Args:
        reader: reads what the worker prints.

    Raises:
        OSError: there are no more descriptors.
    """

    def __init__(self, reader: OutputReader) -> None:
        with no_fork(), ExitStack() as opened:
            self.channel, self.their_channel = _socket_pair(opened)
            self.lifeline, self.their_lifeline = _socket_pair(opened)
            output, self.their_output = open_pipe()
            close_in_children(self.their_output)
            reader.open(output)
            opened.pop_all()

    def sent(self) -> None:
        """Close the ends that the worker has now."""
        for end in (self.their_channel, self.their_lifeline, self.their_output):
            end.close()

    def close(self) -> None:
        """Close our ends. The reader closes that of the output."""
        self.channel.close()
        self.lifeline.close()


def _socket_pair(opened: ExitStack) -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        opened.enter_context(end)
        close_in_children(end)
    return pair


class SiteWorker(PoolWorker):  # type: ignore[misc] # aiomultiprocess has no type information
    """One worker process. Has no queues and no manager: only a channel."""

    def __init__(
        self,
        site: str,
        threads: int,
        shipped: bytes,
        fork_server: ForkServer | None,
        loop_initializer: Callable[[], asyncio.AbstractEventLoop] | None,
        on_message: Callable[[Any], None],
        pool: WorkerOwner,
        delay: float,
        output: Literal["log", "inherit"],
        unresponsive_after: float | None,
        apart: bool,
        environment: Mapping[str, str],
        known_only: bool,
    ) -> None:
        # Not the base class's constructor: that one starts a manager process.
        self.site = site
        self.address = ""
        self.nets: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.seats: dict[tuple[Any, int], None] = {}
        self.retired = False
        """Whether it ends with the last of its jobs."""
        self.outdated = False
        """Whether it was retired because its code is not the newest."""
        self.abandoned = 0
        """How many calls on it were abandoned and did not return, as of the last one that was reported."""
        self.delay = delay
        """How many seconds it waits before it starts."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.channel: Channel | None = None
        self.refused: msg.Refused | None = None
        self._hung_up = False
        self._grace: float | None = None
        self._starting: WorkerProcess | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._on_message = on_message
        self._pool = pool
        self._stuck_timer: asyncio.TimerHandle | None = None
        self._exited = False
        self._killed: str | None = None
        self._oom_kills = 0
        self._out_of_memory = False
        self._ends: _Ends | None = None
        self._output = OutputReader(site, self._pulse)
        self._watch: Watch | None = None
        self.tokens = Traffic()
        """What it has sent to other sites, as of its last sign of life."""
        self.heard: tuple[float, float] | None = None
        """When its last sign of life was taken, and how many seconds late."""
        pulse = None
        if unresponsive_after is not None:
            pulse = pulse_interval(unresponsive_after)
            self._watch = Watch(
                unresponsive_after,
                self._output.when_read,
                lambda seconds: pool.worker_unresponsive(self, seconds),
                lambda: pool.worker_responsive(self),
            )
        self._describe: Callable[[_Ends], WorkerSetup] = lambda ends: WorkerSetup(
            site,
            threads,
            shipped,
            ends.their_channel,
            ends.their_lifeline,
            ends.their_output,
            site_logger(site).getEffectiveLevel(),
            output == "log",
            pulse,
            {**os.environ, **environment},
            apart,
            known_only,
        )
        self._loop_initializer = loop_initializer
        self._fork_server = fork_server
        self.aio_process: WorkerProcess | None = None
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process; None before it has started."""
        return None if self.aio_process is None else self.aio_process.pid

    async def open(self) -> None:
        """Starts the process and waits until it is ready.

        Raises:
            DfmError: its operations cannot be loaded there.
            WorkerLost: it cannot be started, or ended before it was ready.
        """
        if self.delay:
            await self._pool.pause(self.delay)
        try:
            ends = self._ends = _Ends(self._output)
            try:
                setup = self._describe(ends)
                await in_thread(lambda: self._start(setup), f"start-{self.site}")
            except BaseException:
                self._output.close()
                ends.close()
                raise
            finally:
                ends.sent()
            await self._connect(ends)
        except (OSError, RuntimeError) as error:  # such as no more descriptors, processes or threads
            advice = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
            raise WorkerLost(self.site, None, f"it cannot be started: {error}{advice}") from error
        await asyncio.shield(self.ready)

    def _start(self, setup: WorkerSetup) -> None:
        self._oom_kills = oom_kills()
        unit = Unit(
            target=serve,
            args=(setup,),
            kwargs={},
            namespace=None,
            loop_initializer=self._loop_initializer,
        )
        process = WorkerProcess(self._fork_server, target=Process.run_async, args=(unit,), name=f"dfm-{self.site}")
        self._starting = process
        try:
            process.start()
        except _SERVER_ENDED as error:  # the next start launches another one: once more, nothing is lost yet
            if self._hung_up:
                raise WorkerLost(self.site, None, str(error)) from error
            try:
                process.start()
            except _SERVER_ENDED as again:
                raise WorkerLost(self.site, None, str(again)) from again
        self.aio_process = process
        self._output.pid = process.pid

    async def _connect(self, ends: _Ends) -> None:
        assert self.aio_process is not None  # noqa: S101 - it was started
        loop = asyncio.get_running_loop()
        loop.add_reader(self.aio_process.sentinel, self._process_ended)
        channel = self.channel = Channel(self._receive, self._channel_ended)
        try:
            await loop.create_unix_connection(lambda: channel, sock=ends.channel)
        except BaseException:
            self.kill("its channel cannot be opened")
            raise
        if self._hung_up:
            channel.close()

    def _pulse(self, pulse: Pulse) -> None:
        now = time.monotonic()
        self.heard = (now, max(0.0, now - pulse.sent))
        self.tokens = Traffic(pulse.tokens, pulse.token_bytes)
        if self._watch is not None:
            self._watch.pulse(pulse)
        self._pool.worker_changed()

    def launched(self) -> None:
        """A job is sent to the worker: from now on it should give signs of life."""
        if self._watch is not None:
            self._watch.begin()
        self._pool.worker_changed()

    def left(self) -> None:
        """A job has left its seat."""
        if self._watch is not None and not self.seats:
            self._watch.end()
        self._pool.worker_changed()

    @property
    def lag(self) -> float | None:
        """How long the worker's event loop took for a turn, as far as is known."""
        return None if self._watch is None else self._watch.lag

    @property
    def unresponsive(self) -> bool:
        """Whether the worker has jobs and gives no sign of life."""
        return self._watch is not None and self._watch.unresponsive

    @property
    def silence(self) -> float:
        """For how long the worker's event loop has not been seen to run, in seconds."""
        return 0.0 if self._watch is None else self._watch.silence

    def _receive(self, message: msg.Message) -> None:
        if isinstance(message, msg.Hello):
            self.address = message.address
            if not self.ready.done():
                self.ready.set_result(None)
        elif isinstance(message, msg.Refused):
            self.refused = message
        elif isinstance(message, msg.CallsAbandoned):
            self._calls_abandoned(message)
        else:
            self._on_message(message)

    def _calls_abandoned(self, message: msg.CallsAbandoned) -> None:
        """Threads of the worker hang: another one takes its place, and it ends with its last job, or at once."""
        self.abandoned = message.count
        if not self.retired:
            self.retire()
            self._pool.worker_hangs(self, message.text)
        if message.exhausted:
            self.kill(f"too many calls on it do not return: {message.text}")
        elif not self.seats:
            self.kill(message.text)
        self._pool.worker_changed()

    def _channel_ended(self, _error: Exception | None) -> None:
        # If the process closed it, its end should follow at once; if we did, it has the grace period.
        seconds = self._grace if self._hung_up else _REAP
        if seconds is not None and not self.ended.done():
            self._stuck_timer = asyncio.get_running_loop().call_later(seconds, self._stuck, seconds)

    def _stuck(self, seconds: float) -> None:
        if not self.ended.done():
            self.kill(f"it did not end within {seconds:g} s after its channel was closed")

    def _process_ended(self) -> None:
        assert self.aio_process is not None  # noqa: S101 - it was started
        asyncio.get_running_loop().remove_reader(self.aio_process.sentinel)
        code = self.aio_process.exitcode
        if code is None:  # its end is told a moment before it can be waited for
            self._reaping = asyncio.create_task(self._reap(), name=f"reap a worker of {self.site}")
        else:
            self._read_to_the_end(code)

    async def _reap(self) -> None:
        assert self.aio_process is not None  # noqa: S101 - it was started
        await in_thread(self.aio_process.join, f"reap-{self.site}")
        self._read_to_the_end(self.aio_process.exitcode)

    def _read_to_the_end(self, code: int | None) -> None:
        """Reads the last words first: they are a part of what is told."""
        self._exited = True
        if self.ended.done():  # we are a forked child, and have ended everything of our own
            return
        self._output.when_read(lambda: self._finish(code))

    def _finish(self, code: int | None) -> None:
        self._output.close()
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
        if self._watch is not None:
            self._watch.close()
        if code == -signal.SIGKILL and self._killed is None:
            self._out_of_memory = oom_kills() > self._oom_kills
        if self.channel is not None:
            self.channel.close()
        if self._ends is not None:
            self._ends.lifeline.close()
        if self.aio_process is not None:
            self.aio_process.close()
        if not self.ready.done():
            self.ready.set_exception(self._why(code))
            self.ready.exception()  # somebody may have stopped waiting
        self.ended.set_result(code)
        self._pool.worker_ended(self)

    def _why(self, code: int | None) -> DfmError:
        if self.refused is not None:
            if not self.refused.traceback:
                return DfmError(f"site {self.site!r} does not start: {self.refused.reason}")
            text = f"a worker of site {self.site!r} cannot load its operations: {self.refused.reason}"
            return DfmError(f"{text}\n\n{self.refused.traceback}")
        return self.lost(code, "before it was ready")

    def lost(self, code: int | None, detail: str = "") -> WorkerLost:
        """What to tell about the worker's end."""
        details = "; ".join(filter(None, (detail, self._killed)))
        return WorkerLost(self.site, code, details, tuple(self._output.tail), self._out_of_memory)

    @property
    def shared(self) -> bool:
        """Whether more than one job runs here."""
        return len({seat for seat, _ in self.seats}) > 1

    def stats(self) -> WorkerStats:
        """How the worker is."""
        pid = None if self.ended.done() else self.pid
        jobs = len({seat for seat, _ in self.seats})
        return WorkerStats(
            pid=pid,
            jobs=jobs,
            memory=memory_of(pid),
            lag=self.lag,
            unresponsive=self.unresponsive,
            retired=self.retired,
            abandoned=self.abandoned,
        )

    def leave(self, seat: Seat, at: int, *, well: bool) -> None:
        """A job leaves; ``well``: it has finished, so the worker is in order."""
        if self.seats.pop((seat, at), self) is self:
            return
        self.left()
        if well:
            self._pool.worker_is_well(self)
        if self.outdated and not self.abandoned and not self.seats:
            self.hang_up()
        elif self.retired and not self.seats:
            self.kill("it was retired, and its last job has ended")

    def retire(self) -> None:
        """Takes no further job, and ends with the last of those it has; its slot is free for another worker."""
        self.retired = True
        self._pool.retire(self)

    def outdate(self, grace: float) -> None:
        """Retire the worker, because its code is not the newest. Idle, it has the grace period to end."""
        self.outdated = True
        self._grace = grace
        self.retire()
        if not self.seats:
            self.hang_up()

    def abandon(self, job: int, at: int) -> None:
        """Does not wait any more for a cancelled job whose calls do not return; other jobs go on to their ends."""
        self.retire()
        if self.channel is not None:
            self.channel.send(msg.AbandonJob(job, at))

    def when_read(self, call: Callable[[], None]) -> None:
        """Calls back when everything that it has said by now has been read."""
        self._output.when_read(call)

    def hang_up(self) -> None:
        """Ask the process to end, by closing the channel. Only an outdated worker is killed if it takes too long."""
        self._hung_up = True
        if os.getpid() != self._owner:  # a forked child: the worker is its parent's
            if not self.ended.done():
                self.ended.set_result(None)
        elif self.channel is not None:
            self.channel.close()

    def kill(self, reason: str = "") -> None:
        """Ends the process and all others of its group at once, for a reason that its jobs are told."""
        pid = None if self._exited or os.getpid() != self._owner else self.pid
        if pid is not None:
            if self._killed is None:
                self._killed = reason
            kill_group(pid)
            try:
                os.kill(pid, signal.SIGKILL)  # one that was spawned may not lead its group yet
            except ProcessLookupError:
                _log.debug("worker %s of site %s had ended already", pid, self.site)
        elif self._starting is not None and self._fork_server is not None and os.getpid() == self._owner:
            self._fork_server.abandon(self._starting)


def remember_net(worker: SiteWorker, plan: str, at: int) -> None:
    """Notes that a worker knows a net. Forgets in the same order as the worker does."""
    worker.nets[plan, at] = None
    while len(worker.nets) > PROGRAMS_KEPT:
        worker.nets.popitem(last=False)
