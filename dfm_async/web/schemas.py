"""JSON schemas of what pipelines take and give, from the types that their operations declare."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from dfm_async.federation.federation import Federation
from dfm_async.pipeline.expressions import Expression, Parameter, Ref
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.pipeline.statements import CallStatement, CollectStatement, Statement, YieldStatement, walk_statements
from dfm_async.planner.plan import parameter_types
from dfm_async.session.session import Session

__all__ = ["PipelineSchema", "PipelineSchemas", "Schema", "pipeline_schemas"]

Schema = dict[str, Any]
Mode = Literal["validation", "serialization"]

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
    """What a registered pipeline takes and gives.

    Attributes:
        name: what it is registered as.
        pipeline: its own name.
        params: the schema of one parameter set.
        results: the schema of the values of each place.
    """

    name: str
    pipeline: str | None
    params: Schema
    results: dict[str, Schema]


PipelineSchemas = tuple[dict[str, PipelineSchema], dict[str, Schema]]
"""Schemas by the names of their pipelines, and the definitions that they refer to."""


async def pipeline_schemas(session: Session, pipelines: Mapping[str, Pipeline], ref_template: str) -> PipelineSchemas:
    """Gives the schemas of pipelines, and the definitions that they refer to. What has no type is ``{}``."""
    book = _SchemaBook(ref_template)
    wanted: dict[str, tuple[Pipeline, dict[str, list[int]], dict[str, list[_Shape]]]] = {}
    for name, pipeline in pipelines.items():
        plan = await session.prepare(pipeline)
        params = parameter_types(plan, session.federation)
        shapes = _result_shapes(pipeline, params, session.federation)
        wanted[name] = (
            pipeline,
            {param: [book.add(hint, "validation") for hint in params.get(param, ())] for param in plan.params},
            {place: [shape.noted(book) for shape in found] for place, found in shapes.items()},
        )
    book.write()
    made = {
        name: PipelineSchema(
            name,
            pipeline.name,
            {
                "type": "object",
                "properties": {param: _joined("allOf", map(book.get, found)) for param, found in params.items()},
                "required": list(params),
                "additionalProperties": False,
            },
            {place: _joined("anyOf", [shape.schema(book) for shape in found]) for place, found in places.items()},
        )
        for name, (pipeline, params, places) in wanted.items()
    }
    return made, book.definitions


def _joined(how: str, schemas: collections.abc.Iterable[Schema]) -> Schema:
    found: list[Schema] = []
    for schema in schemas:
        if schema not in found:
            found.append(schema)
    if how == "anyOf" and {} in found:
        return {}
    return found[0] if len(found) == 1 else {how: found} if found else {}


class _SchemaBook:
    """Makes the schemas of many types together, so that types of the same name get names of their own."""

    def __init__(self, ref_template: str) -> None:
        self._template = ref_template
        self._adapters: list[tuple[int, Mode, TypeAdapter[Any]]] = []
        self._schemas: dict[int, Schema] = {}
        self.definitions: dict[str, Schema] = {}

    def add(self, hint: Any, mode: Mode) -> int:
        """Notes a type, and gives its number; -1 for one that has no schema."""
        try:
            adapter = TypeAdapter(hint)
            adapter.json_schema(mode=mode)
        except Exception:  # noqa: BLE001 - types are the user's: one without a schema says nothing
            return -1
        self._adapters.append((len(self._adapters), mode, adapter))
        return len(self._adapters) - 1

    def write(self) -> None:
        """Makes the schemas of all types that were noted."""
        if self._adapters:
            found, rest = TypeAdapter.json_schemas(self._adapters, ref_template=self._template)
            self._schemas = {number: schema for (number, _), schema in found.items()}
            self.definitions = rest.get("$defs", {})

    def get(self, number: int) -> Schema:
        """Gives the schema of a type that was noted."""
        return self._schemas.get(number, {})


@dataclass(slots=True)
class _Shape:
    """What is known of the values of a yield: their type, and in how many lists they are."""

    hint: Any
    lists: int = 0
    number: int = -1

    def noted(self, book: _SchemaBook) -> _Shape:
        self.number = -1 if self.hint is Any else book.add(self.hint, "serialization")
        return self

    def schema(self, book: _SchemaBook) -> Schema:
        schema = book.get(self.number)
        for _ in range(self.lists):
            schema = {"type": "array", "items": schema}
        return schema


def _result_shapes(
    pipeline: Pipeline, params: Mapping[str, list[Any]], federation: Federation
) -> dict[str, list[_Shape]]:
    statements = {statement.id: statement for statement in walk_statements(pipeline.body)}
    shapes: dict[str, list[_Shape]] = {}
    for statement in statements.values():
        if isinstance(statement, YieldStatement):
            shape = _shape(statement.value, statements, params, federation)
            shapes.setdefault(statement.place, []).append(shape)
    return shapes


def _shape(
    value: Expression, statements: Mapping[int, Statement], params: Mapping[str, list[Any]], federation: Federation
) -> _Shape:
    if isinstance(value, Parameter) and not value.path and len(params.get(value.name, ())) == 1:
        return _Shape(params[value.name][0])
    if not isinstance(value, Ref) or value.path:
        return _Shape(Any)
    source = statements.get(value.node)
    lists = 0
    while isinstance(source, CollectStatement):
        source, lists = statements.get(source.node), lists + 1
    if not isinstance(source, CallStatement):
        return _Shape(Any, lists)
    operation = federation.operations.get(source.operation)
    returned = Any if operation is None else operation.signature.returns
    if typing.get_origin(returned) in _SEQUENCES:
        # Each element of a stream is a result of its own; collected, it is a list.
        return _Shape(typing.get_args(returned)[0], lists + 1 if lists else 0)
    return _Shape(returned, lists)
