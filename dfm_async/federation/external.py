"""Operations that are external programs: a function declares what they take and return, and is never run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from dfm_async.federation.operation import CodeKind, ExternalCode, Signature, kind_of
from dfm_async.model.signatures import signature_of

__all__ = ["body_of", "declared_by", "stand_in"]

_KINDS: Final = {
    CodeKind.ASYNC: "an async function",
    CodeKind.GENERATOR: "a generator",
    CodeKind.ASYNC_GENERATOR: "an async generator",
}


def declared_by(code: Any) -> Signature:
    """Reads the signature of a program from the function that declares it.

    Raises:
        TypeError: it is something else than a plain function.
    """
    if not inspect.isfunction(code) or kind_of(code) is not CodeKind.SYNC:
        if isinstance(code, type):
            what = "a class"
        else:
            what = _KINDS[kind_of(code)] if inspect.isfunction(code) else f"an object of {type(code).__name__}"
        raise TypeError(
            f"{getattr(code, '__name__', code)!r} is {what}: with program=, write a plain function that declares what "
            "the program takes and returns, such as: def train(weights: dict, rate: float = 0.1) -> dict: ..."
        )
    return Signature.of(code, bound=False)


def body_of(program: ExternalCode, signature: Signature) -> type[Any]:
    """The class that runs a program with such a signature.

    Raises:
        TypeError: there is none, it has no asynchronous ``body``, or it cannot get what is declared.
    """
    for parameter in signature.parameters.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(f"a program gets its arguments by their names: declare a list instead of *{parameter.name}")
    found = getattr(program, "body_class", None)
    if not isinstance(found, type) or kind_of(getattr(found, "body", None)) is not CodeKind.ASYNC:
        raise TypeError(f"program= takes an object whose body_class is a class with an async body, not {program!r}")
    return found


def stand_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What is called outside a pipeline: looks like the function that declares the program, and says that it cannot."""

    def run(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"{name!r} is an external program: it runs only in a pipeline")

    functools.update_wrapper(run, function)
    del run.__wrapped__  # type: ignore[attr-defined] # it need not be able to travel to workers, and this may have to
    run.__signature__ = signature_of(function)  # type: ignore[attr-defined]
    return run
