"""Values as JSON, also those that JSON cannot hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

from dfm_async.wire.codec import type_name

__all__ = ["JsonValues"]

_PREVIEW: Final = 200
"""How much of an object without a rule is shown."""


class JsonValues:
    """Writes values as JSON.

    Dates and times are written as ISO 8601, bytes as base64, decimals and UUIDs as text, sets and tuples as lists,
    enums by their value; dataclasses, pydantic models and structs as objects; NaN and infinity as null. Arrays are
    nested lists as far as the limits allow, else a summary with their shape and type. What no rule knows is a summary
    with its type and the beginning of its ``repr``.

    Args:
        array_items: how many elements of an array are written as lists.
        record_bytes: how many bytes of JSON one value may have; of larger ones only a summary is written.
        json_depth: down to which depth values are written that need care.
    """

    def __init__(self, *, array_items: int, record_bytes: int, json_depth: int) -> None:
        self._array_items = array_items
        self._record_bytes = record_bytes
        self._json_depth = json_depth
        self._encoder = msgspec.json.Encoder(enc_hook=self._plain)

    def encode(self, value: Any) -> bytes:
        """Writes a value. Never fails: of what is too large or too deep, a summary is written."""
        data = self.encode_whole(value)
        if len(data) > self._record_bytes:
            return msgspec.json.encode({"type": type_name(type(value)), "json_bytes": len(data), "omitted": True})
        return data

    def encode_whole(self, value: Any) -> bytes:
        """Writes a value, however large it is. Never fails."""
        try:
            return self._encoder.encode(value)
        except Exception:  # noqa: BLE001 - there are many reasons, some of them in the user's classes
            return msgspec.json.encode(self._careful(value, 0))

    def _plain(self, value: Any) -> Any:
        """What stands for an object that the encoder does not know."""
        if isinstance(getattr(type(value), "model_fields", None), dict):
            return {name: getattr(value, name) for name in type(value).model_fields}
        if hasattr(value, "dtype") and hasattr(value, "tolist"):
            return self._array(value)
        if isinstance(value, range):
            return list(value[: self._array_items])
        if isinstance(value, memoryview):
            return value.tobytes()
        return _summary(value)

    def _array(self, value: Any) -> Any:
        if value.size > self._array_items:
            return {"type": type_name(type(value)), "shape": list(value.shape), "dtype": str(value.dtype)}
        return value.tolist()

    def _careful(self, value: Any, depth: int) -> Any:
        """The same rules one by one, for values with something in them that stops the encoder."""
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if depth >= self._json_depth:
            return _summary(value)
        if isinstance(value, Mapping):
            return {_key(key): self._careful(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, Set)):
            return [self._careful(item, depth + 1) for item in value]
        if isinstance(value, msgspec.Struct):
            return {name: self._careful(getattr(value, name), depth + 1) for name in value.__struct_fields__}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            return {field.name: self._careful(getattr(value, field.name, None), depth + 1) for field in fields}
        try:
            msgspec.json.encode(value)
        except Exception:  # noqa: BLE001 - the same reasons
            plain = self._plain(value)
            return plain if type(plain) is dict and "repr" in plain else self._careful(plain, depth + 1)
        return value


def _key(key: Any) -> str:
    return key.encode("utf-8", "replace").decode() if isinstance(key, str) else str(key)


def _summary(value: Any) -> dict[str, Any]:
    try:
        text = repr(value)[:_PREVIEW].encode("utf-8", "replace").decode()
    except Exception as error:  # noqa: BLE001 - the user's code
        text = f"repr raised {type(error).__name__}"
    return {"type": type_name(type(value)), "repr": text}
