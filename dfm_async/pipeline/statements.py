"""Statements: what a pipeline consists of. Plain data, made by the builder or read from JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from dfm_async.model.policies import RetryPolicy
from dfm_async.pipeline.expressions import Expression

__all__ = [
    "BestOf",
    "CacheStatement",
    "CallStatement",
    "CollectStatement",
    "ForEachStatement",
    "IfStatement",
    "RepeatStatement",
    "Statement",
    "YieldStatement",
    "blocks",
    "walk_statements",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, arbitrary_types_allowed=True)


class BestOf(_Model):
    """Lets the planner choose among some sites, or among all that offer the operation."""

    sites: tuple[str, ...] | None = None

    def __init__(self, sites: Any = None, /, **data: Any) -> None:
        if sites is not None:
            data["sites"] = tuple(getattr(site, "name", site) for site in sites)
        super().__init__(**data)


def _retry(value: Any) -> RetryPolicy | None:
    if value is None or isinstance(value, RetryPolicy):
        return value
    if isinstance(value, dict):
        try:
            return RetryPolicy(**{**value, "on": tuple(value.get("on", ()))})
        except TypeError as error:
            raise ValueError(f"this is not a retry policy: {error}") from error
    raise ValueError(f"a RetryPolicy is needed, not {value!r}")


def _retry_to_data(value: RetryPolicy | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        "attempts": value.attempts,
        "backoff": value.backoff,
        "max_backoff": value.max_backoff,
        "on": value.on,
    }


Retry = Annotated[RetryPolicy | None, PlainValidator(_retry), PlainSerializer(_retry_to_data)]


class CallStatement(_Model):
    """A call of an operation."""

    kind: Literal["call"] = "call"
    id: int
    operation: str
    args: dict[str, Expression] = {}
    site: str | BestOf | None = None
    provider: str | None = None
    after: tuple[int, ...] = ()
    retry: Retry = None
    deadline: float | None = None


class YieldStatement(_Model):
    """Sends a value to the application."""

    kind: Literal["yield"] = "yield"
    id: int
    value: Expression
    place: str = "yield"
    multiuse: bool = False
    after: tuple[int, ...] = ()


class ForEachStatement(_Model):
    """Runs its body once per element of a sequence."""

    kind: Literal["for_each"] = "for_each"
    id: int
    seq: Expression
    concurrency: Annotated[int, Field(gt=0)] | None = None
    body: tuple[Statement, ...] = ()


class RepeatStatement(_Model):
    """Runs its body one iteration after the other, passing a value on."""

    kind: Literal["repeat"] = "repeat"
    id: int
    carry: Expression
    times: Expression | None = None
    until: Expression | None = None
    next: Expression | None = None
    body: tuple[Statement, ...] = ()


class IfStatement(_Model):
    """Runs one of two bodies."""

    kind: Literal["if"] = "if"
    id: int
    cond: Expression
    body: tuple[Statement, ...] = ()
    otherwise: tuple[Statement, ...] = ()


class CacheStatement(_Model):
    """Takes a value from a site's cache, or runs its body to get it."""

    kind: Literal["try_from_cache"] = "try_from_cache"
    id: int
    key: Expression
    store: Expression | None = None
    site: str | None = None
    body: tuple[Statement, ...] = ()


class CollectStatement(_Model):
    """The list of a loop's values, in element order."""

    kind: Literal["collect"] = "collect"
    id: int
    node: int


Statement: TypeAlias = Annotated[
    CallStatement
    | YieldStatement
    | ForEachStatement
    | RepeatStatement
    | IfStatement
    | CacheStatement
    | CollectStatement,
    Field(discriminator="kind"),
]


def blocks(statement: Statement) -> tuple[tuple[Statement, ...], ...]:
    """Tells the bodies of a statement; a statement without any has none."""
    if isinstance(statement, IfStatement):
        return (statement.body, statement.otherwise)
    if isinstance(statement, (ForEachStatement, RepeatStatement, CacheStatement)):
        return (statement.body,)
    return ()


def walk_statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Goes through all statements, an outer one before those inside it, in the order of the text."""
    stack = list(reversed(body))
    while stack:
        statement = stack.pop()
        yield statement
        for block in reversed(blocks(statement)):
            stack.extend(reversed(block))
