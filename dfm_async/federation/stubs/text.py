"""Python source of what a federation file says: types, defaults, docstrings. Nothing in it can end where it stands."""

from __future__ import annotations

import datetime
import math
import typing
import uuid
from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, Literal, Union

__all__ = ["Types", "default", "docstring"]

_PLAIN: Final = frozenset({str, int, float, bool, bytes, list, dict, object})
_QUALIFIED: Final = frozenset({datetime.datetime, datetime.date, datetime.time, uuid.UUID})


def docstring(text: str, indent: str) -> list[str]:
    """The lines of a docstring, with whatever stands in the text."""
    escaped = "".join(_character(character) for character in text.strip())
    if not escaped:
        return []
    first, *rest = escaped.split("\n")
    lines = [f'{indent}"""{first}', *(f"{indent}{line}".rstrip() for line in rest)]
    if not rest:
        return [f'{lines[0]}"""']
    return [*lines, f'{indent}"""']


def default(value: Any) -> str:
    """A default value, as JSON has them. YAML has infinite numbers besides, whose repr is no source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'builtins.float("{value}")'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {default(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(default, value))}]"
    return repr(value)


def _character(character: str) -> str:
    if character in '\\"':
        return f"\\{character}"
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()


class Types:
    """Writes types as source.

    Args:
        models: the classes that the module has for schemas, by the names of the schemas; with their source.
        taken: names that mean something else in the module, such as an operation that is called ``list``.
    """

    def __init__(self, models: Mapping[str, str], taken: frozenset[str] = frozenset()) -> None:
        self._models = models
        self._builtins = {
            kind: f"builtins.{kind.__name__}" if kind.__name__ in taken else kind.__name__ for kind in _PLAIN
        }

    def parameter(self, hint: Any) -> str:
        """The type of what may be passed: any sequence for a list, any mapping for an object."""
        return self._source(hint, "Sequence", "Mapping")

    def value(self, hint: Any) -> str:
        """The type of what comes out."""
        return self._source(hint, self._builtins[list], self._builtins[dict])

    def _source(self, hint: Any, sequence: str, mapping: str) -> str:
        if hint is None or hint is type(None):
            return "None"
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self._annotated(args, sequence, mapping)
        if origin in (Union, UnionType):
            parts = dict.fromkeys(self._source(part, sequence, mapping) for part in args)
            return "Any" if "Any" in parts else " | ".join(parts)
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, args))}]"
        if origin is list and args:
            return f"{sequence}[{self._source(args[0], sequence, mapping)}]"
        if origin is dict and args:
            return f"{mapping}[{self._builtins[str]}, {self._source(args[1], sequence, mapping)}]"
        if isinstance(hint, type):
            return self._class(hint, sequence, mapping)
        return "Any"

    def _class(self, kind: type, sequence: str, mapping: str) -> str:
        schema = getattr(kind, "__dfm_schema__", None)
        if isinstance(schema, str):
            return self._models.get(schema) or self._source(dict, sequence, mapping)
        if kind is list:
            return f"{sequence}[Any]"
        if kind is dict:
            return f"{mapping}[{self._builtins[str]}, Any]"
        if kind in _QUALIFIED:
            return f"{kind.__module__}.{kind.__name__}"
        return self._builtins.get(kind, "Any")

    def _annotated(self, args: tuple[Any, ...], sequence: str, mapping: str) -> str:
        """A type with limits, which editors do not need; or an object of a schema."""
        inner, *about = args
        names = [self._models[text] for part in about if (text := repr(part)) in self._models]
        return " | ".join([self._source(inner, sequence, mapping), *names])
