"""Statements: what a pipeline consists of. Plain data, made by the builder or read from JSON.

Each statement states the facts that all its users need: its label, its blocks, its expressions. What differs from user
to user (text, nets, costs, other formats) is a :class:`StatementVisitor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from dfm_async.language.expressions import Constant, Expression, Ref, Step
from dfm_async.model.policies import RetryPolicy

Context = TypeVar("Context")
Result = TypeVar("Result")


class BestOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let the planner choose among some sites, or among all that offer the operation.

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


class _Statement(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What all statements have. Defaults are those of a statement without a block."""

    id: int

    word: ClassVar[str] = ""
    """What users write for it."""
    is_loop: ClassVar[bool] = False
    """Whether its block runs any number of times."""
    has_value: ClassVar[bool] = True
    """Whether others can refer to it."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The fields that hold its expressions; some may be None."""
    reads_inside: ClassVar[frozenset[str]] = frozenset()
    """Those of them that are evaluated inside its block."""
    result: ClassVar[str] = ""
    """The expression that makes its value at the end of its block; empty if its value does not come from there."""

    @property
    def kind(self) -> str:
        """What kind of statement it is, as in JSON."""
        return str(self.__struct_config__.tag)

    @property
    def label(self) -> str:
        """Its name in messages, results and drawings."""
        return f"{self.word}#{self.id}"

    @property
    def blocks(self) -> tuple[tuple[Statement, ...], ...]:
        """Its bodies."""
        body: tuple[Statement, ...] | None = getattr(self, "body", None)
        return () if body is None else (body,)

    @property
    def after(self) -> tuple[int, ...]:
        """The statements that it waits for without needing their values."""
        return ()

    @property
    def anchor(self) -> Expression | None:
        """The expression whose value it should be near; None for a call, which the planner places."""
        name = self.result or next(iter(self.reads), "")
        return cast("Expression | None", getattr(self, name, None))

    def expressions(self) -> Iterator[tuple[str, Expression, bool]]:
        """Yield its expressions: name, expression, and whether it is evaluated inside the statement's own block."""
        for name in self.reads:
            expression = getattr(self, name)
            if expression is not None:
                yield name, expression, name in self.reads_inside


class CallStatement(_Statement, frozen=True, kw_only=True, tag="call"):
    """A call of an operation."""

    operation: str
    args: dict[str, Expression] = msgspec.field(default_factory=dict)
    site: str | BestOf | None = None
    provider: str | None = None
    after: tuple[int, ...] = ()
    retry: RetryPolicy | None = None
    deadline: float | None = None
    fallback: Constant | None = None

    @property
    def label(self) -> str:
        """The operation and the id."""
        return f"{self.operation}#{self.id}"

    def expressions(self) -> Iterator[tuple[str, Expression, bool]]:
        """Yield the arguments."""
        for name, value in self.args.items():
            yield name, value, False


class YieldStatement(_Statement, frozen=True, kw_only=True, tag="yield"):
    """Sends a value to the application."""

    word: ClassVar[str] = "Yield"
    reads: ClassVar[tuple[str, ...]] = ("value",)
    has_value: ClassVar[bool] = False

    value: Expression
    place: str = "yield"
    multiuse: bool = False
    after: tuple[int, ...] = ()


class ForEachStatement(_Statement, frozen=True, kw_only=True, tag="for_each"):
    """Runs its body once per element of a sequence."""

    word: ClassVar[str] = "ForEach"
    reads: ClassVar[tuple[str, ...]] = ("seq",)
    is_loop: ClassVar[bool] = True

    seq: Expression
    concurrency: Annotated[int, msgspec.Meta(gt=0)] | None = None
    body: tuple[Statement, ...] = ()


class RepeatStatement(_Statement, frozen=True, kw_only=True, tag="repeat"):
    """Runs its body one iteration after the other, passing a value on."""

    word: ClassVar[str] = "Repeat"
    reads: ClassVar[tuple[str, ...]] = ("carry", "times", "next", "until")
    reads_inside: ClassVar[frozenset[str]] = frozenset({"next", "until"})
    result: ClassVar[str] = "next"
    is_loop: ClassVar[bool] = True

    carry: Expression
    times: Expression | None = None
    until: Expression | None = None
    next: Expression | None = None
    body: tuple[Statement, ...] = ()


class IfStatement(_Statement, frozen=True, kw_only=True, tag="if"):
    """Runs one of two bodies."""

    word: ClassVar[str] = "If"
    reads: ClassVar[tuple[str, ...]] = ("cond",)
    has_value: ClassVar[bool] = False

    cond: Expression
    body: tuple[Statement, ...] = ()
    otherwise: tuple[Statement, ...] = ()

    @property
    def blocks(self) -> tuple[tuple[Statement, ...], ...]:
        """The body for a condition that holds, and the one for a condition that does not."""
        return (self.body, self.otherwise)


class CacheStatement(_Statement, frozen=True, kw_only=True, tag="try_from_cache"):
    """Takes a value from a site's cache, or runs its body to get it."""

    word: ClassVar[str] = "TryFromCache"
    reads: ClassVar[tuple[str, ...]] = ("key", "store")
    reads_inside: ClassVar[frozenset[str]] = frozenset({"store"})
    result: ClassVar[str] = "store"

    key: Expression
    store: Expression | None = None
    site: str | None = None
    body: tuple[Statement, ...] = ()


