"""Builds objects of classes that a federation names: what their constructors take, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfm_async.errors import LoadingError
from dfm_async.model.signatures import signature_of

__all__ = ["construct", "lacks_body", "taken", "wrong_arguments"]


def taken(kind: type[Any]) -> frozenset[str]:
    """The names of the parameters of a constructor."""
    try:
        return frozenset(signature_of(kind).parameters)
    except (TypeError, ValueError):  # one that is written in C tells nothing
        return frozenset()


def wrong_arguments(kind: type[Any], arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a constructor; it names them, and never shows their values."""
    try:
        signature_of(kind).bind(**arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def construct(kind: type[Any], arguments: Mapping[str, Any], site: str, role: str) -> Any:
    """Builds an object.

    Args:
        kind: its class.
        arguments: the arguments of its constructor.
        site: the site.
        role: what it is for, as errors say it.

    Raises:
        LoadingError: the arguments do not fit, or the constructor raised.
    """
    path = f"{kind.__module__}.{kind.__qualname__}"
    wrong = wrong_arguments(kind, arguments)
    if wrong is not None:
        raise LoadingError(site, role, path, f"cannot be built with its args: {wrong}")
    try:
        return kind(**arguments)
    except BaseException as error:  # whatever the class raises: it fails the call, not the process
        raise LoadingError(site, role, path, f"cannot be built: {type(error).__name__}: {error}") from error


def lacks_body(kind: type[Any]) -> str | None:
    """What a class lacks to be an adapter."""
    return None if callable(getattr(kind, "body", None)) else "is no adapter: it has no body(...)"
