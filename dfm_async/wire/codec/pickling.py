"""Pickles, for the processes of one tree: also of classes and functions of a script, a notebook or a function.

cloudpickle pickles what other processes cannot import, except for classes with ``__slots__``: it rebuilds them
without, so that their objects have another state than those of the class that they came from.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, Final

import cloudpickle
import msgspec
from msgspec.msgpack import Ext

from dfm_async.wire.codec.codec_engine import CodecEngine, Kind

_MAIN: Final = "__main__"
"""The module that is another one in every process: its classes do not travel by their names."""
_SLOTS: Final = (str, tuple, list, dict)
_PICKLE: Final = 23
_PICKLE_BUFFERS: Final = 25


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no type information
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and isinstance(obj.__dict__.get("__slots__"), _SLOTS):
            return _with_slots(obj, reduced)
        return reduced


def _with_slots(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what rebuilds a class with its slots from the beginning: later they have no effect."""
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
    """Return Python's name of a private attribute of a class."""
    private = slot.startswith("__") and not slot.endswith("__")
    return f"_{name.lstrip('_')}{slot}" if private else slot


def dumps_by_value(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle a value, with the code that other processes cannot import."""
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()


def _dump(value: Any, *, by_value: bool) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value: by value where a class of it is in ``__main__``, in a notebook, or in a function."""
    buffers: list[pickle.PickleBuffer] = []
    if not by_value:
        try:
            data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if _MAIN not in str(error):
                raise
        else:
            if _MAIN.encode() not in data:
                return data, buffers
        buffers = []
    return dumps_by_value(value, buffers.append), buffers


def importable(kind: type) -> bool:
    """Return whether another process finds a class by its name."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found is kind and kind.__module__ != _MAIN


def _is_data(kind: type) -> bool:
    """Return whether a class would be sent field by field, if another process could find it by its name."""
    plain = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or hasattr(kind, "__pydantic_fields__")
    return plain or issubclass(kind, (enum.Enum, msgspec.Struct))


def pack_pickle(engine: CodecEngine, value: Any) -> Ext:
    """Pickle a value that no kind knows.

    Raises:
        TypeError: this codec does not pickle.
    """
    kind = type(value)
    if not engine.trusted:
        rule = "stores do not hold pickled values" if engine.mode.stored else "pickle is not allowed here"
        if _is_data(kind) and not importable(kind):
            raise TypeError(f"{rule}, and only this process knows its class; put it in a module")
        raise TypeError(
            f"{rule}, and no codec knows this type; convert it to plain data, such as a dataclass, or register a codec "
            "(dfm_async.codecs)"
        )
    data, kept = _dump(value, by_value=kind.__module__ != "builtins" and not importable(kind))
    buffers: list[Any] = []
    for buffer in kept:
        raw = buffer.raw()
        block = engine.store(raw)
        # Never within the pickle: there it would arrive writable, which one in shared memory cannot.
        buffers.append(bytes(raw) if block is None else [block.offset, block.size])
    engine.count(len(data))
    return Ext(_PICKLE_BUFFERS, engine.dumps([data, buffers])) if buffers else Ext(_PICKLE, data)


def _unpickle(engine: CodecEngine, data: memoryview | bytes, buffers: list[Any] | None = None) -> Any:
    if not engine.trusted:
        raise TypeError("pickled values are not accepted here")
    value = pickle.loads(data, buffers=buffers)  # noqa: S301 - only a codec for our own process tree gets here
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):  # an array of objects is read-only like all the others
        value.flags.writeable = False
    return value


def _unpickle_buffers(engine: CodecEngine, data: memoryview) -> Any:
    if not engine.trusted:
        raise TypeError("pickled values are not accepted here")
    content, found = engine.decode_list(data)
    return _unpickle(engine, content, [part if isinstance(part, bytes) else engine.part(*part) for part in found])


PICKLE_KINDS: Final = (
    Kind(code=_PICKLE, unpack=_unpickle),
    Kind(code=_PICKLE_BUFFERS, unpack=_unpickle_buffers),
)
