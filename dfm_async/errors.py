"""Every exception that the library raises.

All of them derive from :class:`DfmError`. Their data is in attributes, their message is built from that data, and
all can be pickled.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dfm_async.rendering import Shown

__all__ = [
    "AgentClosed",
    "BadResult",
    "BadTask",
    "CallStateError",
    "ConversionError",
    "DecodingError",
    "DeploymentError",
    "DfmError",
    "EncodingError",
    "ExchangeError",
    "FederationError",
    "FileProblem",
    "FlareError",
    "FobsError",
    "HandshakeRefused",
    "HttpCallFailed",
    "JobAborted",
    "JobExists",
    "JobFailed",
    "JobInterrupted",
    "JobNotFound",
    "JobOwned",
    "LaunchFailed",
    "LoadingError",
    "OperationFailed",
    "ParameterError",
    "PartialError",
    "PeerGone",
    "PipelineDenied",
    "PipelineError",
    "PlaceholderError",
    "Problem",
    "ProgramExited",
    "ProgramFailed",
    "QueueFull",
    "ResultNotDelivered",
    "ResultsExpired",
    "ResultsUnread",
    "SecretError",
    "SessionClosed",
    "ShippingError",
    "StoreError",
    "StreamOverrun",
    "TaskAborted",
    "TaskRejected",
    "TransferFailed",
    "WorkerLost",
]


_SHOWN = 10
_LISTED = 50


class _Default:
    """An attribute that is computed, unless an error has one of its own."""

    def __init__(self, compute: Callable[[DfmError], str]) -> None:
        self._compute = compute

    def __get__(self, error: DfmError | None, owner: type) -> Any:
        return self if error is None else self._compute(error)


class DfmError(Shown, Exception):
    """The root of all errors of this library. Every error of a job has these attributes.

    Attributes:
        node: the label of the node in the pipeline; empty if it is not about one.
        site: the site; empty if it is not about one.
        type_name: the qualified name of its type; for an operation that raised, of the original exception's.
        message: its text; for an operation that raised, the original exception's.
    """

    node: str = ""
    site: str = ""
    if TYPE_CHECKING:
        type_name: str
        message: str
    else:
        type_name = _Default(lambda error: f"{type(error).__module__}.{type(error).__qualname__}")
        message = _Default(str)


class Problem:
    """One thing that is wrong with a pipeline: the statement, and what to do about it."""

    __slots__ = ("message", "statement")

    def __init__(self, statement: str, message: str) -> None:
        self.statement = statement
        self.message = message

    def __str__(self) -> str:
        return f"{self.statement}: {self.message}" if self.statement else self.message

    def __repr__(self) -> str:
        return f"Problem({self.statement!r}, {self.message!r})"

    def __reduce__(self) -> tuple[type[Problem], tuple[str, str]]:
        return (Problem, (self.statement, self.message))


class PipelineError(DfmError):
    """A pipeline cannot be built or prepared. ``problems`` lists everything that is wrong with it."""

    def __init__(self, pipeline: str | None, problems: Sequence[Problem]) -> None:
        super().__init__(pipeline, tuple(problems))
        self.pipeline = pipeline
        self.problems = tuple(problems)

    def __str__(self) -> str:
        name = f"pipeline {self.pipeline!r}" if self.pipeline else "pipeline"
        if len(self.problems) == 1:
            return f"{name}: {self.problems[0]}"
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{name} has {len(self.problems)} problems:{lines}"


class PlaceholderError(PipelineError, TypeError):
    """A value that exists only when the pipeline runs was used as if it existed: in an f-string, a sum, an ``if``."""


class FileProblem:
    """One thing that is wrong with a federation file: where it stands, and what is allowed there.

    Attributes:
        file: the file.
        line: the line, from 1; 0 if it is about the whole file.
        column: the column, from 1; 0 if it is about the whole file.
        key: the keys that lead there, such as ``sites.alpha.interface``; empty for the file itself.
        message: what is wrong.
    """

    __slots__ = ("column", "file", "key", "line", "message")

    def __init__(self, file: str, line: int, column: int, key: str, message: str) -> None:
        self.file = file
        self.line = line
        self.column = column
        self.key = key
        self.message = message

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.key}: {self.message}" if self.key else f"{where}: {self.message}"

    def __repr__(self) -> str:
        return f"FileProblem({self.file!r}, {self.line}, {self.column}, {self.key!r}, {self.message!r})"

    def __reduce__(self) -> tuple[type[FileProblem], tuple[str, int, int, str, str]]:
        return (FileProblem, (self.file, self.line, self.column, self.key, self.message))


class FederationError(DfmError):
    """A federation cannot be read from its file, or cannot be written to one.

    Attributes:
        federation: the file, or the name of the federation.
        problems: everything that is wrong, in all its files.
    """

    def __init__(self, federation: str, problems: Sequence[FileProblem]) -> None:
        super().__init__(federation, tuple(problems))
        self.federation = federation
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        shown = "".join(f"\n  - {problem}" for problem in self.problems[:_LISTED])
        rest = len(self.problems) - _LISTED
        more = f"\n  and {rest:,} more" if rest > 0 else ""
        return f"federation {self.federation} has {len(self.problems):,} problems:{shown}{more}"


class DeploymentError(DfmError):
    """A federation cannot be provisioned, started or ended.

    Attributes:
        federation: the name of the federation, or its folder.
        problems: everything that is wrong.
    """

    def __init__(self, federation: str, problems: Sequence[str]) -> None:
        super().__init__(federation, tuple(problems))
        self.federation = federation
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"federation {self.federation}: {self.problems[0]}"
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"federation {self.federation} has {len(self.problems)} problems:{lines}"


class FlareError(DfmError):
    """A federation on NVIDIA FLARE cannot be reached, or does not do what is needed of it.

    Attributes:
        problem: what is wrong.
        advice: what to do about it.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem, advice)
        self.problem = problem
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.problem}. {self.advice}." if self.advice else self.problem


