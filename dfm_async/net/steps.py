"""Fields of values, as pipelines may read them: ``node.name`` and ``node["key"]``.

A net may come from a stranger. What an operation has returned is data for them; the interpreter that runs it is not.
So names that begin with an underscore are no fields, and no step begins or ends at a module, a class, a function or the
like: from there, everything that a process holds could be reached.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

__all__ = ["check_step", "fetch"]

_CLOSED: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.CellType,
    functools.partial,
    functools.partialmethod,
    property,
    staticmethod,
    classmethod,
    super,
)
"""What is no data."""
_OUR_OWN: Final = ("dfm_async.net.", "dfm_async.runtime.", "dfm_async.wire.", "dfm_async.workers.")
"""Where the classes are that only the engine uses."""
_INDEXED: Final = (Mapping, Sequence, Set, bytearray, memoryview)
_KEYS: Final = frozenset({int, str, bool, float, type(None)})
"""What can stand between brackets."""


def check_step(is_attribute: bool, key: Any) -> None:
    """Raises ValueError if no pipeline may take this step."""
    if is_attribute:
        if type(key) is not str or not key.isidentifier():
            raise ValueError(f"{key!r} is no name of a field")
        if key.startswith("_"):
            raise ValueError(f"{key!r} is no field: names that begin with an underscore are private")
    elif type(key) not in _KEYS:
        raise ValueError(f"a field is chosen by a string or a number, not by {key!r}")


@functools.lru_cache(maxsize=1024)
def _is_closed(kind: Any) -> bool:
    """Whether values of such a class are no data."""
    return issubclass(kind, _CLOSED) or kind.__module__.startswith(_OUR_OWN)


@functools.lru_cache(maxsize=1024)
def _has_items(kind: Any) -> bool:
    """Whether brackets choose a part of such a value. Classes of the standard library must be containers."""
    if issubclass(kind, _INDEXED):
        return True
    return not _is_closed(kind) and kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def fetch(value: Any, is_attribute: bool, key: Any) -> Any:
    """Takes one step, which was checked before.

    Raises:
        TypeError: the value has no fields, or this one is no data; besides what the value itself raises.
    """
    kind: Any = type(value)
    if is_attribute:
        if _is_closed(kind):
            raise TypeError(f"a value of type {kind.__name__} has no fields that a pipeline can read")
        found = getattr(value, key)
    else:
        if not _has_items(kind):
            raise TypeError(f"{kind.__name__!r} object is not subscriptable in a pipeline")
        found = value[key]
    reached: Any = type(found)
    if _is_closed(reached):
        raise TypeError(f"{key!r} of a {kind.__name__} is a {reached.__name__}, which is no data")
    return found
