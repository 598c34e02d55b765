"""Values as JSON, with a summary for those that JSON cannot hold."""

from __future__ import annotations

import dataclasses
import math
import operator
import reprlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate, islice
from typing import Any, Final

import msgspec

from dfm_async.base.tasks import INTERRUPTS
from dfm_async.wire.codec import type_name
from dfm_async.wire.codec.registry import preview

_PREVIEW: Final = 200
"""The number of characters that are shown of an object without a rule."""
_BITS: Final = 14_000
"""The largest whole number that is written, about 4,200 digits: Python refuses to write much longer ones."""
_CAREFUL: Final = 50_000
"""The number of elements that are written one by one, if arrays may not have more."""
_SUMMARY: Final = 50
"""The cost of a summary, in elements."""
_HOLLOW: Final = 100
"""The number of empty lists that are written of an array without elements: they take no bytes in the array."""
_LEAST: Final = 2
"""The bytes of JSON that an element takes at least."""
_BITS_PER_ELEMENT: Final = 256
"""The number of bits of a whole number that cost as much as an element: the time to write grows with the square."""
_BUILTIN: Final = (list, tuple, dict, set, frozenset)

_repr: Final = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxstring = _repr.maxother = _PREVIEW


class _TooMuch(Exception):
    """A value has more elements than can be written one by one, or than fit into its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonValues:
    """Writes values as JSON. There is no value that makes it raise.

    Dates and times are written as ISO 8601, bytes as base64, decimals and UUIDs as text, sets and tuples as lists,
    enums by their value; dataclasses, pydantic models and structs as objects; NaN and infinity as null. Arrays are
    nested lists as far as the limits allow, else a summary with their shape and type; whole numbers of more than 4,000
    digits are a summary with their type and number of bits. Tables, series and datasets are objects with their type,
    shape, columns and first rows, as far as the limits allow. What no rule knows is a summary with its type and the
    beginning of its ``repr``.

    Attributes:
        array_items: the number of elements of an array that are written as lists.
        record_bytes: the number of bytes of JSON of one value; of larger ones only a summary is written.
        json_depth: the depth down to which values are written that need care.
    """

    array_items: int
    record_bytes: int
    json_depth: int

    def encode(self, value: Any) -> bytes:
        """Write a value; of one that is too large, or that cannot be written, a summary."""
        write = self._carefully if _has_large_numbers(value) else self._written
        try:
            data = write(value, self.record_bytes)
        except _TooMuch:
            return msgspec.json.encode({"type": type_name(type(value)), "omitted": True})
        if len(data) > self.record_bytes:
            return msgspec.json.encode({"type": type_name(type(value)), "json_bytes": len(data), "omitted": True})
        return data

    def encode_whole(self, value: Any) -> bytes:
        """Write a value, however large it is."""
        try:
            return self._written(value, None)
        except _TooMuch:
            return msgspec.json.encode(_summary(value))

    def _written(self, value: Any, size: int | None) -> bytes:
        try:
            return msgspec.json.encode(value, enc_hook=_Room(self, size).plain)
        except (_TooMuch, *INTERRUPTS):
            raise
        except BaseException:  # noqa: BLE001 - there are many reasons, some of them in the user's classes
            return self._carefully(value, size)

    def _carefully(self, value: Any, size: int | None) -> bytes:
        try:
            return msgspec.json.encode(_Careful(self, _Room(self, size)).written(value, 0))
        except (_TooMuch, *INTERRUPTS):
            raise
        except BaseException:  # noqa: BLE001 - the user's class
            return msgspec.json.encode(_summary(value))

    @property
    def elements(self) -> int:
        """The number of elements that are written of a value that needs care."""
        return max(_CAREFUL, self.array_items)

    def stand_in(self, value: Any) -> Any:
        """Return what stands for an object that the encoder does not know."""
        found = preview(value, self.array_items)
        if found is not NotImplemented:
            return found
        if isinstance(getattr(type(value), "model_fields", None), dict):
            return {name: getattr(value, name) for name in type(value).model_fields}
        if hasattr(value, "dtype") and hasattr(value, "tolist"):
            return self._array(value)
        if isinstance(value, range):
            return list(value[: self.array_items])
        if isinstance(value, memoryview):
            return value.tobytes()
        return _summary(value)

    def _array(self, value: Any) -> Any:
        shape = [int(length) for length in value.shape]
        if _lists_and_elements(value, shape) > self.array_items or (0 in shape and _lists(shape) > _HOLLOW):
            return {"type": type_name(type(value)), "shape": shape, "dtype": str(value.dtype)}
        found = value.tolist()
        return _summary(value) if isinstance(found, type(value)) else found

    def cost(self, value: Any) -> int:
        """Return the number of elements that :meth:`stand_in` makes of an object; may be far more than its bytes."""
        if isinstance(value, range):
            return min(len(value[: self.array_items]), self.array_items)
        if hasattr(value, "dtype") and hasattr(value, "tolist") and preview(value, 0) is NotImplemented:
            count = _lists_and_elements(value, [int(length) for length in value.shape])
            return count if count <= self.array_items else _SUMMARY
        return 1


class _Room:
    """The size that is left for one value, and the hook of the encoder that takes from it.

    Args:
        values: the rules.
        size: the number of bytes of JSON; None means any number.
    """

    def __init__(self, values: JsonValues, size: int | None) -> None:
        self._values = values
        self._left = size

    def plain(self, value: Any) -> Any:
        """Return what stands for an object that the encoder does not know.

        Raises:
            _TooMuch: the value is larger than its record with it.
        """
        if isinstance(value, (tuple, list, dict)):  # the encoder knows them, but not as keys: so others write them
            raise TypeError("a key that JSON does not have")
        try:
            self.take(_LEAST * self._values.cost(value))
            found = self._values.stand_in(value)
            if type(found) is dict:
                self._take_all(found)
        except (_TooMuch, *INTERRUPTS):
            raise
        except BaseException:  # noqa: BLE001 - the user's class
            return _summary(value)
        return found

    def _take_all(self, value: Any) -> None:
        """Take the size of plain data, in which one large value can occur many times."""
        if isinstance(value, (str, bytes)):
            self.take(max(_LEAST, len(value)))
        elif isinstance(value, Decimal):
            self.take(len(str(value)))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._take_all(key)
                self._take_all(item)
        elif isinstance(value, (list, tuple, Set)):
            self.take(_LEAST)
            for item in value:
                self._take_all(item)
        else:
            self.take(_LEAST)

    def take(self, size: int) -> None:
        """Take a number of bytes of JSON.

        Raises:
            _TooMuch: there is no room for them.
        """
        if self._left is not None:
            self._left -= size
            if self._left < 0:
                raise _TooMuch


def _has_large_numbers(value: Any) -> bool:
    """Return whether there are whole numbers of more than 64 bits, which are slow to write.

    MessagePack refuses them, and is much faster than JSON at finding out.
    """
    try:
        msgspec.msgpack.encode(value, enc_hook=_fields)
    except OverflowError:
        return True
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001, S110 - the encoder for JSON finds the same
        pass
    return False


def _fields(value: Any) -> Any:
    """Return the fields of an object that the encoder does not know, which may have numbers in them."""
    fields = getattr(type(value), "model_fields", None)
    return {name: getattr(value, name) for name in fields} if isinstance(fields, dict) else None


def _lists(shape: list[int]) -> int:
    """Return the number of elements of the largest level of an array as nested lists, which may all be empty."""
    return max(accumulate(shape, operator.mul), default=1)


def _lists_and_elements(value: Any, shape: list[int]) -> int:
    return _lists(shape) * _items(value.dtype)


def _items(dtype: Any) -> int:
    """Return the number of values of an element of an array: those of its fields, which may take no bytes."""
    inner = getattr(dtype, "subdtype", None)
    if inner is not None:
        return max(1, _lists(list(inner[1]))) * _items(inner[0])
    fields = getattr(dtype, "fields", None)
    return max(1, sum(_items(field[0]) for field in fields.values())) if isinstance(fields, Mapping) else 1


class _Careful:
    """Writes a value that the encoder refuses: by the same rules, part by part, up to a bound."""

    def __init__(self, values: JsonValues, room: _Room) -> None:
        self._values = values
        self._room = room
        self._left = values.elements

    def written(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        try:
            return self._one(value, depth)
        except (_TooMuch, *INTERRUPTS):
            raise
        except BaseException:  # noqa: BLE001 - the user's class
            return _summary(value)

    def _one(self, value: Any, depth: int) -> Any:
        if isinstance(value, (str, bytes)):
            self._room.take(len(value))
            return _text(value) if isinstance(value, str) else value
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            self._pay(value)
            return _whole(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if depth >= self._values.json_depth:
            self._left -= _SUMMARY
            return _summary(value)
        if isinstance(value, Mapping):
            items = islice(value.items(), self._left + 1)
            return {self._key(key): self.written(item, depth + 1) for key, item in items}
        if isinstance(value, (list, tuple, Set)):
            return [self.written(item, depth + 1) for item in islice(value, self._left + 1)]
        if isinstance(value, msgspec.Struct):
            return {name: self.written(getattr(value, name), depth + 1) for name in value.__struct_fields__}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            return {field.name: self.written(getattr(value, field.name, None), depth + 1) for field in fields}
        try:
            msgspec.json.encode(value)
        except INTERRUPTS:
            raise
        except BaseException:  # noqa: BLE001 - the same reasons
            plain = self._values.stand_in(value)
            return plain if type(plain) is dict and "repr" in plain else self.written(plain, depth + 1)
        return value

    def _pay(self, number: int) -> None:
        bits = int.bit_length(number)
        self._left -= bits // _BITS_PER_ELEMENT if bits <= _BITS else _SUMMARY
        if self._left < 0:
            raise _TooMuch

    def _key(self, key: Any) -> str:
        if isinstance(key, int):
            self._pay(key)
        return _key(key)


def _text(value: str) -> str:
    return str.encode(value, "utf-8", "replace").decode()


def _whole(value: int) -> Any:
    bits = int.bit_length(value)
    return {"type": type_name(type(value)), "bits": bits, "omitted": True} if bits > _BITS else int(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    try:
        return _text(str(key))
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001 - the user's class, or a very large number
        return f"{type_name(type(key))} at {id(key):#x}"


def _summary(value: Any) -> dict[str, Any]:
    try:
        # The repr of a list is as long as the list: only its beginning is made.
        text = _repr.repr(value) if type(value) in _BUILTIN else repr(value)
        text = _text(text[:_PREVIEW])
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - the user's code
        text = f"repr raised {type(error).__name__}"
    return {"type": type_name(type(value)), "repr": text}