class PipelineDenied(DfmError):
    """A site does not allow a pipeline.

    Attributes:
        site: the site.
        reason: why, in the words of the site.
    """

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(site, reason)
        self.site = site
        self.reason = reason

    def __str__(self) -> str:
        return f"site {self.site!r} does not allow the pipeline: {self.reason}"


class PartialError(DfmError):
    """Advice ends at a value that somebody has to choose first: discover again with it, to learn more."""

    def __init__(self, field: str, value: object) -> None:
        super().__init__(field, value)
        self.field = field
        self.value = value

    def __str__(self) -> str:
        return f"what comes behind {self.field!r} is not known yet: discover again with {self.field}={self.value!r}"


class ParameterError(DfmError):
    """The parameters given for an execution do not fit the pipeline."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class JobExists(ParameterError):
    """A job with this id exists already, with another pipeline, other parameters, or other options."""

    def __init__(self, job_id: str) -> None:
        super().__init__([f"a job {job_id!r} exists already, with other content"])
        self.args = (job_id,)
        self.job_id = job_id


class EncodingError(DfmError):
    """A value cannot travel between sites, or be written to a store.

    Attributes:
        type_name: the type of the part that cannot be encoded.
        path: where that part is.
        reason: why it cannot be encoded.
        stored: whether it was to be written to a store.
    """

    def __init__(self, type_name: str, path: str, reason: str, stored: bool = False) -> None:
        super().__init__(type_name, path, reason, *[True] * stored)
        self.type_name = type_name
        self.path = path
        self.reason = reason
        self.stored = stored

    def __str__(self) -> str:
        what = "written to a store" if self.stored else "sent to another site"
        return f"{self.path} of type {self.type_name} cannot be {what}: {self.reason}"


class DecodingError(DfmError):
    """A value arrived, or was stored, and cannot be rebuilt here."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(node, reason)
        self.node = node
        self.reason = reason

    def __str__(self) -> str:
        return f"the value of {self.node} cannot be rebuilt in the application: {self.reason}"


