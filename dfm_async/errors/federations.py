"""What goes wrong with federations (files, deployment, FLARE) and at their sites (operations, code, workers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dfm_async.errors.root import DfmError, declared, listed, output_excerpt, public, signal_name

__all__ = [
    "DeploymentError",
    "FederationError",
    "FileProblem",
    "FlareError",
    "HttpCallFailed",
    "LoadingError",
    "OperationFailed",
    "SecretError",
    "ShippingError",
    "StreamOverrun",
    "WorkerLost",
]


@public
@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem of a federation file: its location, what is wrong, and what is allowed there.

    Attributes:
        file: the file.
        line: the line, from 1; 0 if it is about the whole file.
        column: the column, from 1; 0 if it is about the whole file.
        key: the keys that lead there, such as ``sites.alpha.interface``; empty for the file itself.
        message: what is wrong.
    """

    file: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.key}: {self.message}" if self.key else f"{where}: {self.message}"


@declared()
class FederationError(DfmError):
    """A federation cannot be read from its file, or written to one. ``problems`` lists everything that is wrong."""

    federation: str
    problems: Sequence[FileProblem]

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return listed(f"federation {self.federation}", self.problems)


@declared()
class DeploymentError(DfmError):
    """A federation, given by its name or folder, cannot be provisioned, started or ended."""

    federation: str
    problems: Sequence[str]

    def __str__(self) -> str:
        return listed(f"federation {self.federation}", self.problems)


@declared()
class FlareError(DfmError):
    """A federation on NVIDIA FLARE cannot be reached, or does not work; ``advice`` says what to do about it."""

    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.advice}." if self.advice else self.problem


@declared()
class OperationFailed(DfmError):
    """An operation raised at a site.

    Attributes:
        site: where it ran.
        operation: its name; for a failing expression, the statement.
        node: the label of the node in the pipeline.
        frame: the execution it belongs to.
        attempt: the number of the attempt, counted from 1.
        type_name: the qualified name of the original exception's type.
        message: the original exception's text.
        remote_traceback: the traceback as text, from where it was raised.
    """

    site: str
    operation: str
    node: str
    frame: tuple[int, ...]
    attempt: int
    type_name: str
    message: str
    remote_traceback: str

    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        where = f"{self.node} at site {self.site!r} (frame {self.frame}{attempt})"
        raised = f"{self.type_name}: {self.message}"
        traceback = self.remote_traceback.rstrip()
        shown = f"\n\n{traceback}" if traceback != raised.rstrip() else ""  # without frames, it adds nothing
        return f"{where} raised {raised}" + (shown if traceback else "")


@declared()
class HttpCallFailed(DfmError):
    """An HTTP service could not be reached, or did not return a successful response. Contains no secret and no address.

    Attributes:
        operation: the operation that called it.
        method: the method of the request.
        path: the path, with the names of its parameters in braces.
        status: the status of the response; None if there was none.
        reason: what was wrong.
        answer: the first part of the response's body.
        retry_after: the number of seconds after which the service asks to be called again (``Retry-After``); 0 if it
            does not.
    """

    operation: str
    method: str
    path: str
    status: int | None
    reason: str
    answer: str = ""
    retry_after: float = 0.0

    def __str__(self) -> str:
        status = "" if self.status is None else f"{self.status} "
        body = f"; the service responded: {self.answer}" if self.answer else ""
        return f"{self.operation} ({self.method} {self.path}): {status}{self.reason}{body}"


@declared()
class WorkerLost(DfmError):
    """A worker process of a site ended while a job ran on it.

    Attributes:
        site: its site.
        exit_code: the exit code of the process, or the negated number of the signal that ended it; None if unknown.
        detail: the reason, if known.
        lines: the last lines of its output.
        out_of_memory: whether the kernel probably killed it because memory ran out.
        operations: the operations of the job that it ran, or could run; empty if the job had not started on it.
    """

    site: str
    exit_code: int | None
    detail: str = ""
    lines: Sequence[str] = ()
    out_of_memory: bool = False
    operations: Sequence[str] = ()

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended it, such as ``SIGSEGV``; None if none did."""
        return None if self.exit_code is None or self.exit_code >= 0 else signal_name(self.exit_code)

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
        return text + output_excerpt(". Its last output:", self.lines)


@declared(
    "operation {operation!r} of site {site!r} cannot be shipped to a worker process: {reason}. "
    "Define it in an importable module, or keep what it refers to picklable"
)
class ShippingError(DfmError):
    """The code of an operation cannot be shipped to the worker processes of its site."""

    operation: str
    site: str
    reason: str


@declared("{role} of site {site!r}: class {path!r} {reason}")
class LoadingError(DfmError):
    """A class (``path``) cannot be used at a site for its ``role``, such as ``"operation 'math.Square'"``."""

    site: str
    role: str
    path: str
    reason: str


@declared()
class SecretError(DfmError):
    """A secret is not available, or (with an empty ``key``) the vault does not work. Never contains a secret."""

    site: str
    key: str
    reason: str

    def __str__(self) -> str:
        what = f"secret {self.key!r}" if self.key else "the vault"
        where = f" of site {self.site!r}" if self.site else ""
        return f"{what}{where}: {self.reason}"


@declared(
    "the stream of {label} has several consumers, and one of them is more than {limit:,} elements behind. "
    "Return a list instead of a generator, or read the stream once"
)
class StreamOverrun(DfmError):
    """A stream with several readers is too far ahead of the slowest reader."""

    label: str
    limit: int
