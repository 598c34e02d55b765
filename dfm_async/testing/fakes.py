"""Fakes: code that replaces an operation, and a record of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dfm_async.federation.operation import Operation
from dfm_async.model.signatures import signature_of

T = TypeVar("T")

_CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an operation.

    Attributes:
        operation: its name.
        site: where it was called.
        provider: the provider of the code, if it has one.
        arguments: what it was called with, by the names of the operation's parameters; streams as lists.
        job_id: the job.
        node: the label of the node in the pipeline.
        frame: the execution that the call belongs to.
        attempt: which try it was, counted from 1.
    """

    operation: str
    site: str
    provider: str | None
    arguments: Mapping[str, Any]
    job_id: str
    node: str
    frame: tuple[int, ...]
    attempt: int


class Fake:
    """Code that replaces an operation, with a record of its calls.

    Args:
        code: a function, an async function, a generator or an async generator.

    Attributes:
        calls: all calls so far, in the order that they came.
    """

    def __init__(self, code: Callable[..., Any]) -> None:
        given: object = code
        if not callable(given):
            raise TypeError(f"a fake is a function, not {code!r}: write returns({code!r}) for a value")
        self.code = code
        self.calls: list[Call] = []
        self._parameters = signature_of(code).parameters

    @classmethod
    def of(cls, code: Fake | Callable[..., Any]) -> Fake:
        """Return the fake itself, or one made of a function or of another operation."""
        if isinstance(code, Fake):
            return code
        return cls(code.code if isinstance(code, Operation) else code)

    @property
    def wants_context(self) -> bool:
        """Whether it has a parameter ``context``."""
        return _CONTEXT in self._parameters

    def check(self, operation: Operation[..., Any]) -> None:
        """Check that it can be called as the operation is.

        Raises:
            TypeError: its parameters do not fit.
        """
        taken = [found for name, found in self._parameters.items() if name != _CONTEXT]
        given = operation.signature.parameters.parameters.values()
        any_name = any(found.kind is found.VAR_KEYWORD for found in taken)
        any_position = any(found.kind is found.VAR_POSITIONAL for found in taken)
        names = {found.name for found in taken if found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)}
        wrong = []
        for parameter in given:
            if parameter.kind is parameter.VAR_KEYWORD:
                fits = any_name
            elif parameter.kind is parameter.VAR_POSITIONAL:
                fits = any_position
            else:
                fits = any_name or parameter.name in names
            if not fits:
                wrong.append(f"it does not take {parameter.name!r}")
        known = {parameter.name for parameter in given}
        for found in taken:
            if found.kind in (found.VAR_KEYWORD, found.VAR_POSITIONAL) or found.name in known:
                continue
            if found.default is found.empty:
                wrong.append(f"it needs {found.name!r}, which the operation does not have")
        if wrong:
            name = getattr(self.code, "__name__", repr(self.code))
            raise TypeError(
                f"{name}{signature_of(self.code)} cannot replace "
                f"{operation.name}{operation.signature.parameters}: {'; '.join(wrong)}"
            )

    def call(self, arguments: Mapping[str, Any], context: Any) -> Any:
        """Call the code as the operation was called."""
        named = dict(arguments)
        if self.wants_context:
            named[_CONTEXT] = context
        positional: list[Any] = []
        rest = next((found.name for found in self._parameters.values() if found.kind is found.VAR_POSITIONAL), None)
        if rest is not None and isinstance(named.get(rest), tuple):
            before = [name for name, found in self._parameters.items() if found.kind is found.POSITIONAL_OR_KEYWORD]
            positional = [*(named.pop(name) for name in before if name in named), *named.pop(rest)]
        return self.code(*positional, **named)

    def __repr__(self) -> str:
        name = getattr(self.code, "__name__", repr(self.code))
        return f"<Fake {name}: {len(self.calls)} call{'s' * (len(self.calls) != 1)}>"


def returns(*values: Any) -> Fake:
    """Return a fake that returns the values, one per call; the last one for all further calls. Without any, None."""

    def fake(*_args: Any, **_kwargs: Any) -> Any:
        return left.pop(0) if len(left) > 1 else (left[0] if left else None)

    left = list(values)
    return Fake(fake)


def raises(error: BaseException | type[BaseException]) -> Fake:
    """Return a fake that raises an exception at every call."""

    def fake(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    if not isinstance(error, BaseException) and not (isinstance(error, type) and issubclass(error, BaseException)):
        raise TypeError(f"raises() takes an exception, not {error!r}")
    return Fake(fake)
