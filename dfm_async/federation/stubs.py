"""Writes the typed module of a federation."""

from __future__ import annotations

import datetime
import inspect
import keyword
import math
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Union

from dfm_async.federation.operation import RESERVED

if TYPE_CHECKING:
    from dfm_async.federation.bindings import ExposedParameter
    from dfm_async.federation.federation import Federation
    from dfm_async.federation.operation import Operation
    from dfm_async.federation.site import Site

_PLAIN: Final = frozenset({str, int, float, bool, bytes, list, dict, object})
_QUALIFIED: Final = frozenset({datetime.datetime, datetime.date, datetime.time, uuid.UUID})


def _docstring(text: str, indent: str) -> list[str]:
    """Return the lines of a docstring, with any text."""
    escaped = "".join(_character(character) for character in text.strip())
    if not escaped:
        return []
    first, *rest = escaped.split("\n")
    lines = [f'{indent}"""{first}', *(f"{indent}{line}".rstrip() for line in rest)]
    if not rest:
        return [f'{lines[0]}"""']
    return [*lines, f'{indent}"""']


def _default(value: Any) -> str:
    """Return a default value, as JSON has them. YAML also has infinite numbers, whose repr is not source code."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'builtins.float("{value}")'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_default(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_default, value))}]"
    return repr(value)


def _character(character: str) -> str:
    if character in '\\"':
        return f"\\{character}"
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()


class _TypeWriter:
    """Writes types as source.

    ``models`` has the source of the classes for schemas; ``taken`` the names that mean something else in the module.
    Where something is ``passed``, a list may be any sequence, and an object any mapping.
    """

    def __init__(self, models: Mapping[str, str], taken: frozenset[str], *, passed: bool) -> None:
        self._models = models
        self._builtins = {
            kind: f"builtins.{kind.__name__}" if kind.__name__ in taken else kind.__name__ for kind in _PLAIN
        }
        self._sequence = "Sequence" if passed else self._builtins[list]
        self._mapping = "Mapping" if passed else self._builtins[dict]

    def source(self, hint: Any) -> str:
        if hint is None or hint is type(None):
            return "None"
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:  # a type with limits, which editors do not need; or an object of a schema
            names = [self._models[text] for part in args[1:] if (text := repr(part)) in self._models]
            return " | ".join([self.source(args[0]), *names])
        if origin in (Union, UnionType):
            parts = dict.fromkeys(map(self.source, args))
            return "Any" if "Any" in parts else " | ".join(parts)
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, args))}]"
        if origin is list and args:
            return f"{self._sequence}[{self.source(args[0])}]"
        if origin is dict and args:
            return f"{self._mapping}[{self._builtins[str]}, {self.source(args[1])}]"
        return self._class(hint) if isinstance(hint, type) else "Any"

    def _class(self, kind: type) -> str:
        schema = getattr(kind, "__dfm_schema__", None)
        if isinstance(schema, str):
            return self._models.get(schema) or self._class(dict)
        if kind is list:
            return f"{self._sequence}[Any]"
        if kind is dict:
            return f"{self._mapping}[{self._builtins[str]}, Any]"
        if kind in _QUALIFIED:
            return f"{kind.__module__}.{kind.__name__}"
        return self._builtins.get(kind, "Any")


T = TypeVar("T")

_STEP: Final = "    "
_HEAD: Final = """\
# ruff: noqa
# fmt: off
from __future__ import annotations

import builtins
import datetime
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack

from dfm_async import Federation
"""
_TYPING: Final = """\
if TYPE_CHECKING:
    from pydantic import BaseModel

    from dfm_async import Advise, BestOf, RetryPolicy, Site

    class _Call(TypedDict, total=False):
        provider: str | None
        after: Any
        retry: RetryPolicy | None
        deadline: float | None
        fallback: Any
"""
_RUN_TIME: Final = """\
else:
    operations = federation.operations
    schemas = federation.schemas
    sites = SimpleNamespace(**{name: site.operations for name, site in federation.sites.items()})
