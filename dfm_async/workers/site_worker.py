"""One worker process of a site, seen from the application: its start, messages, heartbeats and end."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from aiomultiprocess.pool import PoolWorker

from dfm_async.base.containers import BoundedDict
from dfm_async.base.descriptors import close_in_children, no_fork
from dfm_async.base.signals import Outcome
from dfm_async.base.suspension import suspension
from dfm_async.base.tasks import in_thread
from dfm_async.errors import DfmError, WorkerLost
from dfm_async.model.events import NoticeKind
from dfm_async.model.stats import Traffic, WorkerStats
from dfm_async.runtime.site_runtime import PROGRAMS_KEPT
from dfm_async.wire import messages as msg
from dfm_async.wire.channel import Channel
from dfm_async.wire.worker_output import Debugging, Heartbeat
from dfm_async.workers.fork_server import ForkServer, ForkServerEnded, kill_group
from dfm_async.workers.heartbeat import Watch, heartbeat_interval
from dfm_async.workers.lent_terminal import TerminalAccess, own_terminal, take_back
from dfm_async.workers.output import open_pipe
from dfm_async.workers.output_reader import OutputReader, site_logger
from dfm_async.workers.process_memory import memory_of, oom_kills
from dfm_async.workers.start import WorkerProcess
from dfm_async.workers.worker import WorkerSetup, run

_log = logging.getLogger(__name__)

_SERVER_ENDED: Final = (ForkServerEnded, ConnectionError)
"""What a start raises when the fork server ends in the middle of it."""
_ADVICE: Final = {
    errno.EMFILE: ". Raise the limit of open files of this process (ulimit -n)",
    errno.ENFILE: ". Raise the limit of open files of this machine (fs.file-max)",
    errno.EAGAIN: ". Raise the limit of processes and threads of this user (ulimit -u)",
    errno.ENOMEM: ". The machine has no memory left",
}
_OVERDUE: Final = 2.0
"""For how many seconds a blocked loop may miss a deadline before its process is replaced."""
_REAP: Final = 0.5
"""How long the end of a channel may come before the end of its process."""


class AssignedLocation(Protocol):
    """One location of a job that is assigned to a worker, and is notified of what happens to it."""

    job: Hashable
    """The run of the job that it belongs to."""
    job_id: str

    def lost(self, error: WorkerLost) -> None:
        """Note that the worker has ended."""

    def notice(self, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        """Note that the worker does not respond, responds again, takes no further jobs, or uses one core (and why)."""


class WorkerOwner(Protocol):
    """The owner of a worker, which is notified of its changes."""

    worker_changed: Callable[[], None]
    """Is called when something about a worker has changed."""

    def worker_ready(self, worker: SiteWorker) -> None:
        """Note that a worker can run jobs, and calls of others."""

    def workers_wanted(self, worker: SiteWorker, count: int) -> None:
        """Note that further workers would have calls of this one to run."""

    def worker_returned(self, worker: SiteWorker, address: str, stuck: str) -> None:
        """Note that a worker does not need another one any longer; ``stuck``: which call there does not return."""

    def permit_wanted(self, worker: SiteWorker, message: msg.PermitWanted) -> None:
        """Note that a call of an operation with limits wants to start."""

    def permit_returned(self, worker: SiteWorker, message: msg.PermitReturned) -> None:
        """Note that such a call has ended, or waits no longer."""

    def worker_ended(self, worker: SiteWorker) -> None:
        """Note that a worker has ended."""

    def retire(self, worker: SiteWorker, *, lost: bool) -> None:
        """Replace a worker that takes no further job; ``lost``: because calls on it do not return."""


class _Ends:
    """The ends of the connections with one worker: ours, and its own until it has them.

    Raises:
        OSError: there are no more descriptors.
    """

    def __init__(self, reader: OutputReader, terminal: str | None) -> None:
        self.terminal: TerminalAccess | None = None
        self.grant: socket.socket | None = None
        with no_fork(), ExitStack() as opened:
            if terminal is not None:
                self.grant, granted = _socket_pair(opened)
                self.terminal = TerminalAccess(terminal, os.getpgrp(), granted)
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
        if self.terminal is not None:
            self.terminal.granted.close()

    def close(self) -> None:
        """Close our ends. The reader closes that of the output."""
        self.channel.close()
        self.ended()

    def ended(self) -> None:
        """Close the ends that the worker has not closed with its channel."""
        self.lifeline.close()
        if self.grant is not None:
            self.grant.close()


def _socket_pair(opened: ExitStack) -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        opened.enter_context(end)
        close_in_children(end)
    return pair


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How the workers of a site start and run."""

    site: str
    threads: int
    """How many synchronous calls run at the same time."""
    shipped: bytes = field(repr=False)
    """The operations."""
    fork_server: ForkServer | None = None
    loop_initializer: Callable[[], asyncio.AbstractEventLoop] | None = None
    output: Literal["log", "inherit"] = "log"
    """Where standard output and standard error go."""
    unresponsive_after: float | None = None
    """After how many seconds without a heartbeat a worker with jobs is reported; None means never."""
    enough_workers: int | None = None
    """With how many other workers one does not compute itself; None: it always does."""
    apart: bool = False
    """Whether other sites and the application are on other machines: nothing of them is unpickled."""
    checkpoints: tuple[str | None, int] = (None, 0)
    """The folder for checkpoints, if there is one, and how many bytes they may take."""
    known_only: bool = False
    """Whether values of others may only be of classes that the operations take and return."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further environment variables."""
    forwarded: frozenset[type] = frozenset()
    """The kinds of messages of workers that are not decoded."""


