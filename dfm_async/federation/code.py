"""The functions behind operations: their signatures, and what runs when one is called outside a pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dfm_async.federation.external import declared_by
from dfm_async.federation.operation import RESERVED, ExternalCode, Operation, Signature
from dfm_async.model import signatures

__all__ = ["check_parameters", "plain_function", "same_source", "signature_of", "without_code"]


def check_parameters(name: str, signature: Signature, reserved: frozenset[str] = RESERVED) -> None:
    """Refuses parameters whose names mean something else in a pipeline.

    Raises:
        TypeError: there is one.
    """
    taken = reserved & set(signature.parameters.parameters)
    if taken:
        raise TypeError(
            f"operation {name!r} has a parameter named {sorted(taken)[0]!r}, which means something else in a "
            "pipeline; rename it"
        )


def without_code(name: str, signature: Signature, description: str) -> Callable[..., Any]:
    """What is called outside a pipeline: has the name, signature and text of a declared operation."""

    def run(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"{name!r} is declared without code: it runs only in a pipeline, at the sites that offer it")

    run.__name__ = run.__qualname__ = name.rpartition(".")[2]
    run.__doc__ = description
    run.__module__ = name.rpartition(".")[0]
    run.__signature__ = signature.parameters  # type: ignore[attr-defined]
    return run


def signature_of(code: Any, program: ExternalCode | None) -> Signature:
    """Reads the signature of what a site offers: of the code, or of what declares the program."""
    if program is not None:
        return declared_by(code)
    function = code if inspect.isroutine(code) or not hasattr(code, "body") else code.body
    return Signature.of(function, bound=isinstance(code, type))


def plain_function(code: Any, args: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The function that runs when an operation is called outside a pipeline."""
    if isinstance(code, type):

        def run(*call_args: Any, **call_kwargs: Any) -> Any:
            return code(**(args or {})).body(*call_args, **call_kwargs)

        body = code.body  # type: ignore[attr-defined]
        functools.update_wrapper(run, body, assigned=("__doc__", signatures.ANNOTATIONS), updated=())
        del run.__wrapped__  # type: ignore[attr-defined] # its first parameter is the object, which callers do not pass
        run.__name__, run.__qualname__, run.__module__ = code.__name__, code.__qualname__, code.__module__
        parameters = signatures.signature_of(body).parameters.values()
        run.__signature__ = inspect.Signature(list(parameters)[1:])  # type: ignore[attr-defined]
        run.__dfm_code__ = code  # type: ignore[attr-defined] # what travels to workers
        return run
    return code if inspect.isroutine(code) or not hasattr(code, "body") else code.body  # type: ignore[no-any-return]


def same_source(a: Operation[..., Any], b: Operation[..., Any]) -> bool:
    """Tells whether one replaces the other: a notebook cell that was run again."""
    keys = [(getattr(o.code, "__module__", None), getattr(o.code, "__qualname__", None)) for o in (a, b)]
    return keys[0] == keys[1] and keys[0][1] is not None
