"""What a site decides about its program: which tasks it takes, what becomes of results, what follows a task or an exit.

Pure: events in, effects out; see :mod:`dfm_async.exchange.endpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from dfm_async.errors import (
    BadResult,
    BadTask,
    ExchangeError,
    LaunchFailed,
    PeerGone,
    ProgramExited,
    TaskAborted,
    TaskRejected,
)
from dfm_async.errors.root import signal_name
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.endpoint import Endpoint, PipeTraits
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.task import Exchange, ExchangeState, ProgramStatus, Task
from dfm_async.exchange.value_codec import Encoded

_PROGRAM: Final = "program"


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """How a connection ended.

    Attributes:
        kind: the program has ended it; one side has aborted it; the program is gone.
        detail: what is known beyond that.
    """

    kind: Literal["ended", "aborted", "peer gone"]
    detail: str

    def error(self, task: str) -> Exception:
        """Return why a task cannot be done any longer."""
        return TaskAborted(task, self.detail) if self.kind == "aborted" else PeerGone(self.detail)


class SiteMachine(Endpoint):
    """The site's end of a connection to one program.

    Metrics and progress messages of the program are effects as they are.

    Args:
        options: how long to wait for what.
        traits: what the transport can do.
        clock: returns the time, in seconds.
        silence: how long the program accepts that nothing is sent, in seconds; 0 means for ever.
    """

    def __init__(
        self, options: ExecutorOptions, traits: PipeTraits, clock: Callable[[], float], silence: float = 0.0
    ) -> None:
        super().__init__(options, traits, clock, silence)
        self._options = options
        self.end: ConnectionEnd | None = None
        """Why there is nothing more to expect from the program; None while there is."""
        self.exchange: Exchange | None = None
        """The current exchange, or the last one."""
        self.task: Task | None = None
        """The current task, or the last one."""
        self._dismissed = False
        self._waiting = False
        self._result: msg.ResultOffer | None = None
        self._result_due = math.inf
        self._error: Exception | None = None
        self._reply: msg.ResultAnswer | None = None

    @property
    def up(self) -> bool:
        """Whether the program can be given a task."""
        return self.end is None and not self._dismissed

    @property
    def leaving(self) -> bool:
        """Whether the process can be expected to end: one that ends in order says so first, others just vanish."""
        return self.end is not None and self.end.kind != "aborted" and not self.silent

    @property
    def task_name(self) -> str:
        """The name of the current task, or of the last one."""
        return self.task.name if self.task is not None else ""

    @property
    def _pending(self) -> bool:
        """Whether the outcome of the current task is waited for, and not known."""
        return self._waiting and self._result is None and self._error is None

    # tasks

    def offer(self, task: Task, encoded: Encoded, receivers: Sequence[str]) -> None:
        """Offer a task to the program; :meth:`result` returns what becomes of it. Call :meth:`end_exchange` at the end.

        Args:
            task: the task.
            encoded: its data.
            receivers: the names of those that will pull the large parts of its result.

        Raises:
            BadTask: it has large parts, and these must not be sent again without a limit.
        """
        if encoded.parts and self._options.max_resends is None:
            raise BadTask(task.name, "it has large parts, and for those max_resends=None is not allowed")
        self._waiting = True
        if self.end is not None:
            self._error = self.end.error(task.name)
            return
        parts = [(number, len(data)) for number, data in encoded.parts.items()]
        if parts:
            self.upload(task.id, encoded.parts, (_PROGRAM,))
        self.request(
            task.id,
            msg.TaskOffer(
                task=task.id,
                name=task.name,
                data=encoded.data,
                parts=parts,
                round=task.round,
                total_rounds=task.total_rounds,
                receivers=list(receivers),
            ),
            self._options.peer_read_timeout,
            f"the program did not accept task {task}: that",
        )

    def begin_exchange(self, task: Task) -> None:
        """Begin with a task, before it is encoded."""
        self.task = task
        self.exchange = Exchange(task.id)
        self._result = self._error = None
        self._result_due = math.inf

    def result(self) -> msg.ResultOffer | None:
        """Return the result of the program when it has come; None before.

        Raises:
            ExchangeError: it never will.
            TimeoutError: the program took too long.
        """
        if self._error is not None:
            raise self._error
        return self._result

    def end_exchange(self, error: BaseException | None) -> None:
        """End the exchange: nobody waits for its result any longer, and it may have failed."""
        exchange = self.exchange
        self._waiting = False
        if exchange is None:
            return
        self._stop_offer(exchange.task)
        if isinstance(error, (BadTask, TaskRejected, BadResult)):
            exchange.advance(ExchangeState.REJECTED, str(error))
        elif isinstance(error, TaskAborted):
            exchange.advance(ExchangeState.ABORTED, error.reason)
        elif isinstance(error, Exception):
            exchange.advance(ExchangeState.FAILED, str(error))
        elif error is not None:
            exchange.advance(ExchangeState.ABORTED, "it was cancelled")

    def _stop_offer(self, task: str) -> None:
        self.answered(task)
        self.withdraw(task)

    def fail(self, error: Exception) -> None:
        """Fail the current task and all transfers: the program will not go on with them."""
        if self._pending:
            self._error = error
        self.fail_downloads(str(error))

    def request_failed(self, key: str, error: TimeoutError | None) -> None:
        """Fail a task that was not accepted in time, or whose program is gone."""
        if self._waiting and self.exchange is not None and key == self.exchange.task and self._error is None:
            self._error = error or PeerGone(self.gone or "")
            self.withdraw(key)

    def check_time(self) -> None:
        """Fail a task whose result takes too long."""
        if self._pending and self.clock() >= self._result_due:
            limit = self._options.task_wait_timeout
            self._error = TimeoutError(f"the result of task {self.task} took longer than {limit:g} s")

    def next_time(self) -> float:
        """Return when the result takes too long."""
        return self._result_due if self._pending else math.inf

    def accept(self, offer: msg.ResultOffer) -> None:
        """Accept a result: it is settled, or its large parts can be pulled."""
        exchange = self.exchange
        assert exchange is not None  # noqa: S101 - it has a result
        exchange.advance(ExchangeState.RESULT_ACCEPTED)
        exchange.advance(ExchangeState.TRANSFERRING if offer.parts else ExchangeState.SETTLED)
        self._answer(msg.ResultAnswer(offer.task, offer.result, True))

    def reject(self, offer: msg.ResultOffer, reason: str) -> None:
        """Reject a result."""
        self._answer(msg.ResultAnswer(offer.task, offer.result, False, reason))

    def _answer(self, answer: msg.ResultAnswer) -> None:
        self._reply = answer  # the last one only: one task is in flight at a time
        self.send(answer)

    # messages

    def handle(self, message: msg.Message) -> None:
        """Take a message of the program."""
        if isinstance(message, msg.TaskAnswer):
            self._task_answered(message)
        elif isinstance(message, msg.ResultOffer):
            self._result_offered(message)
        elif isinstance(message, msg.ProgramMetrics):
            self.effects.append(message)
            self.send(msg.MetricTaken(message.number))
        elif isinstance(message, msg.ProgramProgress):
            self.effects.append(message)
        elif isinstance(message, msg.EndOfTasks):
            self._end(ConnectionEnd("ended", message.reason or "the program ended the exchange"))
        elif isinstance(message, msg.Abort):
            self._end(ConnectionEnd("aborted", message.reason or "the program aborted it"))

    def _task_answered(self, answer: msg.TaskAnswer) -> None:
        exchange = self.exchange
        if exchange is None or answer.task != exchange.task or not self.answered(answer.task):
            return
        self.withdraw(answer.task)
        if answer.accepted:
            exchange.advance(ExchangeState.ACCEPTED)
            limit = self._options.task_wait_timeout
            self._result_due = math.inf if limit is None else self.clock() + limit
            self.due = min(self.due, self._result_due)
        elif self._error is None:
            self._error = TaskRejected(self.task_name, answer.reason)

    def _result_offered(self, offer: msg.ResultOffer) -> None:
        exchange = self.exchange
        if self._reply is not None and offer.result == self._reply.result:  # it came again: so does the answer
            self.send(self._reply)
        elif exchange is None or offer.task != exchange.task or not self._waiting:
            self.send(msg.ResultAnswer(offer.task, offer.result, False, "nobody waits for this task's result"))
        elif self._result is None and self._error is None:
            # The result says as much as an answer that was lost.
            self._task_answered(msg.TaskAnswer(offer.task, True))
            exchange.advance(ExchangeState.RESULT_OFFERED)
            self._result = offer

    # the end

    def peer_gone(self, reason: str) -> None:
        """Take note that the program is gone."""
        self._end(ConnectionEnd("peer gone", reason))

    def dismiss(self, message: msg.EndOfTasks | msg.Abort) -> None:
        """Tell the program to stop: after what it has, or now. It gets no more tasks."""
        self._dismissed = True
        self.send(message)
        if isinstance(message, msg.Abort):
            self._end(ConnectionEnd("aborted", message.reason))

    def close(self) -> None:
        """Send nothing any longer, and abandon what is being pulled or offered."""
        super().close()
        self.end = self.end or ConnectionEnd("peer gone", "the connection was closed here")

    def _end(self, end: ConnectionEnd) -> None:
        self.end = self.end or end
        if self._pending:
            self._error = end.error(self.task_name)


# the program around its tasks


class AfterTask(Enum):
    """What follows a task."""

    KEEP = "keep the program for the next task"
    STOP = "ask the program to end, and stop it"
    STOP_DEFERRED = "let the program serve its result and end by itself, and stop it later"
    KILL = "abort the connection, and kill the program"


class AfterExit(Enum):
    """What the exit of a program means for its task."""

    NOTHING = "the task is done, or there is none"
    FAILS = "the task fails now"
    MAY_FAIL = "the task fails unless its result still arrives"


def check_task(options: ExecutorOptions, task: Task) -> list[str]:
    """Check whether a program may be given a task. Return the round numbers that a train task lacks.

    Raises:
        TypeError: it is not a task.
        BadTask: tasks of its name are not taken.
    """
    if not isinstance(task, Task):
        raise TypeError(f"execute() takes a Task, not {task!r}")
    if not options.allows(task.name):
        names = ", ".join(options.task_names)
        raise BadTask(task.name, f"accepted task names: {names}; ExecutorOptions(other_tasks=...) adds more")
    if task.name != options.train_task_name:
        return []
    return [name for name in ("round", "total_rounds") if getattr(task, name) is None]


def result_problem(options: ExecutorOptions, task: Task, data: Any) -> str:
    """Return what a result lacks that its task asks for; "" if nothing."""
    needs_metrics = task.name == options.evaluate_task_name or (
        task.name == options.train_task_name and options.train_with_evaluation
    )
    found: Callable[[str], Any] = data.get if isinstance(data, Mapping) else lambda name: getattr(data, name, None)
    if needs_metrics and found("metrics") is None:
        return "it has no metrics"
    if task.name == options.submit_model_task_name and found("params") is None:
        return "it has no model"
    return ""


_ADVICE: Final = ". A program has to call init() and to receive tasks; run others with subprocess in an operation"


def launch_failure(
    task: Task, limit: float, disconnected: str | None, exited: ProgramStatus | None, status: ProgramStatus
) -> LaunchFailed:
    """Return why a program did not come up.

    Args:
        task: the task that it was launched for.
        limit: how long it had to connect, in seconds.
        disconnected: why its connection has ended, if there was one.
        exited: its status, if it has exited.
        status: its status otherwise.
    """
    if disconnected is not None:
        problem = f"it connected and disconnected: {disconnected}"
    elif exited is not None:
        code = exited.exit_code or 0
        how = f"by {signal_name(code)}" if code < 0 else f"with exit code {code}"
        problem = f"it ended {how} before it connected{'' if code else _ADVICE}"
    else:
        problem = f"it did not connect within {limit:g} s{_ADVICE}"
    status = exited or status
    return LaunchFailed(task.name, problem, status.exit_code, status.lines)


def after_exit(status: ProgramStatus, state: ExchangeState | None) -> AfterExit:
    """Return what the exit of a program means for the exchange that is in this state."""
    if state is None:
        return AfterExit.NOTHING
    if status.exit_code == 0:  # what it sent last may still be in flight
        return AfterExit.MAY_FAIL
    return AfterExit.NOTHING if state is ExchangeState.SETTLED else AfterExit.FAILS


def explain(task: str, error: Exception, exited: ProgramStatus | None, lines: tuple[str, ...]) -> Exception:
    """Return what really happened, if a connection has ended because the process has.

    Args:
        task: the name of the task.
        error: what happened to the connection.
        exited: the status of the program, if it has exited.
        lines: the last lines that it wrote.
    """
    if not isinstance(error, ExchangeError) or isinstance(error, ProgramExited):
        return error
    if exited is not None:
        return ProgramExited(task, exited.exit_code or 0, exited.lines)
    return PeerGone(error.detail, lines) if isinstance(error, PeerGone) else error


def after_task(
    error: BaseException | None, *, up: bool, launched: bool, launch_once: bool, needs_deferred_stop: bool
) -> AfterTask:
    """Return what follows a task. A program that only refused a task, or whose result was refused, is well.

    Args:
        error: why the task failed; None if it is done.
        up: whether the program can be given a task.
        launched: whether we have launched it.
        launch_once: whether it serves many tasks.
        needs_deferred_stop: whether it may still be serving its result, and ends by itself.
    """
    if error is not None and not (up and isinstance(error, (BadResult, BadTask, TaskRejected))):
        return AfterTask.KILL
    if not launched or launch_once:
        return AfterTask.KEEP
    return AfterTask.STOP_DEFERRED if needs_deferred_stop else AfterTask.STOP