class FobsError(DfmError):
    """A message of NVFLARE's file pipes cannot be written or read.

    Attributes:
        reason: what is wrong with it.
        type_name: the type that it is about, as NVFLARE or Python names it; empty if it is about none.
    """

    def __init__(self, reason: str, type_name: str = "") -> None:
        super().__init__(reason, type_name)
        self.reason = reason
        self.type_name = type_name

    def __str__(self) -> str:
        about = f" of type {self.type_name}" if self.type_name else ""
        return f"a value{about} does not fit into a file pipe: {self.reason}"


class ShippingError(DfmError):
    """The code of an operation cannot be shipped to the worker processes of its site."""

    def __init__(self, operation: str, site: str, reason: str) -> None:
        super().__init__(operation, site, reason)
        self.operation = operation
        self.site = site
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"operation {self.operation!r} of site {self.site!r} cannot be shipped to a worker process: "
            f"{self.reason}. Define it in an importable module, or keep what it refers to picklable"
        )


class LoadingError(DfmError):
    """A class that a federation names cannot be used at a site.

    Attributes:
        site: the site.
        role: what the class is for, such as ``"operation 'math.Square'"``.
        path: its module and name.
        reason: what is wrong, and what to do.
    """

    def __init__(self, site: str, role: str, path: str, reason: str) -> None:
        super().__init__(site, role, path, reason)
        self.site = site
        self.role = role
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.role} of site {self.site!r}: class {self.path!r} {self.reason}"


class SecretError(DfmError):
    """A secret cannot be had, or who keeps them does not work. Tells nothing of what they are.

    Attributes:
        site: the site.
        key: the name of the secret; empty if it is about the vault itself.
        reason: what is wrong, and what to do.
    """

    def __init__(self, site: str, key: str, reason: str) -> None:
        super().__init__(site, key, reason)
        self.site = site
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        what = f"secret {self.key!r}" if self.key else "the vault"
        where = f" of site {self.site!r}" if self.site else ""
        return f"{what}{where}: {self.reason}"


class StreamOverrun(DfmError):
    """A stream with several consumers ran too far ahead of the slowest of them."""

    def __init__(self, label: str, limit: int) -> None:
        super().__init__(label, limit)
        self.label = label
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"the stream of {self.label} has several consumers, and one of them is more than {self.limit:,} elements "
            "behind. Return a list instead of a generator, or read the stream once"
        )


class OperationFailed(DfmError):
    """An operation raised at a site.

    Attributes:
        site: where it ran.
        operation: its name; for a failing expression, the statement.
        node: the label of the node in the pipeline.
        frame: the execution it belongs to.
        attempt: which try it was, counted from 1.
        type_name: the qualified name of the original exception's type.
        message: the original exception's text.
        remote_traceback: the traceback as text, from where it was raised.
    """

    def __init__(
        self,
        site: str,
        operation: str,
        node: str,
        frame: tuple[int, ...],
        attempt: int,
        type_name: str,
        message: str,
        remote_traceback: str,
    ) -> None:
        super().__init__(site, operation, node, frame, attempt, type_name, message, remote_traceback)
        self.site = site
        self.operation = operation
        self.node = node
        self.frame = frame
        self.attempt = attempt
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        tries = f", attempt {self.attempt}" if self.attempt > 1 else ""
        head = f"{self.node} at site {self.site!r} (frame {self.frame}{tries}) raised {self.type_name}: {self.message}"
        return f"{head}\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else head


class HttpCallFailed(DfmError):
    """An HTTP service could not be reached, or did not give a good answer. Has no secrets, and no address.

    Attributes:
        operation: the operation that asked it.
        method: the method of the request.
        path: the path, with the names of its parameters in braces.
        status: the status of the answer; None if there was none.
        reason: what was wrong.
        answer: the first part of what the service said.
    """

    def __init__(
        self, operation: str, method: str, path: str, status: int | None, reason: str, answer: str = ""
    ) -> None:
        super().__init__(operation, method, path, status, reason, answer)
        self.operation = operation
        self.method = method
        self.path = path
        self.status = status
        self.reason = reason
        self.answer = answer

    def __str__(self) -> str:
        status = "" if self.status is None else f"{self.status} "
        said = f"; it said: {self.answer}" if self.answer else ""
        return f"{self.operation} ({self.method} {self.path}): {status}{self.reason}{said}"


