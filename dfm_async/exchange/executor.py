"""The site's side: starts a program, gives it tasks, waits for its results."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from dfm_async.errors import (
    BadResult,
    BadTask,
    ExchangeError,
    LaunchFailed,
    PeerGone,
    ProgramExited,
    TaskAborted,
    TaskRejected,
    signal_name,
)
from dfm_async.exchange.gate import Gate, SocketGate
from dfm_async.exchange.launcher import Launcher, ProgramState, ProgramStatus
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.pipes.base import Pipe
from dfm_async.exchange.site_end import SITE, OfferedResult, SiteEnd
from dfm_async.exchange.states import ExchangeState
from dfm_async.exchange.task import Task, TaskResult, metrics_of, params_of
from dfm_async.exchange.values import PlainCodec, ValueCodec

__all__ = ["LauncherExecutor"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_EXIT_NEWS: Final = 1.0
"""When a connection has ended, how long the news of the process's end may take, in seconds."""
_LAST_WORD: Final = 0.25
"""How long a program that is about to be stopped may take to hear why, in seconds: it may not be listening."""
_ABORTED: Final = "the site aborted it"


def _no_metrics(values: Mapping[str, Any], step: int | None) -> None:
    _log.info("metrics at step %s: %s", step, values)


def _no_progress(done: float, total: float | None, note: str) -> None:
    _log.debug("progress: %s of %s %s", done, total, note)