class SiteWorker(PoolWorker):  # type: ignore[misc] # aiomultiprocess has no type information
    """One worker process. Has no queues and no manager: only a channel."""

    def __init__(self, options: WorkerOptions, on_message: Callable[[Any], None], pool: WorkerOwner) -> None:
        # Not the base class's constructor: that one starts a manager process.
        site = self.site = options.site
        self._options = options
        self.address = ""
        self._nets: BoundedDict[tuple[str, int], None] = BoundedDict(PROGRAMS_KEPT)
        self.assignments: dict[AssignedLocation, None] = {}
        """The locations of jobs that run here."""
        self.lent = False
        """Whether it runs calls of another worker."""
        self.retired = False
        """Whether it ends with the last of its jobs."""
        self.outdated = False
        """Whether it was retired because its code is not the newest."""
        self.abandoned = 0
        """How many calls on it were abandoned and did not return, as of the last one that was reported."""
        self.succeeded = False
        """Whether a job has finished on it."""
        self.ready: Outcome[None] = Outcome()
        self.ended: Outcome[int | None] = Outcome()
        self.channel: Channel | None = None
        self.refused: msg.WorkerRefused | None = None
        self._disconnected = False
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
        self._output = OutputReader(site, self._heartbeat, self._debugged)
        self._debugging = False
        """Whether a debugger in it uses the terminal, or waits for it."""
        limit = math.inf if options.unresponsive_after is None else options.unresponsive_after
        self._watch = Watch(limit, self._output.when_read, self._silent, self._back)
        self.tokens = Traffic()
        self._running = self._waiting = 0
        """What it has sent to other sites, as of its last heartbeat."""
        self._bound: dict[tuple[str, str], None] = {}
        """The jobs that compute on one core although they could use more, and why."""
        self.last_heartbeat: tuple[float, float] | None = None
        """When its last heartbeat was taken, and how many seconds late."""
        self.aio_process: WorkerProcess | None = None
        self._owner = os.getpid()

    def _setup(self, ends: _Ends) -> WorkerSetup:
        options, silent = self._options, self._options.unresponsive_after
        return WorkerSetup(
            site=self.site,
            threads=options.threads,
            shipped=options.shipped,
            channel=ends.their_channel,
            lifeline=ends.their_lifeline,
            output=ends.their_output,
            level=site_logger(self.site).getEffectiveLevel(),
            streams=options.output == "log",
            heartbeat=None if silent is None else heartbeat_interval(silent),
            environment={**os.environ, **options.environment},
            terminal=ends.terminal,
            enough_workers=options.enough_workers,
            apart=options.apart,
            checkpoints=options.checkpoints,
            known_only=options.known_only,
        )

    @property
    def pid(self) -> int | None:
        """The process; None before it has started."""
        return None if self.aio_process is None else self.aio_process.pid

    async def open(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            DfmError: its operations cannot be loaded there.
            WorkerLost: it cannot be started, or ended before it was ready.
        """
        try:
            ends = self._ends = _Ends(self._output, None if self._options.apart else own_terminal())
            try:
                setup = self._setup(ends)
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
        options = self._options
        process = WorkerProcess(
            options.fork_server, target=run, args=(setup, options.loop_initializer), name=f"dfm-{self.site}"
        )
        self._starting = process
        try:
            process.start()
        except _SERVER_ENDED as error:  # the next start launches another one: once more, nothing is lost yet
            if self._disconnected:
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
        channel = self.channel = Channel(self._receive, self._channel_ended, forwarded=self._options.forwarded)
        try:
            await loop.create_unix_connection(lambda: channel, sock=ends.channel)
        except BaseException:
            self.kill("its channel cannot be opened")
            raise
        finally:  # not before: what a worker that has ended at once has sent is read first
            loop.add_reader(self.aio_process.sentinel, self._process_ended)
        if self._disconnected:
            channel.close()

    def _heartbeat(self, heartbeat: Heartbeat) -> None:
        now = time.monotonic()
        self.last_heartbeat = (now, max(0.0, now - heartbeat.sent))
        self.tokens = Traffic(heartbeat.tokens, heartbeat.token_bytes)
        self._running, self._waiting = heartbeat.running, heartbeat.waiting
        self._watch.heartbeat(heartbeat)
        if heartbeat.bound is not None:
            self.report_bound(*heartbeat.bound)
        if heartbeat.overdue > _OVERDUE and not self._debugging:
            self.kill(
                f"an asynchronous operation or a constructor has blocked its event loop for {heartbeat.lag:.1f} s, and "
                f"the deadline of a call passed {heartbeat.overdue:.1f} s ago"
            )
        self._pool.worker_changed()

    def _debugged(self, report: Debugging) -> None:
        """Suspend all deadlines and the watch of this worker while a person debugs it."""
        if report.active is not self._debugging:
            self._debugging = report.active
            self._watch.suspend(suspended=report.active)
            (suspension().hold if report.active else suspension().release)()
            if report.active and self._ends is not None and self._ends.grant is not None:
                with suppress(OSError):  # it has just died
                    self._ends.grant.send(b"1")

    def _suspend_deadlines(self, suspended: bool) -> None:
        if self.channel is not None:
            self.channel.send(msg.SuspendDeadlines(suspended))

    def launched(self, assigned: AssignedLocation) -> None:
        """Note that a job is sent to the worker: from now on it should give heartbeats."""
        self._watch.begin()
        self._pool.worker_changed()
        if self._watch.unresponsive:
            assigned.notice("unresponsive", self._watch.silence)
        if self.channel is not None and len(self.assignments) == 1:
            self.channel.flush()  # it is idle: let it begin while we go on; several jobs are sent together

    def _silent(self, seconds: float) -> None:
        self._pool.worker_changed()
        text = "worker %s of site %s has %d jobs and has not responded for %.1f s"
        _log.warning(text, self.pid, self.site, len(self.assignments), seconds, extra={"site": self.site})
        self._notice("unresponsive", seconds)

    def _back(self) -> None:
        self._pool.worker_changed()
        _log.warning("worker %s of site %s responds again", self.pid, self.site, extra={"site": self.site})
        self._notice("responsive")

    def _notice(self, kind: NoticeKind, seconds: float = 0.0, why: str = "") -> None:
        for assigned in list(self.assignments):
            assigned.notice(kind, seconds, why)

    def report_bound(self, job_id: str | None, why: str) -> None:
        """Notify a job, or all, that it computes on one core although it could use more; once for each reason."""
        for assigned in [found for found in self.assignments if job_id in (None, found.job_id)]:
            if (assigned.job_id, why) not in self._bound:
                self._bound[assigned.job_id, why] = None
                assigned.notice("bound", why=why)

    def _receive(self, message: msg.Message) -> None:
        handler = _HANDLERS.get(type(message))
        if handler is None:
            self._on_message(message)
        else:
            handler(self, message)

    def _hello(self, message: msg.WorkerReady) -> None:
        self.address = message.address
        self.ready.settle(None)
        suspended = suspension()
        if suspended.active:
            self._suspend_deadlines(True)
        suspended.subscribe(self._suspend_deadlines)
        self._pool.worker_ready(self)

    def _wanted(self, message: msg.WorkersWanted) -> None:
        self._pool.workers_wanted(self, message.count)

    def _returned(self, message: msg.WorkerReturned) -> None:
        self._pool.worker_returned(self, message.address, message.stuck)

    def _permit_wanted(self, message: msg.PermitWanted) -> None:
        self._pool.permit_wanted(self, message)

    def _permit_returned(self, message: msg.PermitReturned) -> None:
        self._pool.permit_returned(self, message)

    def _refused(self, message: msg.WorkerRefused) -> None:
        self.refused = message

    def _call_completed(self, _message: msg.CallCompleted) -> None:
        self.succeeded = True

    def _calls_abandoned(self, message: msg.CallsAbandoned) -> None:
        """Threads of the worker hang: another one takes its place, and it ends with its last job, or at once."""
        self.abandoned = message.count
        if not self.retired:
            self.retire(lost=True)
            text = "worker %s of site %s takes no further jobs and is replaced: %s"
            _log.warning(text, self.pid, self.site, message.text, extra={"site": self.site})
            self._notice("retired", why=message.text)
        if message.exhausted:
            self.kill(f"too many calls on it do not return: {message.text}")
        elif not self.assignments and not self.lent:
            self.kill(message.text)
        self._pool.worker_changed()

    def _channel_ended(self, _error: Exception | None) -> None:
        # If the process closed it, its end should follow at once; if we did, it has the grace period.
        seconds = self._grace if self._disconnected else _REAP
        if seconds is not None and not self.ended.done():
            self._stuck_timer = asyncio.get_running_loop().call_later(seconds, self._stuck, seconds)

    def _stuck(self, seconds: float) -> None:
        if not self.ended.done():
            self.kill(f"it did not end within {seconds:g} s after its channel was closed")

    def _process_ended(self) -> None:
        assert self.aio_process is not None  # noqa: S101 - it was started
        asyncio.get_running_loop().remove_reader(self.aio_process.sentinel)
        code = self.aio_process.exitcode
        if code is None:  # its end is reported a moment before it can be waited for
            self._reaping = asyncio.create_task(self._reap(), name=f"reap a worker of {self.site}")
        else:
            self._read_to_the_end(code)

    async def _reap(self) -> None:
        assert self.aio_process is not None  # noqa: S101 - it was started
        await in_thread(self.aio_process.join, f"reap-{self.site}")
        self._read_to_the_end(self.aio_process.exitcode)

    def _read_to_the_end(self, code: int | None) -> None:
        """Read the last output first: it is part of the report."""
        self._exited = True
        if self.ended.done():  # we are a forked child, and have ended everything of our own
            return
        self._output.when_read(lambda: self._finish(code))

    def _finish(self, code: int | None) -> None:
        self._output.close()
        suspension().unsubscribe(self._suspend_deadlines)
        if self._debugging:
            self._debugged(Debugging(active=False))
            if self.pid is not None:
                take_back(self.pid)
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
        self._watch.close()
        if code == -signal.SIGKILL and self._killed is None:
            self._out_of_memory = oom_kills() > self._oom_kills
        if self.channel is not None:
            self.channel.close()
        if self._ends is not None:
            self._ends.ended()
        if self.aio_process is not None:
            self.aio_process.close()
        if not self.ready.done():
            self.ready.fail(self._why(code))
        self.ended.settle(code)
        self._pool.worker_ended(self)

    def _why(self, code: int | None) -> DfmError:
        if self.refused is not None:
            if not self.refused.traceback:
                return DfmError(f"site {self.site!r} does not start: {self.refused.reason}")
            text = f"a worker of site {self.site!r} cannot load its operations: {self.refused.reason}"
            return DfmError(f"{text}\n\n{self.refused.traceback}")
        return self.lost(code, "before it was ready")

    def lost(self, code: int | None, detail: str = "") -> WorkerLost:
        """Return the error that reports the worker's end."""
        details = "; ".join(filter(None, (detail, self._killed)))
        return WorkerLost(self.site, code, details, tuple(self._output.tail), self._out_of_memory)

    @property
    def shared(self) -> bool:
        """Whether more than one job runs here."""
        return self._jobs > 1

    @property
    def _jobs(self) -> int:
        return len({assigned.job for assigned in self.assignments})

    def stats(self) -> WorkerStats:
        """How the worker is."""
        pid = None if self.ended.done() else self.pid
        return WorkerStats(
            pid=pid,
            jobs=self._jobs,
            memory=memory_of(pid),
            lag=self._watch.lag,
            running=self._running,
            waiting=self._waiting,
            unresponsive=self._watch.unresponsive,
            retired=self.retired,
            abandoned=self.abandoned,
            bound=tuple(why for _, why in self._bound),
        )

    def teach(self, plan: str, at: int, net: Callable[[], bytes]) -> None:
        """Send the net of a location of a plan, if the worker does not have it. It forgets in the same order as we."""
        if (plan, at) not in self._nets:
            data = net()  # first: what cannot be encoded is not known to the worker
            self._nets[plan, at] = None
            assert self.channel is not None  # noqa: S101 - it is ready
            self.channel.send(msg.SendNet(plan, at, data))

    def leave(self, assigned: AssignedLocation, *, succeeded: bool) -> None:
        """Release a location; ``succeeded``: its job has finished, so the worker is in order."""
        if assigned not in self.assignments:
            return
        del self.assignments[assigned]
        if self._bound:
            jobs = {found.job_id for found in self.assignments}
            self._bound = {key: None for key in self._bound if key[0] in jobs}
        if not self.assignments:
            self._watch.end()
        self._pool.worker_changed()
        self.succeeded = self.succeeded or succeeded
        if self.retired:
            self.end_if_retired()

    def end_if_retired(self) -> None:
        """End a retired worker that has no jobs, and runs no calls of others."""
        if not self.retired or self.assignments or self.lent:
            return
        if self.outdated and not self.abandoned:
            self.disconnect()
        else:
            self.kill("it was retired, and its last job has ended")

    def retire(self, *, lost: bool = False) -> None:
        """Take no further job, and end with the last of those it has; its slot is free for another worker."""
        self.retired = True
        self._pool.retire(self, lost=lost)

    def outdate(self, grace: float) -> None:
        """Retire the worker, because its code is not the newest. Idle, it has the grace period to end."""
        self.outdated = True
        self._grace = grace
        self.retire()
        self.end_if_retired()

    def abandon(self, job: int, at: int) -> None:
        """Stop waiting for a cancelled job whose calls do not return; other jobs go on to their ends."""
        self.retire()
        if self.channel is not None:
            self.channel.send(msg.AbandonJob(job, at))

    def when_read(self, call: Callable[[], None]) -> None:
        """Call back when the output that it has written by now has been read."""
        self._output.when_read(call)

    def disconnect(self) -> None:
        """Ask the process to end, by closing the channel. Only an outdated worker is killed if it takes too long."""
        self._disconnected = True
        if os.getpid() != self._owner:  # a forked child: the worker is its parent's
            self.ended.settle(None)
        elif self.channel is not None:
            self.channel.close()

    def kill(self, reason: str = "") -> None:
        """End the process and all others of its group at once, for a reason that its jobs receive."""
        pid = None if self._exited or os.getpid() != self._owner else self.pid
        if pid is not None:
            if self._killed is None:
                self._killed = reason
            kill_group(pid)
            try:
                os.kill(pid, signal.SIGKILL)  # one that was spawned may not lead its group yet
            except ProcessLookupError:
                _log.debug("worker %s of site %s had ended already", pid, self.site)
        elif self._starting is not None and self._options.fork_server is not None and os.getpid() == self._owner:
            self._options.fork_server.abandon(self._starting)


_HANDLERS: Final[Mapping[type, Callable[[SiteWorker, Any], None]]] = {
    msg.WorkerReady: SiteWorker._hello,  # noqa: SLF001 - same module
    msg.WorkersWanted: SiteWorker._wanted,  # noqa: SLF001
    msg.WorkerReturned: SiteWorker._returned,  # noqa: SLF001
    msg.PermitWanted: SiteWorker._permit_wanted,  # noqa: SLF001
    msg.PermitReturned: SiteWorker._permit_returned,  # noqa: SLF001
    msg.WorkerRefused: SiteWorker._refused,  # noqa: SLF001
    msg.CallCompleted: SiteWorker._call_completed,  # noqa: SLF001
    msg.CallsAbandoned: SiteWorker._calls_abandoned,  # noqa: SLF001
}
"""The messages that are not about jobs."""