class WorkerLost(DfmError):
    """A worker process of a site ended while a job ran on it.

    Attributes:
        site: its site.
        exit_code: how it ended; the number of a signal is negative. None if that is not known.
        detail: why, as far as is known.
        lines: the last lines that it said.
        out_of_memory: whether it is likely that the kernel ended it because memory ran out.
    """

    def __init__(
        self,
        site: str,
        exit_code: int | None,
        detail: str = "",
        lines: Sequence[str] = (),
        out_of_memory: bool = False,
    ) -> None:
        super().__init__(site, exit_code, detail, tuple(lines), out_of_memory)
        self.site = site
        self.exit_code = exit_code
        self.detail = detail
        self.lines = tuple(lines)
        self.out_of_memory = out_of_memory

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended it, such as ``SIGSEGV``; None if none did."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # one without a name
            return f"signal {-self.exit_code}"

    def __str__(self) -> str:
        if self.exit_code is None:
            how = "was lost"
        elif self.exit_code < 0:
            how = f"was killed by {self.signal_name}"
        else:
            how = f"exited with code {self.exit_code}"
        text = f"a worker of site {self.site!r} {how}"
        if self.detail:
            text += f": {self.detail}"
        if self.out_of_memory:
            text += (
                "; out of memory suspected: the kernel has killed processes since the worker started. "
                "Let fewer operations run at the same time, work on smaller pieces, or give the machine more memory"
            )
        shown = self._excerpt()
        return f"{text}. Its last output:\n" + "\n".join(f"  {line}" for line in shown) if shown else text

    def _excerpt(self) -> tuple[str, ...]:
        """The lines that tell most: the beginning of the report of a crash, else the last ones."""
        for index in reversed(range(len(self.lines))):
            if self.lines[index].startswith("Fatal Python error:"):
                return self.lines[index : index + _SHOWN]
        return self.lines[-_SHOWN:]


class JobFailed(DfmError):
    """A job ended with errors. ``errors`` holds the first of them, ``count`` tells how many there were."""

    def __init__(self, job_id: str, errors: Sequence[DfmError], count: int) -> None:
        super().__init__(job_id, tuple(errors), count)
        self.job_id = job_id
        self.errors = tuple(errors)
        self.count = count
        if len(self.errors) == 1:
            self.__cause__ = self.errors[0]
        elif self.errors:
            self.__cause__ = ExceptionGroup(f"{count} errors in job {job_id}", list(self.errors))

    def __str__(self) -> str:
        first = str(self.errors[0]).split("\n", 1)[0] if self.errors else "no details"
        return f"job {self.job_id} failed with {self.count} error{'s' * (self.count != 1)}; the first: {first}"


class JobAborted(DfmError):
    """A job was cancelled, ran out of its deadline, or lost its workers."""

    def __init__(self, job_id: str, reason: str) -> None:
        super().__init__(job_id, reason)
        self.job_id = job_id
        self.reason = reason

    def __str__(self) -> str:
        return f"job {self.job_id} was aborted: {self.reason}"


class JobInterrupted(DfmError):
    """The application that ran a durable job has ended before the job did."""

    def __init__(self, job_id: str, reason: str) -> None:
        super().__init__(job_id, reason)
        self.job_id = job_id
        self.reason = reason

    def __str__(self) -> str:
        there = "reattach" in self.reason  # it runs on without the application
        advice = "" if there else ". session.resume(job_id) goes on with it, job.cancel() aborts it"
        return f"job {self.job_id} was interrupted: {self.reason}{advice}"