class LauncherExecutor:
    """Runs tasks in a program outside the federation, one at a time.

    An async context manager. Cancelling :meth:`execute` ends the program; so does leaving the block.

    Args:
        launcher: starts and stops the program; None if somebody else starts it (see :meth:`bootstrap`).
        options: how long to wait for what.
        transport: how the two talk: a Unix socket, a TCP socket on this machine, or memory (only within one process);
            or a gate of another kind, such as ``FilePipeGate``.
        codec: how values become bytes; both sides must have the same.
        site: the name of the site, for the program to know.
        job: the job, for the program to know.
        on_metrics: gets what the program measures, and the step that it belongs to. Must not block.
        on_progress: gets how far the program is. Must not block.
    """

    def __init__(
        self,
        launcher: Launcher | None,
        options: ExecutorOptions | None = None,
        *,
        transport: Literal["unix", "tcp", "memory"] | Gate = "unix",
        codec: ValueCodec | None = None,
        site: str = "",
        job: str = "",
        on_metrics: Callable[[Mapping[str, Any], int | None], None] = _no_metrics,
        on_progress: Callable[[float, float | None, str], None] = _no_progress,
    ) -> None:
        self.options = options or ExecutorOptions()
        if not isinstance(self.options, ExecutorOptions):
            raise TypeError(f"options must be ExecutorOptions, not {options!r}")
        self._launcher = launcher
        self._gate: Gate = SocketGate(transport) if isinstance(transport, str) else transport
        self._codec: ValueCodec = codec or getattr(self._gate, "codec", None) or PlainCodec()
        self._site = site
        self._job = job
        self._on_metrics = on_metrics
        self._on_progress = on_progress
        self._turn = asyncio.Lock()
        self._end: SiteEnd | None = None
        self._replaced: list[SiteEnd] = []
        self._up: asyncio.Future[SiteEnd] | None = None
        self._deferred: asyncio.Task[None] | None = None
        self._work: asyncio.Task[Any] | None = None
        self._exit: asyncio.Task[ProgramStatus] | None = None
        self._last_result: asyncio.TimerHandle | None = None
        self._abort_reason: str | None = None
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
        """Makes ready; ``async with`` does it."""
        if self._phase != "new":
            raise RuntimeError(f"this executor is {self._phase}: make a new one")
        self._phase = "open"
        try:
            await self._gate.open(self.options, self._site, self._job)
            if self._launcher is not None:
                await self._launcher.initialize()
        except BaseException:  # nobody else would: "async with" leaves only what it has entered
            await self.finalize()
            raise

    def bootstrap(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes the file by which a program that somebody else starts can attach, once.

        Args:
            path: where to write it; by default a new file of its own. It is removed when it was used.
        """
        if self._phase != "open" or not isinstance(self._gate, SocketGate):
            raise RuntimeError("programs can attach only to an open executor with a socket")
        if self._launcher is not None:
            raise RuntimeError("this executor launches its program itself: make one with launcher=None")
        if self._end is not None and self._end.up:
            raise RuntimeError("a program is attached: another one can attach when it has ended")
        return self._gate.invite(self._expect_up(), launch_once=True, path=path)

    @property
    def state(self) -> ExchangeState | None:
        """How far the current exchange is, or the last one was."""
        return self._end.state if self._end is not None else None

    def status(self) -> ProgramStatus:
        """What the launcher knows of the program."""
        return self._launcher.status() if self._launcher is not None else ProgramStatus(ProgramState.NOT_RUNNING)

    # tasks

    async def execute(self, task: Task, *, abort: asyncio.Event | None = None) -> TaskResult:
        """Gives the program a task, and waits for its result with all large parts.

        Args:
            task: what to do.
            abort: when it is set, the task is aborted and the program stopped.

        Returns:
            The result with the program's own return code.

        Raises:
            BadTask: the task has a name that is not taken.
            LaunchFailed: the program did not start, or did not come up.
            ProgramExited: it ended before the result was there.
            PeerGone: it vanished in another way.
            TaskRejected: it did not take the task.
            TaskAborted: it gave up, or :meth:`abort` was called.
            BadResult: the result is not what the task asks for.
            TransferFailed: a large part of the result did not come.
            TimeoutError: one of the times in the options was exceeded; names what was waited for.
        """
        found: TaskResult = await self._one_at_a_time(task, abort, self._execute(task))
        return found

    async def offer(self, task: Task, receivers: Sequence[str], *, abort: asyncio.Event | None = None) -> OfferedResult:
        """The same, for results that several receivers pull: returns when the program has answered.

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
        try:
            self._check(task)
            await self._take_turn(task, abort)
            try:
                return await self._until_aborted(task, abort, work)
            finally:
                self._turn.release()
        finally:
            work.close()

    async def _take_turn(self, task: Task, abort: asyncio.Event | None) -> None:
        """Waits for the end of the task before; an abort ends the wait."""
        if abort is None or not self._turn.locked():
            await self._turn.acquire()
            return
        loop = asyncio.get_running_loop()
        turn = loop.create_task(self._turn.acquire(), name=f"turn of task {task}")
        aborted = loop.create_task(abort.wait(), name=f"abort of task {task}")
        taken = False
        try:
            await asyncio.wait({turn, aborted}, return_when=asyncio.FIRST_COMPLETED)
            taken = turn.done()
        finally:
            await _end(aborted)
            if not taken:
                await _end(turn)
                if not turn.cancelled():
                    self._turn.release()
        if not taken:
            raise TaskAborted(task.name, _ABORTED)

    def _check(self, task: Task) -> None:
        if not isinstance(task, Task):
            raise TypeError(f"execute() takes a Task, not {task!r}")
        if self._phase != "open":
            raise BadTask(task.name, f"the executor is {self._phase}")
        options = self.options
        if not options.allows(task.name):
            names = ", ".join(options.task_names)
            raise BadTask(
                task.name, f"the names that are taken are {names}; ExecutorOptions(other_tasks=...) adds more"
            )
        if task.name == options.train_task_name:
            missing = [name for name in ("round", "total_rounds") if getattr(task, name) is None]
            if missing:
                _log.warning("task %s has no %s", task, " and no ".join(missing))

    async def _until_aborted(self, task: Task, abort: asyncio.Event | None, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work so that an abort can end it wherever it is."""
        if self._phase != "open":
            raise BadTask(task.name, f"the executor is {self._phase}")
        ours = asyncio.current_task()
        assert ours is not None  # noqa: S101 - this is a coroutine
        self._abort_reason = None
        self._work = ours
        before = ours.cancelling()
        watching = None
        if abort is not None:
            watching = asyncio.get_running_loop().create_task(self._abort_when(abort), name=f"abort of task {task}")
        try:
            return await work
        except asyncio.CancelledError as error:
            reason = self._why_aborted()
            if reason is None or ours.uncancel() > before:
                raise  # whoever called us was cancelled too
            raise TaskAborted(task.name, reason) from error
        finally:
            self._work = None
            if watching is not None:
                await _end(watching)

    def _why_aborted(self) -> str | None:
        return self._abort_reason

    async def _abort_when(self, event: asyncio.Event) -> None:
        await event.wait()
        self.abort()

    async def _execute(self, task: Task) -> TaskResult:
        end = await self._ready(task)
        try:
            found = await self._whole(end, task)
        except BaseException as error:
            await self._after_failure(task, end, error)
            raise
        await self._after(task, end, None)
        return found

    async def _offer(self, task: Task, receivers: Sequence[str]) -> OfferedResult:
        end = await self._ready(task)
        try:
            found = await end.exchange(task, receivers, self._checker(task))
        except BaseException as error:
            await self._after_failure(task, end, error)
            raise
        await self._after(task, end, found)
        return found

    async def _whole(self, end: SiteEnd, task: Task) -> TaskResult:
        found = await end.exchange(task, (SITE,), self._checker(task))
        return found.value or await found.pull(SITE)

    def _checker(self, task: Task) -> Callable[[Any], str]:
        options = self.options

        def check(data: Any) -> str:
            needs_metrics = task.name == options.evaluate_task_name or (
                task.name == options.train_task_name and options.train_with_evaluation
            )
            if needs_metrics and metrics_of(data) is None:
                return "it has no metrics"
            if task.name == options.submit_model_task_name and params_of(data) is None:
                return "it has no model"
            return ""

        return check

    # before a task

    async def _ready(self, task: Task) -> SiteEnd:
        """Gives the end of a program that is up: the one that is there, or a new one."""
        await self._wait_for_deferred_stop()
        end = self._end
        if end is not None and end.up and self._can_go_on():
            return end
        if self._launcher is None:
            return await self._attached(task)
        await self._drop("the program did not go on")
        try:
            await self._launch(task, self._launcher)
            return await self._come_up(task, self._launcher)
        except BaseException as error:
            self._gate.forget()
            reason = self._abort_reason or str(error) or "the site stops"
            await self._drop(reason, kill=True)
            raise

    def _can_go_on(self) -> bool:
        launcher = self._launcher
        return launcher is None or (launcher.launch_once and launcher.status().state is ProgramState.RUNNING)

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
            up = self._up = asyncio.get_running_loop().create_future()

        def on_up(pipe: Pipe) -> None:
            end = SiteEnd(pipe, self.options, self._codec, on_metrics=self._on_metrics, on_progress=self._on_progress)
            if self._end is not None:
                self._replaced.append(self._end)
            self._end = end
            if not up.done():
                up.set_result(end)

        return on_up

    async def _launch(self, task: Task, launcher: Launcher) -> None:
        limit = self.options.launch_timeout
        scope = asyncio.timeout(limit)
        try:
            invitation = self._gate.expect(self._expect_up(), launch_once=launcher.launch_once)
            async with scope:
                await launcher.launch(task, invitation)
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise LaunchFailed(task.name, f"launching took longer than {limit:g} s") from error
            raise LaunchFailed(task.name, f"it could not be started: {error}") from error

    async def _come_up(self, task: Task, launcher: Launcher) -> SiteEnd:
        """Waits until the program says hello, ends, or takes too long."""
        up, limit = self._up, self.options.external_pre_init_timeout
        assert up is not None  # noqa: S101 - it is expected
        exit_ = self._exit = asyncio.get_running_loop().create_task(launcher.ended(), name="end of the program")
        exit_.add_done_callback(self._program_ended)
        waiting: set[asyncio.Future[Any]] = {up, exit_}
        await asyncio.wait(waiting, timeout=limit or None, return_when=asyncio.FIRST_COMPLETED)
        if up.done() and up.result().up:
            return up.result()
        if up.done():
            problem = f"it came and went: {up.result().fate.result().detail}"
            await asyncio.wait({exit_}, timeout=_EXIT_NEWS)
        elif exit_.done():
            problem = f"it ended {_how(exit_.result())} before it said hello"
        else:
            problem = f"it did not say hello within {limit:g} s"
        status = exit_.result() if exit_.done() else launcher.status()
        raise LaunchFailed(task.name, problem, status.exit_code, status.lines)

    def _program_ended(self, exit_: asyncio.Task[ProgramStatus]) -> None:
        """The process has ended: what it was doing will not be done."""
        end = self._end
        if exit_.cancelled() or exit_ is not self._exit or end is None or end.state is None:
            return
        status = exit_.result()
        error = ProgramExited(end.task_name, status.exit_code or 0, status.lines)
        if status.exit_code == 0:  # what it sent last may still be on its way; the end of the connection ends the wait
            loop = asyncio.get_running_loop()
            self._last_result = loop.call_later(self.options.last_result_transfer_timeout, end.fail, error)
        elif end.state is not ExchangeState.SETTLED:
            end.fail(error)

    async def _attached(self, task: Task) -> SiteEnd:
        up = self._up
        if up is None:
            raise LaunchFailed(task.name, "no program can attach: executor.bootstrap() makes the file that it needs")
        limit = self.options.external_pre_init_timeout
        await asyncio.wait({up}, timeout=limit or None)
        if not up.done():
            raise LaunchFailed(task.name, f"no program has attached within {limit:g} s")
        end = up.result()
        if not end.up:
            await self._drop("")
            raise PeerGone(end.fate.result().detail)
        return end

    # during a task

    async def _explained(self, task: Task, error: ExchangeError) -> ExchangeError:
        """What really happened, if the connection has ended because the process has."""
        exit_, launcher, end = self._exit, self._launcher, self._end
        if exit_ is None or launcher is None or isinstance(error, ProgramExited):
            return error
        if not exit_.done() and end is not None and end.leaving:
            await asyncio.wait({exit_}, timeout=_EXIT_NEWS)
        if exit_.done():
            status = exit_.result()
            return ProgramExited(task.name, status.exit_code or 0, status.lines)
        return PeerGone(error.detail, launcher.status().lines) if isinstance(error, PeerGone) else error

    # after a task

    async def _after(self, task: Task, end: SiteEnd, offered: OfferedResult | None) -> None:
        launcher = self._launcher
        if self._phase != "open":
            end.end("the job is ending")
        if launcher is None or launcher.launch_once:
            return
        if launcher.needs_deferred_stop:
            work = self._stop_deferred(end, launcher, offered)
            self._deferred = asyncio.get_running_loop().create_task(work, name=f"deferred stop after {task}")
            self._deferred.add_done_callback(self._deferred_done)
        else:
            end.end("the task is done")
            await launcher.stop()
            await self._drop("the task is done")

    def _deferred_done(self, deferred: asyncio.Task[None]) -> None:
        if self._deferred is deferred:
            self._deferred = None
        if not deferred.cancelled() and (error := deferred.exception()) is not None:
            _log.error("stopping a program failed", exc_info=error)

    async def _stop_deferred(self, end: SiteEnd, launcher: Launcher, offered: OfferedResult | None) -> None:
        """The program has answered. It serves what it still has to serve, and ends by itself; else it is stopped."""
        ended = self._exit
        assert ended is not None  # noqa: S101 - it was launched
        try:
            if offered is not None and not offered.settled.is_set():
                served = asyncio.get_running_loop().create_task(offered.settled.wait(), name="end of the transfers")
                try:
                    waiting: set[asyncio.Future[Any]] = {served, ended, end.fate}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await _end(served)
            await asyncio.wait({ended}, timeout=self.options.deferred_stop_timeout)
        finally:
            await self._drop("", kill=True)

    async def _after_failure(self, task: Task, end: SiteEnd, error: BaseException) -> None:
        """A program that is well goes on; one that is not is ended."""
        if isinstance(error, (BadResult, BadTask, TaskRejected)) and end.up:
            if self._launcher is not None and not self._launcher.launch_once:
                end.end("its task was not done, and there is no other")  # it may be waiting for one
            await self._after(task, end, None)
            return
        why = await self._explained(task, error) if isinstance(error, ExchangeError) else error
        if end.up:
            end.abort(self._abort_reason or str(error) or "the site stops")
        await self._drop("", kill=True)
        if why is not error:
            raise why from error

    async def _drop(self, reason: str, *, kill: bool = False) -> None:
        """Ends the connection, and the program with it."""
        end, self._end = self._end, None
        replaced, self._replaced = self._replaced, []
        if self._launcher is not None or (self._up is not None and self._up.done()):
            self._up = None
        if self._last_result is not None:
            self._last_result.cancel()
            self._last_result = None
        try:
            for other in replaced:
                await other.aclose()
            if end is not None:
                if reason and end.up:
                    end.abort(reason)
                await end.aclose(_LAST_WORD if kill else None)
        finally:
            exit_, self._exit = self._exit, None
            if self._launcher is not None:
                await asyncio.shield(self._launcher.stop(asked=not kill))
            if exit_ is not None:
                await _end(exit_)

    # the end

    def abort(self, reason: str = _ABORTED) -> None:
        """Aborts the current task, and stops the program. Can be called at any moment."""
        if self._work is not None:
            if self._abort_reason is None:
                self._abort_reason = reason
                self._work.cancel()
        elif self._end is not None and self._end.up:
            self._end.abort(reason)

    async def end(self) -> None:
        """The job is ending: finishes the current task, asks the program to end, and waits for that."""
        if self._phase in ("open", "ending"):
            self._phase = "ending"
            async with self._turn:
                await self._let_go()

    async def finalize(self) -> None:
        """Ends everything: waits for a stop that is under way, ends the program, removes what was made. Idempotent.

        If it is cancelled, it goes on, and the next call waits for it.
        """
        if self._phase == "new":
            self._phase = "closed"
        elif self._phase != "closed":
            self._phase = "closed"
            if self._work is not None:
                self.abort("the executor is being closed")
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="end of an executor")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with self._turn:
            try:
                await self._let_go()
                await self._drop("")
            finally:
                await self._gate.close()
                if self._launcher is not None:
                    await self._launcher.finalize()

    async def _let_go(self) -> None:
        """Lets the program end by itself, and stops it if it does not."""
        await self._wait_for_deferred_stop()
        if self._end is not None and self._end.up:
            self._end.end("the job is ending")
        if self._launcher is not None:
            await self._launcher.stop()

    def __repr__(self) -> str:
        state = self.state
        what = f", exchange {state.value}" if state is not None else ""
        return f"<LauncherExecutor {self._phase}, program {self.status().state.value}{what}>"


def _how(status: ProgramStatus) -> str:
    code = status.exit_code or 0
    return f"by {signal_name(code)}" if code < 0 else f"with exit code {code}"


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels a task, and waits for its end, whatever happens to us meanwhile."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()
    if cancelled is not None:
        raise cancelled
