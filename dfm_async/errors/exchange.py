"""Errors between a site and an external program outside the federation."""

from __future__ import annotations

from collections.abc import Sequence

from dfm_async.errors.root import DfmError, declared, output_excerpt, public, signal_name

__all__ = [
    "AgentClosed",
    "BadResult",
    "BadTask",
    "CallStateError",
    "ConversionError",
    "ExchangeError",
    "FobsError",
    "HandshakeRefused",
    "LaunchFailed",
    "PeerGone",
    "ProgramExited",
    "ProgramFailed",
    "ResultNotDelivered",
    "TaskAborted",
    "TaskRejected",
    "TransferFailed",
]


@public
class ExchangeError(DfmError):
    """The root of all errors between a site and an external program.

    ``lines`` are the last lines that the program wrote, ``exit_code`` is negative for a signal.
    """

    lines: Sequence[str] = ()

    @property
    def _output(self) -> str:
        return output_excerpt("\nlast lines:", self.lines)


@declared("the site did not accept this program: {reason}")
class HandshakeRefused(ExchangeError):
    """A site rejected a program, or the program could not read the address of the site."""

    reason: str


@declared()
class AgentClosed(ExchangeError):
    """There are no more tasks for this agent: ``reason`` is "ended", "aborted", "peer gone" or "closed here"."""

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"no more tasks: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@declared("{call}: {problem}")
class CallStateError(ExchangeError):
    """An agent method was called in the wrong state."""

    call: str
    problem: str


@declared("the {what} of task {task} could not be converted: {reason}")
class ConversionError(ExchangeError):
    """A conversion hook of the agent raised. The cause is the exception that it raised."""

    what: str
    task: str
    reason: str


@declared("the result of task {task} is {state}: {reason}")
class ResultNotDelivered(ExchangeError):
    """A result did not arrive, or was rejected; ``state`` is the state that the exchange reached."""

    task: str
    state: str
    reason: str


@declared("transfer {transfer} to {receiver} failed: {reason}")
class TransferFailed(ExchangeError):
    """A large part of a task or a result could not be pulled."""

    transfer: str
    receiver: str
    reason: str


@declared("task {task!r}: {problem}")
class BadTask(ExchangeError):
    """An executor does not accept a task."""

    task: str
    problem: str


@declared("the result of task {task!r}: {problem}")
class BadResult(ExchangeError):
    """A program returned a result that does not match its task."""

    task: str
    problem: str


@declared("the program did not accept task {task!r}: {reason}")
class TaskRejected(ExchangeError):
    """The program did not accept a task."""

    task: str
    reason: str


@declared("task {task!r} was aborted: {reason}")
class TaskAborted(ExchangeError):
    """A task was aborted, by one side or the other."""

    task: str
    reason: str


@declared("the connection to the peer is lost: {detail}{_output}")
class PeerGone(ExchangeError):
    """The peer was lost: its connection ended, or its heartbeats stopped."""

    detail: str
    lines: Sequence[str] = ()


@declared("the program for task {task!r} did not start: {problem}{_output}")
class LaunchFailed(ExchangeError):
    """A program could not be started, or did not become ready; with ``exit_code`` and ``lines`` if available."""

    task: str
    problem: str
    exit_code: int | None = None
    lines: Sequence[str] = ()


@declared("the program ended {_how} before it returned the result of task {task!r}{_output}")
class ProgramExited(ExchangeError):
    """A program ended before it returned its result; ``lines`` are its last lines of output."""

    task: str
    exit_code: int
    lines: Sequence[str] = ()

    @property
    def _how(self) -> str:
        return f"by {signal_name(self.exit_code)}" if self.exit_code < 0 else f"with exit code {self.exit_code}"


@declared("the program answered task {task!r} with {rc}{_why}{_output}")
class ProgramFailed(ExchangeError):
    """A program that is an operation of a pipeline reported that its task failed, with the return code ``rc``."""

    task: str
    rc: str
    reason: str
    lines: Sequence[str] = ()

    @property
    def _why(self) -> str:
        return f": {self.reason}" if self.reason else ""


@declared("a value{_about} cannot pass a file pipe: {reason}")
class FobsError(DfmError):
    """A message of NVFLARE's file pipes cannot be written or read; ``type_name`` as NVFLARE or Python names it."""

    reason: str
    type_name: str = ""

    @property
    def _about(self) -> str:
        return f" of type {self.type_name}" if self.type_name else ""
