"""The root of all errors, and how an error is declared: by its fields and the template of its message."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, dataclass_transform

from dfm_async.base.rendering import Shown

__all__ = ["DfmError", "declared", "exit_text", "listed", "output_excerpt", "public", "signal_name"]

_SHOWN: Final = 10
_LISTED: Final = 50
_PUBLIC: Final = "dfm_async.errors"

ErrorType = TypeVar("ErrorType", bound="type[DfmError]")
AnyType = TypeVar("AnyType", bound=type)


def public(cls: AnyType) -> AnyType:
    """Name the package as the module of a class, so that its qualified name does not depend on the layout."""
    cls.__module__ = _PUBLIC
    return cls


class _Default:
    """An attribute that is computed, unless an error has one of its own."""

    def __init__(self, compute: Callable[[DfmError], str]) -> None:
        self._compute = compute

    def __get__(self, error: DfmError | None, owner: type) -> Any:
        return self if error is None else self._compute(error)


@public
class DfmError(Shown, Exception):
    """The base class of all errors of this library. Every error of a job has these attributes.

    Attributes:
        node: the label of the node in the pipeline; empty if the error is not about a node.
        site: the site; empty if the error is not about a site.
        type_name: the qualified name of its type; for an operation that raised, of the original exception's.
        message: its text; for an operation that raised, the original exception's.
        operation: the name of the operation; empty if the error is not about an operation.
        frame: the execution that failed: the number of its parameter set, then those of its iterations; empty if the
            error is not about a call.
        attempt: the number of the attempt that failed, counted from 1; 0 if the error is not about a call.
        remote_traceback: the traceback from the site, as text; empty if there is none.
    """

    _template: ClassVar[str] = ""
    node: str = ""
    site: str = ""
    operation: str = ""
    frame: tuple[int, ...] = ()
    attempt: int = 0
    remote_traceback: str = ""
    if TYPE_CHECKING:
        type_name: str
        message: str
    else:
        type_name = _Default(lambda error: f"{type(error).__module__}.{type(error).__qualname__}")
        message = _Default(str)

    def __str__(self) -> str:
        return self._template.format_map(_TemplateAttributes(self)) if self._template else super().__str__()


class _TemplateAttributes:
    """Give a template the attributes of an error."""

    def __init__(self, error: DfmError) -> None:
        self._error = error

    def __getitem__(self, name: str) -> Any:
        return getattr(self._error, name)


@dataclass_transform(eq_default=False)
def declared(template: str = "") -> Callable[[ErrorType], ErrorType]:
    """Declare an error: its annotations are the fields, in the order of its arguments; sequences become tuples.

    Args:
        template: the message, with the names of attributes and properties in braces. Without it, the class has a
            ``__str__`` of its own.
    """

    def declare(cls: ErrorType) -> ErrorType:
        own = vars(cls)
        parameters = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=own.get(name, Parameter.empty), annotation=hint)
            for name, hint in inspect.get_annotations(cls).items()
        ]
        signature = Signature(parameters)
        post_init: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            fields = {name: tuple(value) if type(value) is list else value for name, value in bound.arguments.items()}
            self.args = tuple(fields.values())
            vars(self).update(fields)
            if post_init is not None:
                post_init(self)

        itself = Parameter("self", Parameter.POSITIONAL_ONLY)
        __init__.__signature__ = Signature([itself, *parameters])  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[method-assign]
        cls._template = template or cls._template
        return public(cls)

    return declare


def listed(subject: str, problems: Sequence[object]) -> str:
    """Return the message of an error with several problems: each on a line of its own, up to a limit."""
    if len(problems) == 1:
        return f"{subject}: {problems[0]}"
    lines = "".join(f"\n  - {problem}" for problem in problems[:_LISTED])
    rest = len(problems) - _LISTED
    more = f"\n  and {rest:,} more" if rest > 0 else ""
    return f"{subject} has {len(problems):,} problems:{lines}{more}"


def signal_name(exit_code: int) -> str:
    """Return the name of the signal behind a negative exit code."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a signal without a name
        return f"signal {-exit_code}"


def exit_text(exit_code: int | None) -> str:
    """Return how a process has ended: the name of a signal, or an exit code."""
    if exit_code is None:
        return "an unknown exit code"
    return signal_name(exit_code) if exit_code < 0 else f"exit code {exit_code}"


def output_excerpt(head: str, lines: Sequence[str]) -> str:
    """Return the most informative lines of a process, below a heading: the report of a crash, else the last ones."""
    if not lines:
        return ""
    crashes = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    shown = lines[crashes[-1] : crashes[-1] + _SHOWN] if crashes else lines[-_SHOWN:]
    return "\n".join([head, *(f"  {line}" for line in shown)])