class JobNotFound(DfmError):
    """No job with this id is known to the session."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"no job {self.job_id!r} is known to this session"


class QueueFull(DfmError):
    """As many jobs wait as may, and ``LocalOptions(queue_overflow="fail")`` was chosen."""

    def __init__(self, waiting: int) -> None:
        super().__init__(waiting)
        self.waiting = waiting

    def __str__(self) -> str:
        return (
            f"the limit of {self.waiting:,} waiting jobs is reached. Try again later, raise "
            'LocalOptions(queue_limit=...), or let execute wait with queue_overflow="block"'
        )


class JobOwned(DfmError):
    """A stored job belongs to another process, which is alive."""

    def __init__(self, job_id: str, pid: int, host: str) -> None:
        super().__init__(job_id, pid, host)
        self.job_id = job_id
        self.pid = pid
        self.host = host

    def __str__(self) -> str:
        return (
            f"job {self.job_id} belongs to process {self.pid} on {self.host}, which is alive. "
            "Only read it, or end that process first"
        )


class ResultsExpired(DfmError):
    """A reader asked for events that the job's log no longer holds."""

    def __init__(self, job_id: str, wanted: int, first: int) -> None:
        super().__init__(job_id, wanted, first)
        self.job_id = job_id
        self.wanted = wanted
        self.first = first

    def __str__(self) -> str:
        return (
            f"job {self.job_id}: event {self.wanted} is gone, the log begins at {self.first}. "
            f"Read from there with after={self.first - 1}. ResultLimits and LocalOptions(keep_finished=..., "
            "keep_finished_for=..., keep_finished_bytes=...) say how much is kept; a store keeps everything"
        )


class ResultsUnread(DfmError):
    """Somebody waits for a job's end, but its log is full and nobody reads it, so it cannot go on."""

    def __init__(self, job_id: str, held: int) -> None:
        super().__init__(job_id, held)
        self.job_id = job_id
        self.held = held

    def __str__(self) -> str:
        return (
            f"job {self.job_id} holds {self.held:,} unread events, its limit, and nobody reads them: it waits. "
            "Read the results (async for result in job), or raise ResultLimits"
        )


class SessionClosed(DfmError):
    """The session is not connected, or was closed."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


class StoreError(DfmError):
    """A store of jobs cannot be opened, read or written.

    Attributes:
        path: the file.
        problem: what is wrong with it.
        advice: what to do about it.
    """

    def __init__(self, path: str, problem: str, advice: str) -> None:
        super().__init__(path, problem, advice)
        self.path = path
        self.problem = problem
        self.advice = advice

    def __str__(self) -> str:
        return f"store {self.path}: {self.problem}. {self.advice}"


# Programs outside the federation.


class ExchangeError(DfmError):
    """The root of what goes wrong between a site and a program outside the federation."""


class HandshakeRefused(ExchangeError):
    """A program said hello, and the site does not want it; or it could not read where the site is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the site did not accept this program: {self.reason}"


