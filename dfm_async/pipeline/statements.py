"""Statements: what a pipeline consists of. Plain data, made by the builder or read from JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

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


class _Data(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class BestOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lets the planner choose among some sites, or among all that offer the operation.

    Attributes:
        sites: sites or their names; None means all.
    """

    sites: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.sites is not None:
            names = tuple(getattr(site, "name", site) for site in self.sites)
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"BestOf takes sites or their names, not {self.sites!r}")
            msgspec.structs.force_setattr(self, "sites", names)


class CallStatement(_Data, frozen=True, kw_only=True, tag="call"):
    """A call of an operation."""

    id: int
    operation: str
    args: dict[str, Expression] = msgspec.field(default_factory=dict)
    site: str | BestOf | None = None
    provider: str | None = None
    after: tuple[int, ...] = ()
    retry: RetryPolicy | None = None
    deadline: float | None = None


class YieldStatement(_Data, frozen=True, kw_only=True, tag="yield"):
    """Sends a value to the application."""

    id: int
    value: Expression
    place: str = "yield"
    multiuse: bool = False
    after: tuple[int, ...] = ()


class ForEachStatement(_Data, frozen=True, kw_only=True, tag="for_each"):
    """Runs its body once per element of a sequence."""

    id: int
    seq: Expression
    concurrency: Annotated[int, msgspec.Meta(gt=0)] | None = None
    body: tuple[Statement, ...] = ()


class RepeatStatement(_Data, frozen=True, kw_only=True, tag="repeat"):
    """Runs its body one iteration after the other, passing a value on."""

    id: int
    carry: Expression
    times: Expression | None = None
    until: Expression | None = None
    next: Expression | None = None
    body: tuple[Statement, ...] = ()


class IfStatement(_Data, frozen=True, kw_only=True, tag="if"):
    """Runs one of two bodies."""

    id: int
    cond: Expression
    body: tuple[Statement, ...] = ()
    otherwise: tuple[Statement, ...] = ()


class CacheStatement(_Data, frozen=True, kw_only=True, tag="try_from_cache"):
    """Takes a value from a site's cache, or runs its body to get it."""

    id: int
    key: Expression
    store: Expression | None = None
    site: str | None = None
    body: tuple[Statement, ...] = ()


class CollectStatement(_Data, frozen=True, kw_only=True, tag="collect"):
    """The list of a loop's values, in element order."""

    id: int
    node: int


Statement: TypeAlias = (
    CallStatement
    | YieldStatement
    | ForEachStatement
    | RepeatStatement
    | IfStatement
    | CacheStatement
    | CollectStatement
)


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
