"""The site's side: starts a program, gives it tasks, waits for its results."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import completed
from dfm_async.errors import BadTask, LaunchFailed, PeerGone, ProgramExited, TaskAborted
from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.handshake import HandshakeTransport
from dfm_async.exchange.launcher import Launcher
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.program_connection import SITE, OfferedResult, ProgramConnection
from dfm_async.exchange.site_machine import (
    AfterExit,
    AfterTask,
    after_exit,
    after_task,
    check_task,
    explain,
    launch_failure,
)
from dfm_async.exchange.task import ExchangeState, ProgramState, ProgramStatus, Task, TaskResult
from dfm_async.exchange.transports import SiteTransport, TransportName, site_transport
from dfm_async.exchange.value_codec import PlainCodec, ValueCodec

_log = logging.getLogger(__name__)

T = TypeVar("T")

_EXIT_DELAY: Final = 1.0
"""When a connection has ended, how long the exit of the process may take to be noticed, in seconds."""
_LAST_MESSAGE: Final = 0.25
"""How long a program that is about to be stopped may take to read why, in seconds: it may not read at all."""
_ABORTED: Final = "the site aborted it"


def _log_metrics(values: Mapping[str, Any], step: int | None) -> None:
    _log.info("metrics at step %s: %s", step, values)


def _log_progress(done: float, total: float | None, note: str) -> None:
    _log.debug("progress: %s of %s %s", done, total, note)


@dataclass(slots=True)
class _ExecutorCall:
    """A call of the executor."""

    task: asyncio.Task[Any]
    aborted: str | None = None

    def abort(self, reason: str) -> None:
        if self.aborted is None:
            self.aborted = reason
            self.task.cancel()

    async def abort_when(self, event: asyncio.Event) -> None:
        await event.wait()
        self.abort(_ABORTED)


class LauncherExecutor:
    """Run tasks in an external program, one at a time.

    An async context manager. Cancelling :meth:`execute` ends the program; so does leaving the block.

    Args:
        launcher: starts and stops the program; None if the program attaches (see :meth:`bootstrap`).
        options: timeouts and limits of the executor, and the names of tasks.
        transport: the transport: a Unix socket, a TCP socket on this machine, memory (only within one process), that of
            a version of NVFLARE, or an object with settings, such as ``FilePipeTransport()``.
        codec: how values become bytes; both sides must have the same.
        site: the name of the site, which the program gets.
        job: the id of the job, which the program gets.
        on_metrics: called with the metrics that the program logs, and their step. Must not block.
        on_progress: called with the progress of the program. Must not block.
    """

    def __init__(
        self,
        launcher: Launcher | None,
        options: ExecutorOptions | None = None,
        *,
        transport: TransportName | SiteTransport = "unix",
        codec: ValueCodec | None = None,
        site: str = "",
        job: str = "",
        on_metrics: Callable[[Mapping[str, Any], int | None], None] = _log_metrics,
        on_progress: Callable[[float, float | None, str], None] = _log_progress,
    ) -> None:
        self.options: ExecutorOptions = options or ExecutorOptions()
        if not isinstance(self.options, ExecutorOptions):
            raise TypeError(f"options must be ExecutorOptions, not {options!r}")
        self._launcher = launcher
        self._transport = site_transport(transport) if isinstance(transport, str) else transport
        self._codec: ValueCodec = codec or getattr(self._transport, "codec", None) or PlainCodec()
        self._site = site
        self._job = job
        self._on_metrics = on_metrics
        self._on_progress = on_progress
        self._turn = asyncio.Lock()
        self._connection: ProgramConnection | None = None
        self._replaced: list[ProgramConnection] = []
        self._up: Outcome[ProgramConnection] | None = None
        self._deferred: asyncio.Task[None] | None = None
        self._call: _ExecutorCall | None = None
        self._exit: asyncio.Task[ProgramStatus] | None = None
        self._last_result: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._phase: Literal["new", "open", "ending", "closed"] = "new"

    async def __aenter__(self) -> LauncherExecutor:
        await self.initialize()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort(f"the site stops: {error!r}")
        await self.finalize()

    async def initialize(self) -> None:
        """Make ready; ``async with`` does it."""
        if self._phase != "new":
            raise RuntimeError(f"this executor is {self._phase}: make a new one")
        self._phase = "open"
        try:
            await self._transport.open(self.options, self._site, self._job)
            if self._launcher is not None:
                await self._launcher.initialize()
        except BaseException:  # "async with" leaves only what it has entered
            await self.finalize()
            raise

    def bootstrap(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the file by which a program that somebody else starts can attach, once.

        Args:
            path: where to write it; by default a new file of its own. It is removed when it was used.
        """
        if self._phase != "open" or not isinstance(self._transport, HandshakeTransport):
            raise RuntimeError("programs can attach only to an open executor with a transport of ours")
        if self._launcher is not None:
            raise RuntimeError("this executor launches its program itself: make one with launcher=None")
        if self._connection is not None and self._connection.up:
            raise RuntimeError("a program is attached: another one can attach when it has ended")
        return self._transport.invite(self._expect_up(), launch_once=True, path=path)

    @property
    def state(self) -> ExchangeState | None:
        """How far the current exchange is, or the last one was."""
        return self._connection.state if self._connection is not None else None

    def status(self) -> ProgramStatus:
        """Return what the launcher knows of the program."""
        return self._launcher.status() if self._launcher is not None else ProgramStatus(ProgramState.NOT_RUNNING)

    # tasks

    async def execute(self, task: Task, *, abort: asyncio.Event | None = None) -> TaskResult:
        """Give the program a task, and wait for its result with all large parts.

        Args:
            task: what to do.
            abort: when it is set, the task is aborted and the program stopped.

        Returns:
            The result with the program's own return code.

        Raises:
            BadTask: the task has a name that is not taken.
            LaunchFailed: the program did not start, or did not come up.
            ProgramExited: it ended before the result was there.
            PeerGone: its connection ended in another way.
            TaskRejected: it did not take the task.
            TaskAborted: it aborted the task, or :meth:`abort` was called.
            BadResult: the result is not what the task asks for.
            TransferFailed: a large part of the result did not come.
            TimeoutError: one of the times in the options was exceeded; names what was waited for.
        """
        found: TaskResult = await self._one_at_a_time(task, abort, self._execute(task))
        return found

    async def offer(self, task: Task, receivers: Sequence[str], *, abort: asyncio.Event | None = None) -> OfferedResult:
        """Give the program a task whose result several receivers pull; return when the program has answered.

        The program serves the large parts until every receiver has them. The next task waits for that, if every task
        has a process of its own.

        Args:
            task: what to do.
            receivers: who will call ``pull`` of what this returns.
            abort: when it is set, the task is aborted and the program stopped.
        """
        named = not isinstance(receivers, str) and all(isinstance(name, str) and name for name in receivers)
        if not receivers or not named or len(set(receivers)) < len(receivers):
            raise ValueError(f"receivers must be different names, not {receivers!r}")
        found: OfferedResult = await self._one_at_a_time(task, abort, self._offer(task, receivers))
        return found

    async def _one_at_a_time(self, task: Task, abort: asyncio.Event | None, work: Coroutine[Any, Any, T]) -> T:
        """Run the work after that of the task before, so that an abort can end it wherever it is."""
        ours = asyncio.current_task()
        assert ours is not None  # noqa: S101 - this is a coroutine
        before = ours.cancelling()
        call = _ExecutorCall(ours)
        watching: asyncio.Task[None] | None = None
        try:
            self._check(task)
            if abort is not None:
                watching = asyncio.get_running_loop().create_task(call.abort_when(abort), name=f"abort of task {task}")
            async with self._turn:
                self._check_phase(task)
                self._call = call
                try:
                    return await work
                finally:
                    self._call = None
        except asyncio.CancelledError as error:
            if call.aborted is None or ours.uncancel() > before:
                raise  # our caller was cancelled too
            raise TaskAborted(task.name, call.aborted) from error
        finally:
            work.close()
            if watching is not None:
                await _end(watching)

    def _check(self, task: Task) -> None:
        missing = check_task(self.options, task)
        self._check_phase(task)
        if missing:
            advice = "pass them, or give a task that is no round of a training another name"
            _log.warning("task %s has no %s: %s", task, " and no ".join(missing), advice)

    def _check_phase(self, task: Task) -> None:
        if self._phase != "open":
            raise BadTask(task.name, f"the executor is {self._phase}")

    async def _execute(self, task: Task) -> TaskResult:
        async def work(connection: ProgramConnection) -> TaskResult:
            found = await connection.exchange(task, (SITE,))
            return found.value or await found.pull(SITE)

        return await self._with_program(task, work)

    async def _offer(self, task: Task, receivers: Sequence[str]) -> OfferedResult:
        return await self._with_program(task, lambda connection: connection.exchange(task, receivers))

    async def _with_program(self, task: Task, work: Callable[[ProgramConnection], Coroutine[Any, Any, T]]) -> T:
        """Do something with a program that is up, and what follows it."""
        connection = await self._ready(task)
        try:
            found = await work(connection)
        except BaseException as error:
            await self._after(task, connection, error, None)
            raise
        await self._after(task, connection, None, found if isinstance(found, OfferedResult) else None)
        return found

    # before a task

    async def _ready(self, task: Task) -> ProgramConnection:
        """Return the connection of a program that is up: the one that runs, or a new one."""
        await self._wait_for_deferred_stop()
        connection, launcher = self._connection, self._launcher
        runs = launcher is None or (launcher.launch_once and launcher.status().state is ProgramState.RUNNING)
        if connection is not None and connection.up and runs:
            return connection
        if launcher is None:
            return await self._attached(task)
        await self._drop("the program did not go on")
        try:
            await self._launch(task, launcher)
            return await self._come_up(task, launcher)
        except BaseException as error:
            self._transport.forget()
            await self._drop(self._why(error), kill=True)
            raise

    def _why(self, error: BaseException | None) -> str:
        """Return what a program is notified of when its task ends in an error."""
        return (self._call and self._call.aborted) or str(error) or "the site stops"

    async def _wait_for_deferred_stop(self) -> None:
        deferred = self._deferred
        if deferred is None:
            return
        launcher = self._launcher
        await asyncio.wait({deferred}, timeout=2 * self.options.deferred_stop_timeout + 1)
        if not deferred.done() and launcher is not None:
            await launcher.stop(asked=False)
            await asyncio.wait({deferred})

    def _expect_up(self) -> Callable[[Pipe], None]:
        up = self._up
        if up is None or up.done():  # else somebody may be waiting for it
            up = self._up = Outcome()

        def on_up(pipe: Pipe) -> None:
            connection = ProgramConnection(
                pipe, self.options, self._codec, on_metrics=self._on_metrics, on_progress=self._on_progress
            )
            if self._connection is not None:
                self._replaced.append(self._connection)
            self._connection = connection
            up.settle(connection)

        return on_up

    async def _launch(self, task: Task, launcher: Launcher) -> None:
        limit = self.options.launch_timeout
        scope = asyncio.timeout(limit)
        try:
            invitation = self._transport.expect(self._expect_up(), launch_once=launcher.launch_once)
            async with scope:
                await launcher.launch(task, invitation)
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise LaunchFailed(task.name, f"launching took longer than {limit:g} s") from error
            raise LaunchFailed(task.name, f"it could not be started: {error}") from error

    async def _come_up(self, task: Task, launcher: Launcher) -> ProgramConnection:
        """Wait until the program says hello, exits, or takes too long."""
        up, limit = self._up, self.options.external_pre_init_timeout
        assert up is not None  # noqa: S101 - it is expected
        exit_ = self._exit = asyncio.get_running_loop().create_task(launcher.ended(), name="exit of the program")
        exit_.add_done_callback(self._program_exited)
        waiting: set[asyncio.Future[Any]] = {up, exit_}
        await asyncio.wait(waiting, timeout=limit or None, return_when=asyncio.FIRST_COMPLETED)
        disconnected = None
        if up.done():
            if up.result().up:
                return up.result()
            disconnected = up.result().end_detail
            await asyncio.wait({exit_}, timeout=_EXIT_DELAY)
        raise launch_failure(task, limit, disconnected, _status(exit_), launcher.status())

    def _program_exited(self, exit_: asyncio.Task[ProgramStatus]) -> None:
        """Take note that the process has exited: what it was doing will not be done."""
        connection, status = self._connection, _status(exit_)
        if status is None or exit_ is not self._exit or connection is None:
            return
        connection.run()
        error = ProgramExited(connection.machine.task_name, status.exit_code or 0, status.lines)
        match after_exit(status, connection.state):
            case AfterExit.FAILS:
                connection.fail(error)
            case AfterExit.MAY_FAIL:  # the end of the connection ends the wait
                self._last_result = asyncio.get_running_loop().call_later(
                    self.options.last_result_transfer_timeout, connection.fail, error
                )

    async def _attached(self, task: Task) -> ProgramConnection:
        up = self._up
        if up is None:
            raise LaunchFailed(task.name, "no program can attach: executor.bootstrap() writes the file that it needs")
        limit = self.options.external_pre_init_timeout
        await asyncio.wait({up}, timeout=limit or None)
        if not up.done():
            raise LaunchFailed(task.name, f"no program has attached within {limit:g} s")
        connection = up.result()
        if not connection.up:
            await self._drop("")
            raise PeerGone(connection.end_detail)
        return connection

    # after a task

    async def _after(
        self,
        task: Task,
        connection: ProgramConnection,
        error: BaseException | None,
        offered: OfferedResult | None,
    ) -> None:
        launcher = self._launcher
        step = after_task(
            error,
            up=connection.up,
            launched=launcher is not None,
            launch_once=launcher is None or launcher.launch_once,
            needs_deferred_stop=launcher is not None and launcher.needs_deferred_stop,
        )
        if step is AfterTask.KILL:
            await self._kill(task, connection, error)
        elif self._phase != "open":
            connection.end("the job is ending")
        elif error is not None and step is not AfterTask.KEEP:  # it may be waiting for another task
            connection.end("its task was not done, and there is no other")
        if launcher is None:
            return
        if step is AfterTask.STOP_DEFERRED:
            work = self._stop_deferred(connection, offered)
            self._deferred = asyncio.get_running_loop().create_task(work, name=f"deferred stop after {task}")
            self._deferred.add_done_callback(self._deferred_done)
        elif step is AfterTask.STOP:
            connection.end("the task is done")
            await launcher.stop()
            await self._drop("the task is done")

    async def _kill(self, task: Task, connection: ProgramConnection, error: BaseException | None) -> None:
        why, exit_, launcher = error, self._exit, self._launcher
        if isinstance(error, Exception) and exit_ is not None and launcher is not None:
            if connection.machine.leaving:
                await asyncio.wait({exit_}, timeout=_EXIT_DELAY)
            why = explain(task.name, error, _status(exit_), launcher.status().lines)
        if connection.up:
            connection.abort(self._why(error))
        await self._drop("", kill=True)
        if why is not None and why is not error:
            raise why from error

    def _deferred_done(self, deferred: asyncio.Task[None]) -> None:
        if self._deferred is deferred:
            self._deferred = None
        if not deferred.cancelled() and (error := deferred.exception()) is not None:
            _log.error("stopping a program failed", exc_info=error)

    async def _stop_deferred(self, connection: ProgramConnection, offered: OfferedResult | None) -> None:
        """Let the program serve its result and end by itself; stop it if it does not."""
        exit_ = self._exit
        assert exit_ is not None  # noqa: S101 - it was launched
        try:
            if offered is not None:
                await connection.until(lambda: offered.settled.is_set() or exit_.done() or connection.machine.end)
            await asyncio.wait({exit_}, timeout=self.options.deferred_stop_timeout)
        finally:
            await self._drop("", kill=True)

    async def _drop(self, reason: str, *, kill: bool = False) -> None:
        """End the connection, and the program with it."""
        connection, self._connection = self._connection, None
        replaced, self._replaced = self._replaced, []
        if self._launcher is not None or (self._up is not None and self._up.done()):
            self._up = None
        if self._last_result is not None:
            self._last_result.cancel()
            self._last_result = None
        try:
            for other in replaced:
                await other.aclose()
            if connection is not None:
                if reason and connection.up:
                    connection.abort(reason)
                await (connection.aclose(_LAST_MESSAGE) if kill else connection.aclose())
        finally:
            exit_, self._exit = self._exit, None
            if self._launcher is not None:
                await asyncio.shield(self._launcher.stop(asked=not kill))
            if exit_ is not None:
                await _end(exit_)

    # the end

    def abort(self, reason: str = _ABORTED) -> None:
        """Abort the current task, and stop the program. Can be called at any moment."""
        if self._call is not None:
            self._call.abort(reason)
        elif self._connection is not None and self._connection.up:
            self._connection.abort(reason)

    async def end(self) -> None:
        """Finish the current task, ask the program to end, and wait for that: the job is ending."""
        if self._phase in ("open", "ending"):
            self._phase = "ending"
            async with self._turn:
                await self._end_program()

    async def finalize(self) -> None:
        """End everything: wait for a stop in progress, end the program, remove what was made. Idempotent.

        If it is cancelled, it goes on, and the next call waits for it.
        """
        if self._phase == "new":
            self._phase = "closed"
        elif self._phase != "closed":
            self._phase = "closed"
            if self._call is not None:
                self._call.abort("the executor is being closed")
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="end of an executor")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with self._turn:
            try:
                await self._end_program()
                await self._drop("")
            finally:
                await self._transport.close()
                if self._launcher is not None:
                    await self._launcher.finalize()

    async def _end_program(self) -> None:
        """Let the program end by itself, and stop it if it does not."""
        await self._wait_for_deferred_stop()
        if self._connection is not None and self._connection.up:
            self._connection.end("the job is ending")
        if self._launcher is not None:
            await self._launcher.stop()

    def __repr__(self) -> str:
        state = self.state
        what = f", exchange {state.value}" if state is not None else ""
        return f"<LauncherExecutor {self._phase}, program {self.status().state.value}{what}>"


def _status(exit_: asyncio.Task[ProgramStatus]) -> ProgramStatus | None:
    """Return the status of a program that has exited; None if it has not."""
    return exit_.result() if exit_.done() and not exit_.cancelled() else None


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for its end, whatever happens to us meanwhile."""
    task.cancel()
    try:
        await completed(asyncio.wait({task}))
    finally:
        if not task.cancelled():
            task.exception()  # nobody else wants it
