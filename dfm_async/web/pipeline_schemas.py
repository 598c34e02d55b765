"""JSON schemas of the parameters and results of pipelines, from the types that their operations declare."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from dfm_async.federation.federation import Federation
from dfm_async.language.expressions import Expression, Parameter, Ref, is_json
from dfm_async.language.functions import parameter_texts, summary_text
from dfm_async.language.pipeline import Pipeline
from dfm_async.language.statements import CallStatement, CollectStatement, Statement, YieldStatement, walk_statements
from dfm_async.planning.prepare import parameter_names, parameter_types
from dfm_async.session.session import Session

Schema = dict[str, Any]
Mode = Literal["validation", "serialization"]
_Lazy = Callable[[], Schema]

_SEQUENCES: Final = (
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
    collections.abc.Iterable,
    collections.abc.AsyncIterable,
)


@dataclass(frozen=True, slots=True)
class PipelineSchema:
    """A registered pipeline: its name here, its own name, the schemas of a parameter set and of results by place."""

    name: str
    pipeline: str | None
    params: Schema
    results: dict[str, Schema]


PipelineSchemas = tuple[dict[str, PipelineSchema], dict[str, Schema]]
"""Schemas by the names of their pipelines, and the definitions that they refer to."""


async def pipeline_schemas(session: Session, pipelines: Mapping[str, Pipeline], ref_template: str) -> PipelineSchemas:
    """Return the schemas of pipelines, and the definitions that they refer to. A value without a type has ``{}``."""
    book = _SchemaBook(ref_template)
    wanted: dict[str, tuple[dict[str, list[_Lazy]], dict[str, list[_Lazy]], dict[str, Any]]] = {}
    for name, pipeline in pipelines.items():
        plan = await session.prepare(pipeline)
        types = parameter_types(plan, session.federation)
        types |= {param: [hint] for param, hint in plan.declared.items()}  # what the function declares is for users
        names = parameter_names(plan, pipeline)
        params = {param: [book.add(hint, "validation") for hint in types.get(param, ())] for param in names}
        places: dict[str, list[_Lazy]] = {}
        statements = {statement.id: statement for statement in walk_statements(pipeline.body)}
        for statement in statements.values():
            if isinstance(statement, YieldStatement):
                hint, lists = _type_of(statement.value, statements, types, session.federation)
                places.setdefault(statement.place, []).append(book.add(hint, "serialization", lists))
        wanted[name] = params, places, plan.defaults
    book.write()
    made = {
        name: PipelineSchema(
            name,
            pipelines[name].name,
            {
                "type": "object",
                **_described(summary_text(pipelines[name].description)),
                "properties": {
                    param: _joined("allOf", found)
                    | _default(param, defaults)
                    | _described(parameter_texts(pipelines[name].description).get(param, ""))
                    for param, found in params.items()
                },
                "required": [param for param in params if param not in defaults],
                "additionalProperties": False,
            },
            {place: _joined("anyOf", found) for place, found in places.items()},
        )
        for name, (params, places, defaults) in wanted.items()
    }
    return made, book.definitions


def _default(param: str, defaults: Mapping[str, Any]) -> Schema:
    """Return the default of a parameter, if it has one and JSON can hold it."""
    return {"default": defaults[param]} if param in defaults and is_json(defaults[param]) else {}


def _described(text: str) -> Schema:
    return {"description": text} if text else {}


def _joined(how: str, schemas: Iterable[_Lazy]) -> Schema:
    found: list[Schema] = []
    for schema in schemas:
        if (made := schema()) not in found:
            found.append(made)
    if how == "anyOf" and {} in found:
        return {}
    return found[0] if len(found) == 1 else {how: found} if found else {}


class _SchemaBook:
    """Makes the schemas of many types together, so that types of the same name get distinct names."""

    def __init__(self, ref_template: str) -> None:
        self._template = ref_template
        self._adapters: list[tuple[int, Mode, TypeAdapter[Any]]] = []
        self._schemas: dict[int, Schema] = {}
        self.definitions: dict[str, Schema] = {}

    def add(self, hint: Any, mode: Mode, lists: int = 0) -> _Lazy:
        """Add a type; return what gives its schema after :meth:`write`, within a number of lists."""
        number = len(self._adapters)
        try:
            adapter = TypeAdapter(hint)
            adapter.json_schema(mode=mode)
        except Exception:  # noqa: BLE001 - types are the user's, and may have no schema
            number = -1
        else:
            self._adapters.append((number, mode, adapter))

        def schema() -> Schema:
            found = self._schemas.get(number, {})
            for _ in range(lists):
                found = {"type": "array", "items": found}
            return found

        return schema

    def write(self) -> None:
        """Make the schemas of all types that were added."""
        if self._adapters:
            found, rest = TypeAdapter.json_schemas(self._adapters, ref_template=self._template)
            self._schemas = {number: schema for (number, _), schema in found.items()}
            self.definitions = rest.get("$defs", {})


def _type_of(
    value: Expression, statements: Mapping[int, Statement], params: Mapping[str, list[Any]], federation: Federation
) -> tuple[Any, int]:
    """Return the type of the values of a yield, and the number of lists around them."""
    if isinstance(value, Parameter) and not value.path and len(params.get(value.name, ())) == 1:
        return params[value.name][0], 0
    if not isinstance(value, Ref) or value.path:
        return Any, 0
    source = statements.get(value.node)
    lists = 0
    while isinstance(source, CollectStatement):
        source, lists = statements.get(source.node), lists + 1
    if not isinstance(source, CallStatement):
        return Any, lists
    operation = federation.operations.get(source.operation)
    returned = Any if operation is None else operation.signature.returns
    if typing.get_origin(returned) in _SEQUENCES:
        # Each element of a stream is a result of its own; collected, it is a list.
        return typing.get_args(returned)[0], lists + 1 if lists else 0
    return returned, lists