"""


def stubs(federation: Federation, file: PurePath, *, compat: bool = False) -> str:
    """Write a module with the operations, schemas and sites of a federation, typed.

    Importing the module reads the federation's file (``file``, relative to the module, with ``compat``); its names are
    then the same objects as those of the federation.
    """
    title = (
        f"Operations of federation {federation.name!r} {federation.api_version}, for editors and type checkers.\n\n"
        "Written by dfm-async stubs: do not edit."
    )
    options = ", compat=True" if compat else ""
    load = f"federation = Federation.from_yaml(Path(__file__).parent / {file.as_posix()!r}{options})\n"
    return "\n".join([*_docstring(title, ""), _HEAD, load, _TYPING, *_Module(federation).lines(), "", _RUN_TIME])


class _Module:
    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._schemas = _usable(federation.models)
        self._operations = _usable(federation.operations)
        models = {name: model for name, model in self._schemas.items() if _is_model(model)}
        names = [
            *self._schemas,
            *self._operations,
            *(field for model in models.values() for field in model.model_fields),
        ]
        taken = frozenset(part for name in names for part in name.split("."))
        sources = {name: f"schemas.{name}" for name in models}
        self._passed = _TypeWriter(sources, taken, passed=True)
        self._values = _TypeWriter(sources, taken, passed=False)

    def lines(self) -> Iterator[str]:
        """Yield the classes for the operations, the schemas and the sites."""
        yield from _group("schemas", self._schemas, self._schema, _STEP)
        yield ""
        yield from _group("operations", self._operations, self._operation, _STEP)
        yield ""
        yield from _group("sites", _usable(self._federation.sites), self._site, _STEP)

    def _schema(self, name: str, model: Any, indent: str) -> Iterator[str]:
        short = name.rpartition(".")[2]
        if not _is_model(model):
            yield f"{indent}{short}: TypeAlias = {self._values.source(model)!r}"
            return
        yield f"{indent}class {short}(BaseModel):"
        inner = indent + _STEP
        about = _docstring(model.__doc__ or "", inner)
        fields = []
        for field, info in model.model_fields.items():
            given = "" if info.is_required() else f" = {_default(info.default)}"
            fields.append(f"{inner}{field}: {self._values.source(info.annotation)}{given}")
        yield from [*about, *fields] or [f"{inner}pass"]

    def _operation(self, name: str, operation: Operation[..., Any], indent: str) -> Iterator[str]:
        sites = [site.name for site in self._federation.sites.values() if any(n == name for n, _ in site.adapters)]
        where = " | ".join([*_literal(sites), "BestOf", "Site", "Advise", "None"])
        yield from self._function(name, operation, {}, operation.__doc__, f"site: {where} = None", indent)

    def _site(self, _name: str, site: Site, indent: str) -> Iterator[str]:
        def placed(name: str, found: Any, inner: str) -> Iterator[str]:
            yield from self._function(name, found.operation, found.added, found.__doc__, None, inner)

        yield from _group(site.name, _usable(site.operations), placed, indent)

    def _function(
        self,
        name: str,
        operation: Operation[..., Any],
        added: Mapping[str, ExposedParameter],
        about: str | None,
        site: str | None,
        indent: str,
    ) -> Iterator[str]:
        signature = operation.signature
        parameters = signature.with_added(added).parameters.values()
        parts: list[str] = []
        named = False
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY and not named:
                parts.append("*")
                named = True
            hint = signature.types.get(parameter.name, parameter.annotation)
            parts.append(self._parameter(parameter, Any if hint is inspect.Parameter.empty else hint))
        own = {parameter.name for parameter in parameters}
        if site is not None:
            parts += [site] if named else ["*", site]
        if not RESERVED & own:  # a name cannot be there twice
            parts.append("**_call: Unpack[_Call]")
        yield f"{indent}@staticmethod"
        yield f"{indent}def {name.rpartition('.')[2]}("
        yield from (f"{indent}{_STEP}{part}," for part in parts)
        yield f"{indent}) -> {self._values.source(signature.returns)}:"
        yield from _docstring(about or "", indent + _STEP) or [f"{indent}{_STEP}..."]

    def _parameter(self, parameter: inspect.Parameter, hint: Any) -> str:
        source = self._passed.source(hint)
        source = source if source == "Any" else f"{source} | Advise"
        given = "" if parameter.default is inspect.Parameter.empty else f" = {_default(parameter.default)}"
        return f"{parameter.name}: {source}{given}"


def _group(
    name: str, items: Mapping[str, Any], write: Callable[[str, Any, str], Iterator[str]], indent: str, prefix: str = ""
) -> Iterator[str]:
    """Yield a class that holds everything under a name: functions, classes, and groups of them."""
    yield f"{indent}class {name}:"
    inner = indent + _STEP
    groups: dict[str, None] = {}
    empty = True
    for full in items:
        rest = full.removeprefix(prefix)
        if full.startswith(prefix) and "." not in rest:
            yield from write(full, items[full], inner)
            empty = False
        elif full.startswith(prefix):
            groups[rest.partition(".")[0]] = None
    for group in groups:
        yield from _group(group, items, write, inner, f"{prefix}{group}.")
        empty = False
    if empty:
        yield f"{inner}pass"


def _usable(items: Mapping[str, T]) -> dict[str, T]:
    """Return what Python can name: no part of a name is a keyword, and no name is the prefix of another one."""
    found: dict[str, T] = {}
    for name, item in items.items():
        parts = name.split(".")
        inside = any(".".join(parts[:count]) in items for count in range(1, len(parts)))
        if not inside and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            found[name] = item
    return found


def _is_model(model: Any) -> bool:
    return isinstance(model, type) and hasattr(model, "model_fields")


def _literal(values: list[str]) -> list[str]:
    return [f"Literal[{', '.join(map(repr, values))}]"] if values else []
