"""Metrics and attributes as operations pass them, made plain: what can be sent, stored and read by anybody."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

from dfm_async.base.redaction import hide
from dfm_async.model.events import Scalar


def plain_values(values: Mapping[str, Any], what: str = "metric") -> dict[str, Scalar]:
    """Check and copy named values; ``what`` names one of them in errors.

    Raises:
        TypeError: a name is not a string, or a value is not a number, a string or a truth value.
        ValueError: a whole number needs more than 64 bits.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{what}s must be a mapping of names to values, not {values!r}")
    found: dict[str, Scalar] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of {_a(what)} must be a string, not {name!r}")
        found[plain_text(name)] = _plain(f"{what} {name!r}", value)
    return found


def plain_step(step: SupportsIndex | None) -> int | None:
    """Check the step that metrics belong to.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it needs more than 64 bits.
    """
    if step is None:
        return None
    try:
        return _sendable("step", operator.index(step))
    except TypeError:
        raise TypeError(f"step must be a whole number or None, not {step!r}") from None


def plain_text(text: str) -> str:
    """Return text that can be sent: lone surrogates are escaped, and secrets are hidden."""
    return hide(text.encode("utf-8", "backslashreplace").decode())


def _plain(what: str, value: Any) -> Scalar:
    if getattr(value, "shape", None) == ():  # a scalar of numpy, or of a library that follows it
        value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _sendable(what, int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return plain_text(value)
    raise TypeError(f"{what} must be a number, a string or a truth value, not {value!r}")


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _sendable(what: str, value: int) -> int:
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{what} does not fit into 64 bits: {value}")
    return value
