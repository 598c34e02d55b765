"""Expressions: the values that statements work with.

They are plain data. Users never write them: the builder makes them from ordinary Python expressions over nodes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from dfm_async.errors import EncodingError, PlaceholderError, Problem
from dfm_async.wire.codec import Codec

DEEPEST: Final = 100
"""How deep an expression may be nested."""

_codec = Codec.for_untrusted()


class _ExpressionData(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    pass


def is_json(value: Any) -> bool:
    """Return whether JSON gives this value back as it is."""
    kind = type(value)
    if kind in (type(None), bool, str, int):
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(is_json, value))
    if kind is dict:
        return all(type(k) is str and is_json(v) for k, v in value.items())
    return False


class Constant(_ExpressionData, frozen=True, kw_only=True, tag="constant"):
    """A literal value. In JSON, what JSON cannot hold is ``encoded`` as text; it is decoded at once."""

    value: Any = None
    encoded: str | None = None

    def __post_init__(self) -> None:
        if self.encoded is not None:
            try:
                value = _codec.loads(base64.b64decode(self.encoded, validate=True))
            except (EncodingError, TypeError, ValueError) as error:
                raise ValueError(f"the encoded constant cannot be read: {error}") from error
            msgspec.structs.force_setattr(self, "value", value)
            msgspec.structs.force_setattr(self, "encoded", None)


def constant_data(constant: Constant) -> dict[str, Any]:
    """Return what JSON holds of a constant; EncodingError for an object that only pickle could hold."""
    if is_json(constant.value):
        return {"kind": "constant", "value": constant.value}
    return {"kind": "constant", "encoded": base64.b64encode(_codec.encode(constant.value)).decode()}


class Advise(_ExpressionData, frozen=True, kw_only=True, tag="advise"):
    """Request the valid values of a parameter from the sites, in a pipeline with ``mode="discovery"``."""

    def __str__(self) -> str:
        raise PlaceholderError(None, [Problem("Advise()", "cannot be formatted as text: it asks for a whole value")])

    def __format__(self, spec: str) -> str:
        return str(self)


class Item(_ExpressionData, frozen=True, kw_only=True, tag="item"):
    """``value[key]``."""

    key: int | str | bool | float | None


class Attribute(_ExpressionData, frozen=True, kw_only=True, tag="attribute"):
    """``value.name``."""

    name: str


Step: TypeAlias = Item | Attribute


class Ref(_ExpressionData, frozen=True, kw_only=True, tag="ref"):
    """The value of another statement, or a field of it."""

    node: int
    path: tuple[Step, ...] = ()


class Parameter(_ExpressionData, frozen=True, kw_only=True, tag="parameter"):
    """A value that is given per parameter set at execution, or a field of it.

    ``default`` is the value for parameter sets that lack it; None if every set must have one. ``multiuse`` has no
    effect: only DFM needs it.
    """

    name: str
    multiuse: bool = False
    path: tuple[Step, ...] = ()
    default: Constant | None = None


class Items(_ExpressionData, frozen=True, kw_only=True, tag="items"):
    """A list, tuple or set whose items are expressions."""

    type: Literal["list", "tuple", "set"]
    items: tuple[Expression, ...]


class Entries(_ExpressionData, frozen=True, kw_only=True, tag="entries"):
    """A dict whose values are expressions."""

    entries: tuple[tuple[Expression, Expression], ...]


class Comparison(_ExpressionData, frozen=True, kw_only=True, tag="comparison"):
    """``left op right``."""

    op: Literal["==", "!=", "<", "<=", ">", ">="]
    left: Expression
    right: Expression


class Combination(_ExpressionData, frozen=True, kw_only=True, tag="combination"):
    """``a and b and ...`` or ``a or b or ...``."""

    op: Literal["and", "or"]
    terms: tuple[Expression, ...]


class Negation(_ExpressionData, frozen=True, kw_only=True, tag="negation"):
    """``not term``."""

    term: Expression


Expression: TypeAlias = Constant | Advise | Ref | Parameter | Items | Entries | Comparison | Combination | Negation


def _parts(found: Expression) -> Sequence[Expression]:
    """Return the parts of an expression, from left to right."""
    match found:
        case Items():
            return found.items
        case Entries():
            return [part for entry in found.entries for part in entry]
        case Comparison():
            return (found.left, found.right)
        case Combination():
            return found.terms
        case Negation():
            return (found.term,)
        case _:
            return ()


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all its parts, from the outside in, left to right."""
    stack: list[Expression] = [expression]
    while stack:
        found = stack.pop()
        yield found
        stack.extend(reversed(_parts(found)))


def is_deep(expression: Expression) -> bool:
    """Return whether an expression is nested deeper than it may be."""
    level = [expression]
    for _ in range(DEEPEST):
        level = [part for found in level for part in _parts(found)]
        if not level:
            return False
    return True


def references(expression: Expression) -> Iterator[Ref | Parameter]:
    """Find the nodes and parameters that an expression reads."""
    if isinstance(expression, (Ref, Parameter)):
        yield expression
    elif not isinstance(expression, (Constant, Advise)):
        for part in walk(expression):
            if isinstance(part, (Ref, Parameter)):
                yield part
