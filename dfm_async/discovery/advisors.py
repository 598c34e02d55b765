"""Advisors: functions that advise which values a field may have, and how they are found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from dfm_async.discovery.advised_values import AdvisedValue

F = TypeVar("F", bound=Callable[..., Any])

DISCOVER: Final = "#discover"
"""The operation of every site that queries the advisors of another one. No other can have this name."""

_MARK = "field_advisor_config"  # DFM's own decorator sets the same attribute
_MISSING: Any = object()


class AdviceContext(Protocol):
    """What an advisor can know about the fields before its own."""

    def get(self, field: str, default: Any = _MISSING) -> Any:
        """Return the value of another field: the one that was given, or the one that is assumed in this branch.

        Raises:
            LookupError: its value is not known here, and no default was given.
        """


@dataclass(frozen=True, slots=True)
class AdvisorConfig:
    """Which field an advisor advises on, and when it is queried."""

    field: str
    order: int = -1


@dataclass(frozen=True, slots=True)
class Advisor:
    """An advisor that can be called: ``function(value, context)`` gives advice, or a coroutine that does."""

    field: str
    order: int
    name: str
    function: Callable[[Any, AdviceContext], AdvisedValue | Any]
    foreign: bool = False
    """Whether it was marked by DFM's own decorator, and takes DFM's own values."""


def field_advisor(name: str, order: int = -1) -> Callable[[F], F]:
    """Mark a method of an adapter as the advisor of a field: ``(self, value, context) -> AdvisedValue``.

    It may be async. ``value`` is what the pipeline gives, which is then checked against the advice; or ``Advise()``.
    ``context.get(field)`` is the value of a field whose advisor was asked before.

    Args:
        name: the argument of ``body`` that it advises on.
        order: advisors with 0, 1, 2, ... are asked first, in this order; then ..., -3, -2, -1. Equal ones are asked in
            the order of their names.
    """
    config = _config(name, order)

    def mark(function: F) -> F:
        if not callable(function):
            raise TypeError(f"field_advisor({name!r}) is for functions, not for {function!r}")
        setattr(function, _MARK, config)
        return function

    return mark


def _config(field: str, order: int) -> AdvisorConfig:
    if not isinstance(field, str):
        raise TypeError(f"an advisor needs the name of its field: field_advisor('city'), not {field!r}")
    if not isinstance(order, int):
        raise TypeError(f"the order of the advisor of {field!r} must be a whole number, not {order!r}")
    return AdvisorConfig(field, order)


def advisors_of(adapter: object, others: Mapping[str, Advisor] | None = None) -> list[Advisor]:
    """Find the advisors of an adapter, in the order in which they are asked; looking for them runs none of its code.

    ``others``, by their fields, take the place of methods.
    """
    found = []
    for name in dir(type(adapter)):
        member = inspect.getattr_static(type(adapter), name)
        config = getattr(member, _MARK, None)
        if config is not None and config.field not in (others or {}):
            foreign = not isinstance(config, AdvisorConfig)
            found.append(Advisor(config.field, config.order, name, getattr(adapter, name), foreign))
    return sorted([*found, *(others or {}).values()], key=lambda each: (each.order < 0, each.order, each.name))


def advisor(field: str, order: int, function: Callable[..., Any]) -> Advisor:
    """Make an advisor of a function ``(value, context)``."""
    config = _config(field, order)
    if not callable(function):
        raise TypeError(f"the advisor of {field!r} must be a function, not {function!r}")
    return Advisor(config.field, config.order, getattr(function, "__name__", field), function)
