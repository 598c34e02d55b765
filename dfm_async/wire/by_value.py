"""Pickles what other processes cannot import: classes and functions of a script, a notebook or a function.

cloudpickle does it, except for classes with ``__slots__``: it rebuilds them without, so that their objects have another
state than those of the class that they came from.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["dumps"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no type information
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and isinstance(obj.__dict__.get("__slots__"), _SLOTS):
            return _with_slots(obj, reduced)
        return reduced


_SLOTS = (str, tuple, list, dict)


def _with_slots(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What rebuilds a class, with its slots from the beginning: later they have no effect."""
    make, arguments, state, *rest = reduced
    if getattr(make, "__name__", "") != "_make_skeleton_class" or issubclass(kind, tuple):
        return reduced  # tuples can have no slots but (), which named tuples add by themselves
    slots = kind.__dict__["__slots__"]
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    constructor, name, bases, namespace, *more = arguments
    made = {"__slots__", *names, *(_mangled(kind.__name__, slot) for slot in names)}
    attributes = {key: value for key, value in state[0].items() if key not in made}
    arguments = (constructor, name, bases, {**namespace, "__slots__": slots}, *more)
    return (make, arguments, (attributes, *state[1:]), *rest)


def _mangled(name: str, slot: str) -> str:
    """What Python calls a private attribute of a class."""
    private = slot.startswith("__") and not slot.endswith("__")
    return f"_{name.lstrip('_')}{slot}" if private else slot


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickles a value, with the code that others cannot import."""
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()
