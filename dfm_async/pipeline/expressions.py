"""Expressions: how a statement says which value it means.

They are plain data. Users never write them: the builder makes them from ordinary Python expressions over nodes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dfm_async.errors import EncodingError
from dfm_async.wire.codec import Codec

__all__ = [
    "Attribute",
    "Combination",
    "Comparison",
    "Constant",
    "Entries",
    "Expression",
    "Item",
    "Items",
    "Negation",
    "Parameter",
    "Ref",
    "references",
    "walk",
]

_codec = Codec(trusted=False)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def _is_json(value: Any) -> bool:
    """Tells whether JSON gives this value back as it is."""
    kind = type(value)
    if kind in (type(None), bool, str, int):
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(_is_json, value))
    if kind is dict:
        return all(type(k) is str and _is_json(v) for k, v in value.items())
    return False


class Constant(_Model):
    """A literal value. In JSON, what JSON cannot hold is encoded as text."""

    kind: Literal["constant"] = "constant"
    value: Any = None

    @model_serializer(mode="wrap")
    def _to_json(self, plain: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        if info.mode != "json" or _is_json(self.value):
            return {"kind": self.kind, "value": self.value}
        return {"kind": self.kind, "encoded": base64.b64encode(_codec.encode(self.value)).decode()}

    @model_validator(mode="before")
    @classmethod
    def _from_json(cls, data: Any) -> Any:
        if isinstance(data, dict) and "encoded" in data and "value" not in data:
            rest = {name: item for name, item in data.items() if name != "encoded"}
            try:
                value = _codec.loads(base64.b64decode(data["encoded"], validate=True))
            except (EncodingError, TypeError, ValueError) as error:
                raise ValueError(f"the encoded constant cannot be read: {error}") from error
            return {**rest, "value": value}
        return data


class Item(_Model):
    """``value[key]``."""

    kind: Literal["item"] = "item"
    key: int | str | bool | float | None


class Attribute(_Model):
    """``value.name``."""

    kind: Literal["attribute"] = "attribute"
    name: str


Step: TypeAlias = Annotated[Item | Attribute, Field(discriminator="kind")]


class Ref(_Model):
    """The value of another statement, or a field of it."""

    kind: Literal["ref"] = "ref"
    node: int
    path: tuple[Step, ...] = ()


class Parameter(_Model):
    """A value that is given per parameter set at execution, or a field of it."""

    kind: Literal["parameter"] = "parameter"
    name: str
    multiuse: bool = False
    path: tuple[Step, ...] = ()


class Items(_Model):
    """A list, tuple or set whose items are expressions."""

    kind: Literal["items"] = "items"
    type: Literal["list", "tuple", "set"]
    items: tuple[Expression, ...]


class Entries(_Model):
    """A dict whose values are expressions."""

    kind: Literal["entries"] = "entries"
    entries: tuple[tuple[Expression, Expression], ...]


class Comparison(_Model):
    """``left op right``."""

    kind: Literal["comparison"] = "comparison"
    op: Literal["==", "!=", "<", "<=", ">", ">="]
    left: Expression
    right: Expression


class Combination(_Model):
    """``a and b and ...`` or ``a or b or ...``."""

    kind: Literal["combination"] = "combination"
    op: Literal["and", "or"]
    terms: tuple[Expression, ...]


class Negation(_Model):
    """``not term``."""

    kind: Literal["negation"] = "negation"
    term: Expression


Expression: TypeAlias = Annotated[
    Constant | Ref | Parameter | Items | Entries | Comparison | Combination | Negation,
    Field(discriminator="kind"),
]


def walk(expression: Expression) -> Iterator[Expression]:
    """Goes through an expression and all its parts, from the outside in, left to right."""
    stack: list[Expression] = [expression]
    while stack:
        found = stack.pop()
        yield found
        if isinstance(found, Items):
            stack.extend(reversed(found.items))
        elif isinstance(found, Entries):
            for key, value in reversed(found.entries):
                stack += (value, key)
        elif isinstance(found, Comparison):
            stack += (found.right, found.left)
        elif isinstance(found, Combination):
            stack.extend(reversed(found.terms))
        elif isinstance(found, Negation):
            stack.append(found.term)


def references(expression: Expression) -> Iterator[Ref | Parameter]:
    """Finds the nodes and parameters that an expression reads."""
    if isinstance(expression, (Ref, Parameter)):
        yield expression
    elif not isinstance(expression, Constant):
        for part in walk(expression):
            if isinstance(part, (Ref, Parameter)):
                yield part