class CollectStatement(_Statement, frozen=True, kw_only=True, tag="collect"):
    """The list of a loop's values, in element order. ``errors``: what becomes of those that failed."""

    word: ClassVar[str] = "collect"

    node: int
    errors: Literal["fail", "skip", "keep"] = "fail"
    path: tuple[Step, ...] = ()

    @property
    def anchor(self) -> Expression:
        """The values that are collected. They are not an expression: they belong to the elements of a loop."""
        return Ref(node=self.node)


class ChoiceStatement(_Statement, frozen=True, kw_only=True, tag="choice"):
    """The value of an ``If``: one of two, by the branch that ran. ``branch`` is the ``If``."""

    word: ClassVar[str] = "If.value"
    reads: ClassVar[tuple[str, ...]] = ("value", "otherwise")

    branch: int
    value: Expression
    otherwise: Expression


class GatherStatement(_Statement, frozen=True, kw_only=True, tag="gather"):
    """The replies of several calls of which some may fail. ``within``: the seconds that each of them may take."""

    word: ClassVar[str] = "gather"

    calls: tuple[int, ...]
    at_least: Annotated[int, msgspec.Meta(ge=0)] = 1
    within: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def expressions(self) -> Iterator[tuple[str, Expression, bool]]:
        """Yield the calls."""
        for call in self.calls:
            yield "calls", Ref(node=call), False


class WaitStatement(_Statement, frozen=True, kw_only=True, tag="wait"):
    """Waits for an event, which is sent to the job while it runs. ``schema``: the JSON schema of its value."""

    word: ClassVar[str] = "Wait"
    reads: ClassVar[tuple[str, ...]] = ("timeout",)

    event: str
    schema: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout: Expression | None = None
    fallback: Constant | None = None
    after: tuple[int, ...] = ()


class SleepStatement(_Statement, frozen=True, kw_only=True, tag="sleep"):
    """Waits for a number of seconds. Its value is None."""

    word: ClassVar[str] = "Sleep"
    reads: ClassVar[tuple[str, ...]] = ("seconds",)

    seconds: Expression
    after: tuple[int, ...] = ()


Statement: TypeAlias = (
    CallStatement
    | YieldStatement
    | ForEachStatement
    | RepeatStatement
    | IfStatement
    | CacheStatement
    | CollectStatement
    | ChoiceStatement
    | GatherStatement
    | WaitStatement
    | SleepStatement
)


def walk_statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Yield all statements, an outer one before those inside it, in the order of the text."""
    stack = list(reversed(body))
    while stack:
        statement = stack.pop()
        yield statement
        for block in reversed(statement.blocks):
            stack.extend(reversed(block))


class StatementVisitor(ABC, Generic[Context, Result]):
    """Does something different with each kind of statement. There is one method per kind: mypy finds a missing one."""

    def visit(self, statement: Statement, context: Context) -> Result:
        """Call the method for a statement."""
        return cast("Result", getattr(self, f"visit_{statement.kind}")(statement, context))

    @abstractmethod
    def visit_call(self, statement: CallStatement, context: Context) -> Result:
        """Visit the call of an operation."""

    @abstractmethod
    def visit_yield(self, statement: YieldStatement, context: Context) -> Result:
        """Visit a ``Yield``."""

    @abstractmethod
    def visit_for_each(self, statement: ForEachStatement, context: Context) -> Result:
        """Visit a ``ForEach``."""

    @abstractmethod
    def visit_repeat(self, statement: RepeatStatement, context: Context) -> Result:
        """Visit a ``Repeat``."""

    @abstractmethod
    def visit_if(self, statement: IfStatement, context: Context) -> Result:
        """Visit an ``If``."""

    @abstractmethod
    def visit_try_from_cache(self, statement: CacheStatement, context: Context) -> Result:
        """Visit a ``TryFromCache``."""

    @abstractmethod
    def visit_collect(self, statement: CollectStatement, context: Context) -> Result:
        """Visit a ``collect``."""

    @abstractmethod
    def visit_choice(self, statement: ChoiceStatement, context: Context) -> Result:
        """Visit the value of an ``If``."""

    @abstractmethod
    def visit_gather(self, statement: GatherStatement, context: Context) -> Result:
        """Visit a ``gather``."""

    @abstractmethod
    def visit_wait(self, statement: WaitStatement, context: Context) -> Result:
        """Visit a ``Wait``."""

    @abstractmethod
    def visit_sleep(self, statement: SleepStatement, context: Context) -> Result:
        """Visit a ``Sleep``."""


class DefaultVisitor(ABC, Generic[Context, Result]):
    """Does the same with all kinds of statements but those that it has a method for, named as above."""

    def visit(self, statement: Statement, context: Context) -> Result:
        """Call the method for a statement."""
        method = getattr(self, f"visit_{statement.kind}", self.visit_other)
        return cast("Result", method(statement, context))

    @abstractmethod
    def visit_other(self, statement: Statement, context: Context) -> Result:
        """Visit a statement without a method of its own."""