class AgentClosed(ExchangeError):
    """There are no more tasks for this agent.

    Attributes:
        reason: "ended", "aborted", "peer gone" or "closed here".
        detail: what is known beyond that.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"no more tasks: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class CallStateError(ExchangeError):
    """A call of the agent that does not fit its state."""

    def __init__(self, call: str, problem: str) -> None:
        super().__init__(call, problem)
        self.call = call
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.call}: {self.problem}"


class ConversionError(ExchangeError):
    """A conversion hook of the agent raised. The cause is what it raised."""

    def __init__(self, what: str, task: str, reason: str) -> None:
        super().__init__(what, task, reason)
        self.what = what
        self.task = task
        self.reason = reason

    def __str__(self) -> str:
        return f"the {self.what} of task {self.task} could not be converted: {self.reason}"


class ResultNotDelivered(ExchangeError):
    """A result did not arrive, or was refused.

    Attributes:
        task: the id of the task.
        state: how far the exchange came.
        reason: why it went no further.
    """

    def __init__(self, task: str, state: str, reason: str) -> None:
        super().__init__(task, state, reason)
        self.task = task
        self.state = state
        self.reason = reason

    def __str__(self) -> str:
        return f"the result of task {self.task} is {self.state}: {self.reason}"


class TransferFailed(ExchangeError):
    """A large part of a task or a result could not be pulled."""

    def __init__(self, transfer: str, receiver: str, reason: str) -> None:
        super().__init__(transfer, receiver, reason)
        self.transfer = transfer
        self.receiver = receiver
        self.reason = reason

    def __str__(self) -> str:
        return f"transfer {self.transfer} to {self.receiver} failed: {self.reason}"


class BadTask(ExchangeError):
    """A task that an executor does not take."""

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(task, problem)
        self.task = task
        self.problem = problem

    def __str__(self) -> str:
        return f"task {self.task!r}: {self.problem}"


class BadResult(ExchangeError):
    """A program answered, but not with what its task asks for."""

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(task, problem)
        self.task = task
        self.problem = problem

    def __str__(self) -> str:
        return f"the result of task {self.task!r}: {self.problem}"


class TaskRejected(ExchangeError):
    """The program did not take a task."""

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(task, reason)
        self.task = task
        self.reason = reason

    def __str__(self) -> str:
        return f"the program did not take task {self.task!r}: {self.reason}"


class TaskAborted(ExchangeError):
    """A task was given up, by one side or the other."""

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(task, reason)
        self.task = task
        self.reason = reason

    def __str__(self) -> str:
        return f"task {self.task!r} was aborted: {self.reason}"


class PeerGone(ExchangeError):
    """The other side vanished: its connection ended, or it gave no sign of life for too long."""

    def __init__(self, detail: str, lines: Sequence[str] = ()) -> None:
        super().__init__(detail, tuple(lines))
        self.detail = detail
        self.lines = tuple(lines)

    def __str__(self) -> str:
        return f"the other side is gone: {self.detail}{_last_lines(self.lines)}"


class LaunchFailed(ExchangeError):
    """A program could not be started, or did not come up.

    Attributes:
        task: the name of the task that it was started for.
        problem: what went wrong.
        exit_code: its exit code, if it has ended; negative for a signal.
        lines: the last lines that it wrote.
    """

    def __init__(self, task: str, problem: str, exit_code: int | None = None, lines: Sequence[str] = ()) -> None:
        super().__init__(task, problem, exit_code, tuple(lines))
        self.task = task
        self.problem = problem
        self.exit_code = exit_code
        self.lines = tuple(lines)

    def __str__(self) -> str:
        return f"the program for task {self.task!r} did not come up: {self.problem}{_last_lines(self.lines)}"


class ProgramExited(ExchangeError):
    """A program ended before its result was there.

    Attributes:
        task: the name of the task that it worked on.
        exit_code: its exit code; negative for a signal.
        lines: the last lines that it wrote.
    """

    def __init__(self, task: str, exit_code: int, lines: Sequence[str] = ()) -> None:
        super().__init__(task, exit_code, tuple(lines))
        self.task = task
        self.exit_code = exit_code
        self.lines = tuple(lines)

    def __str__(self) -> str:
        how = f"by {signal_name(self.exit_code)}" if self.exit_code < 0 else f"with exit code {self.exit_code}"
        return f"the program ended {how} before the result of task {self.task!r} was there{_last_lines(self.lines)}"


class ProgramFailed(ExchangeError):
    """A program that is an operation of a pipeline answered that it could not do its task.

    Attributes:
        task: the name of the task.
        rc: the program's return code.
        reason: what the program said about it.
        lines: the last lines that it wrote.
    """

    def __init__(self, task: str, rc: str, reason: str, lines: Sequence[str] = ()) -> None:
        super().__init__(task, rc, reason, tuple(lines))
        self.task = task
        self.rc = rc
        self.reason = reason
        self.lines = tuple(lines)

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"the program answered task {self.task!r} with {self.rc}{why}{_last_lines(self.lines)}"


def signal_name(exit_code: int) -> str:
    """Names the signal behind a negative exit code."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _last_lines(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return "\nlast lines:\n" + "\n".join(f"  {line}" for line in lines[-_SHOWN:])
