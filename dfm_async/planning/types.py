"""Whether declared types fit together: arguments, edges, parameters."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dfm_async.base.text import shortened
from dfm_async.federation.schemas import Models, type_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_GENERATORS = (
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
    collections.abc.Iterable,
    collections.abc.AsyncIterable,
)
_PLAIN = (bool, int, float, str, bytes)
_NUMBERS = {bool: 0, int: 1, float: 2, complex: 3}


def type_text(hint: Any) -> str:
    """Return a type as text."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def redefinition(source: Any, wanted: Any) -> str:
    """Return a hint for two types that name different classes with the same name; empty for others."""
    named = {(cls.__module__, cls.__qualname__): cls for cls in _classes(wanted)}
    for cls in _classes(source):
        if named.get((cls.__module__, cls.__qualname__), cls) is not cls:
            again = f"class {cls.__qualname__!r} was defined again after the operation or pipeline that declares it"
            return f" ({again}: run the cell of the operation or pipeline again)"
    return ""


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes that a type names."""
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


@lru_cache(maxsize=4096)
def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    # Imported here: a third of the time to the first result would go into it, also where no type is declared.
    from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        try:
            return TypeAdapter(hint)
        except PydanticSchemaGenerationError:
            return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, TypeError, NameError):
        return None  # a type that pydantic cannot check declares nothing for us


def validate(hint: Any, value: Any, *, convert: bool = True) -> tuple[Any, str | None]:
    """Check a value against a declared type. Gives the value as that type has it, and what is wrong or None.

    Without ``convert``, text and numbers that would have to become something else are wrong.
    """
    if hint is Any:
        return value, None
    if type(value) is hint and hint in _PLAIN and (hint is not str or value.isascii()):  # without loading pydantic
        return value, None
    try:
        adapter = _adapter(hint)
    except TypeError:  # unhashable annotation
        return value, None
    if adapter is None:
        return value, None
    try:
        found = adapter.validate_python(value)
        if type(found).__name__ == "ValidatorIterator":  # how pydantic checks an Iterable: one by one, later
            found = list(found)
    except _validation_error() as error:
        first = error.errors()[0]  # type: ignore[attr-defined]
        where = "".join(f"[{part!r}]" for part in first["loc"])
        again = redefinition(type(first["input"]), hint)
        return value, f"{where}{': ' if where else ''}{first['msg']}, not {shortened(value)}{again}"
    except Exception as error:  # noqa: BLE001 - validators are the user's code
        return value, f"{type(error).__name__}: {error}"
    if not convert and isinstance(value, (str, bytes, int, float)) and found != value:
        return value, f"expected {type_text(hint)}, not {shortened(value)}"
    return found, None


def is_plain(hint: Any) -> bool:
    """Return whether values that already have this type need no further check."""
    return any(hint is plain for plain in _PLAIN)


def warm() -> None:
    """Load what checking types needs, before it is needed."""
    _validation_error()


def _validation_error() -> type[Exception]:
    from pydantic import ValidationError

    return ValidationError


def type_of_event(schema: Mapping[str, Any]) -> Any:
    """Return the type of the value of an event."""
    return type_of(schema, Models({}))


@lru_cache(maxsize=4096)
def _fits(source: Any, wanted: Any) -> bool:
    if source is Any or wanted is Any or source == wanted or wanted is object:
        return True
    if isinstance(source, (typing.TypeVar, str)) or isinstance(wanted, (typing.TypeVar, str)):
        return True
    for hint in (source, wanted):
        if typing.get_origin(hint) is typing.Annotated:
            return _fits(*(typing.get_args(h)[0] if h is hint else h for h in (source, wanted)))
    if typing.get_origin(source) in (typing.Union, types.UnionType):
        return any(_fits(part, wanted) for part in typing.get_args(source))
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return any(_fits(source, part) for part in typing.get_args(wanted))
    a = typing.get_origin(source) or source
    b = typing.get_origin(wanted) or wanted
    a, b = (type(None) if x is None else x for x in (a, b))
    if not isinstance(a, type) or not isinstance(b, type):
        return True  # literals, callables and the like: unknown before it runs
    if a in _NUMBERS and b in _NUMBERS:
        return _NUMBERS[a] <= _NUMBERS[b]
    if getattr(b, "_is_protocol", False):
        return True
    if issubclass(a, b) or issubclass(b, a):
        return True
    return a in _GENERATORS or b in _GENERATORS


def fits(source: Any, wanted: Any) -> bool:
    """Return whether a value of one declared type can be passed where another is declared.

    Return False only when it is certain: a subclass relation in either direction, a union with a common part, or a type
    that cannot be compared, all fit.
    """
    try:
        return _fits(source, wanted)
    except TypeError:  # unhashable annotation
        return True
