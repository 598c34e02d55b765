"""The functions of operations: their signatures, and what runs when one is called outside a pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from dfm_async.federation.operation import RESERVED, CodeKind, ExternalCode, Operation, Signature, function_of, kind_of
from dfm_async.model import signatures


def check_parameters(name: str, signature: Signature, reserved: frozenset[str] = RESERVED) -> None:
    """Raise TypeError for parameters whose names mean something else in a pipeline."""
    taken = reserved & set(signature.parameters.parameters)
    if taken:
        raise TypeError(
            f"operation {name!r} has a parameter named {sorted(taken)[0]!r}, which means something else in a "
            "pipeline; rename it"
        )


def without_code(name: str, signature: Signature, description: str) -> Callable[..., Any]:
    """Return a function with the name, signature and docstring of a declared operation, which cannot be called."""

    def run(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"{name!r} is declared without code: it runs only in a pipeline, at the sites that offer it")

    run.__name__ = run.__qualname__ = name.rpartition(".")[2]
    run.__doc__ = description
    run.__module__ = name.rpartition(".")[0]
    run.__signature__ = signature.parameters  # type: ignore[attr-defined]
    return run


def signature_of(code: Any, program: ExternalCode | None) -> Signature:
    """Read the signature of what a site offers: of the code, or of what declares the program."""
    if program is not None:
        return declared_by(code)
    check_code(code)
    return Signature.of(function_of(code), bound=isinstance(code, type))


def check_code(code: Any) -> None:
    """Raise TypeError for what cannot be the code of an operation."""
    if isinstance(code, type) and not callable(getattr(code, "body", None)):
        hint = "write what a call does as a method 'body(self, ...)', or offer a function"
        raise TypeError(f"class {code.__qualname__!r} cannot be an operation, because it has no method 'body': {hint}")
    if not callable(function_of(code)):
        raise TypeError(f"an operation is made of a function, or of a class or object with a 'body', not of {code!r}")


def plain_function(code: Any, args: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return the function that runs when an operation is called outside a pipeline."""
    if isinstance(code, type):

        def run(*call_args: Any, **call_kwargs: Any) -> Any:
            return code(**(args or {})).body(*call_args, **call_kwargs)

        body = code.body  # type: ignore[attr-defined]
        functools.update_wrapper(run, body, assigned=("__doc__", signatures.ANNOTATIONS), updated=())
        del run.__wrapped__  # type: ignore[attr-defined] # its first parameter is the object, which callers do not pass
        run.__name__, run.__qualname__, run.__module__ = code.__name__, code.__qualname__, code.__module__
        parameters = signatures.signature_of(body).parameters.values()
        run.__signature__ = inspect.Signature(list(parameters)[1:])  # type: ignore[attr-defined]
        run.__dfm_code__ = code  # type: ignore[attr-defined] # what is sent to workers
        return run
    return function_of(code)


def same_source(a: Operation[..., Any], b: Operation[..., Any]) -> bool:
    """Return whether one replaces the other: a notebook cell that was run again."""
    keys = [(getattr(o.code, "__module__", None), getattr(o.code, "__qualname__", None)) for o in (a, b)]
    return keys[0] == keys[1] and keys[0][1] is not None


_KINDS: Final = {
    CodeKind.ASYNC: "an async function",
    CodeKind.GENERATOR: "a generator",
    CodeKind.ASYNC_GENERATOR: "an async generator",
}


def declared_by(code: Any) -> Signature:
    """Read the signature of a program from the plain function that declares it; TypeError for anything else."""
    if not inspect.isfunction(code) or kind_of(code) is not CodeKind.SYNC:
        if inspect.isfunction(code):
            what = _KINDS[kind_of(code)]
        else:
            what = "a class" if isinstance(code, type) else f"an object of {type(code).__name__}"
        raise TypeError(
            f"{getattr(code, '__name__', code)!r} is {what}: with program=, write a plain function that declares what "
            "the program takes and returns, such as: def train(weights: dict, rate: float = 0.1) -> dict: ..."
        )
    return Signature.of(code, bound=False)


def body_of(program: ExternalCode, signature: Signature) -> type[Any]:
    """Return the class that runs a program; TypeError if its ``body`` is not async or cannot take what is declared."""
    for parameter in signature.parameters.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(f"a program gets its arguments by their names: declare a list instead of *{parameter.name}")
    found = getattr(program, "body_class", None)
    if not isinstance(found, type) or kind_of(getattr(found, "body", None)) is not CodeKind.ASYNC:
        raise TypeError(f"program= takes an object whose body_class is a class with an async body, not {program!r}")
    return found


def stand_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that looks like the one that declares a program, and raises when it is called."""

    def run(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"{name!r} is an external program: it runs only in a pipeline")

    functools.update_wrapper(run, function)
    del run.__wrapped__  # type: ignore[attr-defined] # it need not be picklable, unlike this function
    run.__signature__ = signatures.signature_of(function)  # type: ignore[attr-defined]
    return run
