"""What users write inside ``with Pipeline(...)``: values, parameters, yields, loops, branches.

The pipeline under construction is found by a context variable, so that two tasks can build pipelines at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast

import msgspec

from dfm_async.errors import PipelineError, PlaceholderError, Problem
from dfm_async.model.constants import fresh
from dfm_async.model.policies import RetryPolicy
from dfm_async.pipeline.current import current_builder
from dfm_async.pipeline.expressions import (
    Advise,
    Attribute,
    Combination,
    Comparison,
    Constant,
    Entries,
    Expression,
    Item,
    Items,
    Negation,
    Parameter,
    Ref,
)
from dfm_async.pipeline.statements import (
    BestOf,
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    Statement,
    YieldStatement,
)

__all__ = [
    "Builder",
    "ForEach",
    "If",
    "Mode",
    "PlaceParam",
    "Repeat",
    "TryFromCache",
    "Value",
    "Yield",
    "collect",
    "to_expression",
]


Mode: TypeAlias = Literal["execute", "discovery"]
"""What a pipeline is for."""

_TYPES: Final[dict[type, Literal["list", "tuple", "set"]]] = {list: "list", tuple: "tuple", set: "set"}


class Builder:
    """Collects the statements of one pipeline while its block is open."""

    def __init__(self, name: str | None, mode: Mode = "execute") -> None:
        self.name = name
        self.mode = mode
        self.blocks: list[list[Statement]] = [[]]
        self.shown: set[str] = set()
        """The texts by which ``repr`` has shown values: they must not end up in constants."""
        self._next_id = 0

    def new_id(self) -> int:
        """Gives out the next statement id."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, statement: Statement) -> None:
        """Appends a statement to the innermost open block."""
        self.blocks[-1].append(statement)

    def refuse(self, statement: str, message: str) -> NoReturn:
        """Raises for something that the user wrote."""
        raise PipelineError(self.name, [Problem(statement, message)])

    def call(
        self,
        operation: str,
        args: Mapping[str, Any],
        *,
        site: Any = None,
        provider: str | None = None,
        after: Any = None,
        retry: RetryPolicy | None = None,
        deadline: float | None = None,
    ) -> Value:
        """Records the call of an operation and returns its value."""
        node = self.new_id()
        where = f"{operation}#{node}"
        if isinstance(site, Advise):
            site = self._any_site(where)
        if site is not None and not isinstance(site, (str, BestOf)):
            name = getattr(site, "name", None)
            if not isinstance(name, str):
                self.refuse(where, f"site= takes a site, its name or BestOf([...]), not {site!r}")
            site = name
        self.add(
            CallStatement(
                id=node,
                operation=operation,
                args={name: to_expression(value, self, where) for name, value in args.items()},
                site=site,
                provider=provider,
                after=_after(after, self, where),
                retry=retry,
                deadline=deadline,
            )
        )
        return Value(Ref(node=node), self)

    def _any_site(self, where: str) -> BestOf:
        """What ``site=Advise()`` means: every site that offers the operation is asked."""
        if self.mode != "discovery":
            self.refuse(where, "site=Advise() asks for advice: that needs Pipeline(..., mode='discovery')")
        return BestOf()


def _builder(what: str) -> Builder:
    builder = current_builder()
    if builder is None:
        raise PipelineError(None, [Problem(what, "can only be used inside a 'with Pipeline(...)' block")])
    return builder


class Value:
    """A value that will exist when the pipeline runs: a node, a field of one, a parameter, or a condition over them.

    ``value[key]`` and ``value.name`` are fields; comparisons and ``&``, ``|``, ``~`` make conditions.
    """

    __slots__ = ("_builder", "_expression")

    __array_ufunc__ = None  # numpy leaves operators to us, which refuse them

    def __init__(self, expression: Expression, builder: Builder) -> None:
        self._expression = expression
        self._builder = builder

    def __getitem__(self, key: Any) -> Value:
        if not isinstance(key, (int, str, bool, float, type(None))):
            self._builder.refuse(self._text(), f"a field is chosen by a string or a number, not by {key!r}")
        return self._field(Item(key=key))

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):  # Python asks for these on its own (copy, pickle, inspection)
            raise AttributeError(name)
        return self._field(Attribute(name=name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._refuse(f"cannot be changed: {_IN_OPERATION}")
        object.__setattr__(self, name, value)

    def _field(self, step: Item | Attribute) -> Value:
        found = self._expression
        if not isinstance(found, (Ref, Parameter)):
            self._builder.refuse(self._text(), "only a node or a parameter has fields")
        return Value(msgspec.structs.replace(found, path=(*found.path, step)), self._builder)

    def _text(self) -> str:
        from dfm_async.pipeline.text import expression_text

        return expression_text(self._expression)

    def _refuse(self, message: str) -> NoReturn:
        raise PlaceholderError(self._builder.name, [Problem(self._text(), message)])

    def _compare(self, op: Any, other: Any) -> Value:
        right = to_expression(other, self._builder, "a comparison")
        return Value(Comparison(op=op, left=self._expression, right=right), self._builder)

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other)

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def _combine(self, op: Any, other: Any, *, swapped: bool = False) -> Value:
        terms = (self._expression, to_expression(other, self._builder, f"'{op}'"))
        return Value(Combination(op=op, terms=terms[::-1] if swapped else terms), self._builder)

    def __and__(self, other: Any) -> Value:
        return self._combine("and", other)

    def __rand__(self, other: Any) -> Value:
        return self._combine("and", other, swapped=True)

    def __or__(self, other: Any) -> Value:
        return self._combine("or", other)

    def __ror__(self, other: Any) -> Value:
        return self._combine("or", other, swapped=True)

    def __invert__(self) -> Value:
        return Value(Negation(term=self._expression), self._builder)

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> Value:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Value:
        return self

    def __repr__(self) -> str:
        text = f"<{self._text()}>"
        self._builder.shown.add(text)
        return text


_ARITHMETIC: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("lshift", "rshift", "xor"),
)
_UNKNOWN: Final = "its value is known only when the pipeline runs. "
_IN_OPERATION: Final = _UNKNOWN + "Do it in an operation, and call that with this value."
_REFUSED: Final[dict[str, tuple[str, str]]] = {
    "has no value yet": (
        "__bool__",
        "it is known only when the pipeline runs. Use 'with If(...)' instead of 'if', and &, |, ~ instead of and, or, "
        "not",
    ),
    "has no elements yet": ("__iter__ __reversed__ __next__", "use 'with ForEach(...) as element'"),
    "has no length yet": ("__len__ __length_hint__", "it is known only when the pipeline runs"),
    "cannot become a part of a text": (
        "__str__ __format__",
        _UNKNOWN + "Write an operation that makes the text, and call it with this value; repr() shows the name.",
    ),
    "cannot be searched with 'in'": ("__contains__", _IN_OPERATION),
    "cannot be calculated with": (
        " ".join(f"__{name}__ __r{name}__" for name in _ARITHMETIC)
        + " __neg__ __pos__ __abs__ __round__ __floor__ __ceil__ __trunc__",
        _IN_OPERATION,
    ),
    "cannot be converted": (
        "__int__ __float__ __complex__ __index__ __bytes__ __fspath__ __buffer__ __array__",
        _IN_OPERATION,
    ),
    "cannot be called": ("__call__", "only operations can. A method of a value is called in an operation."),
    "cannot be awaited": (
        "__await__ __aiter__ __anext__",
        "a pipeline passes values on, and waits for them by itself. Leave out 'await' and 'async'.",
    ),
    "cannot be entered by 'with'": ("__enter__ __exit__ __aenter__ __aexit__", _IN_OPERATION),
    "cannot be changed": ("__setitem__ __delitem__ __delattr__", _IN_OPERATION),
    "cannot be pickled": ("__reduce__ __reduce_ex__", "it is a part of a pipeline that is being built"),
}
"""What Python can do to an object and nobody can do to a value that does not exist yet: methods, and what to do."""


def _refusal(what: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(self: Value, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse(f"{what}: {hint}")

    return refuse


for _what, (_methods, _hint) in _REFUSED.items():
    for _method in _methods.split():
        setattr(Value, _method, _refusal(_what, _hint))


def to_expression(value: Any, builder: Builder, where: str) -> Expression:
    """Turns what a user wrote into an expression: values stay references, everything else is a constant.

    A constant is a copy: what the user changes later does not change the pipeline.
    """
    if isinstance(value, Value):
        owner: Builder = object.__getattribute__(value, "_builder")
        if owner is not builder:
            builder.refuse(where, f"uses {value!r}, which belongs to pipeline {owner.name!r}")
        return cast("Expression", object.__getattribute__(value, "_expression"))
    if isinstance(value, Advise):
        return value
    kind = type(value)
    if kind in (list, tuple, set):
        items = tuple(to_expression(item, builder, where) for item in value)
        if kind is set:
            items = tuple(sorted(items, key=repr))  # the same pipeline on every run
        constants = [item.value for item in items if isinstance(item, Constant)]
        if len(constants) < len(items):
            return Items(type=_TYPES[kind], items=items)
        return Constant(value=kind(constants))
    if kind is dict:
        entries = tuple((to_expression(k, builder, where), to_expression(v, builder, where)) for k, v in value.items())
        pairs = [(k.value, v.value) for k, v in entries if isinstance(k, Constant) and isinstance(v, Constant)]
        if len(pairs) < len(entries):
            return Entries(entries=entries)
        return Constant(value=dict(pairs))
    if kind is str:
        shown = next((text for text in builder.shown if text in value), None)
        if shown is not None:
            hint = "write an operation that makes the text"
            builder.refuse(where, f"the text {value!r} holds the name of {shown}, not its value: {hint}")
    elif _hides_a_value(value):
        builder.refuse(where, f"a value of the pipeline is hidden in {kind.__name__}: use a list, tuple, set or dict")
    return Constant(value=fresh(value))


def _hides_a_value(value: Any) -> bool:
    """Tells whether a constant holds a value that exists only when the pipeline runs."""
    if isinstance(value, (Value, Advise)):
        return True
    if isinstance(value, (str, bytes, int, float, type(None), type)):
        return False
    if isinstance(value, (tuple, frozenset, list, set)):
        return any(map(_hides_a_value, value))
    if isinstance(value, dict):
        return any(map(_hides_a_value, value.values()))
    fields = getattr(value, "__dataclass_fields__", None) or getattr(type(value), "model_fields", None)
    return any(_hides_a_value(getattr(value, name, None)) for name in fields or ())


def _node_of(value: Any, builder: Builder, where: str, what: str) -> int:
    expression = to_expression(value, builder, where)
    if not isinstance(expression, Ref):
        builder.refuse(where, f"{what} takes a node of this pipeline, not {value!r}")
    return expression.node


def _after(value: Any, builder: Builder, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    values: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_node_of(item, builder, where, "after=") for item in values)


def PlaceParam(name: str, multiuse: bool = False) -> Any:
    """A value that is given per parameter set at execution.

    Using the same name twice needs ``multiuse=True`` on all uses.
    """
    builder = _builder(f"PlaceParam({name!r})")
    if not isinstance(name, str) or not name:
        builder.refuse("PlaceParam", f"the name must be a non-empty string, not {name!r}")
    return Value(Parameter(name=name, multiuse=multiuse), builder)


def Yield(value: Any, place: str = "yield", multiuse: bool = False, after: Any = None) -> None:
    """Sends a value to the application. An iterator or async iterator is sent element by element.

    Using the same place twice needs ``multiuse=True`` on all uses.
    """
    where = f"Yield(place={place!r})"
    builder = _builder(where)
    builder.add(
        YieldStatement(
            id=builder.new_id(),
            value=to_expression(value, builder, where),
            place=place,
            multiuse=multiuse,
            after=_after(after, builder, where),
        )
    )


def collect(value: Any) -> Any:
    """The list of a loop's values in element order, for use after the loop.

    Elements for which the value was not computed (it stands in a branch that did not run) are left out.
    """
    builder = _builder("collect(...)")
    node = builder.new_id()
    builder.add(CollectStatement(id=node, node=_node_of(value, builder, f"collect#{node}", "collect")))
    return Value(Ref(node=node), builder)


class _Block:
    """Opens and closes one body of a block statement."""

    def __init__(self, builder: Builder, close: Callable[[tuple[Statement, ...]], None]) -> None:
        self._builder = builder
        self._close = close

    def open(self) -> None:
        self._builder.blocks.append([])

    def close(self, failed: bool) -> None:
        body = tuple(self._builder.blocks.pop())
        if not failed:
            self._close(body)


class ForEach:
    """Runs its block once per element of a list, iterator or async iterator; the elements run concurrently.

    Args:
        seq: the node, parameter or list to go through.
        concurrency: how many elements run at the same time at most.
    """

    def __init__(self, seq: Any, concurrency: int | None = None) -> None:
        self._builder = _builder("ForEach(...)")
        self._node = self._builder.new_id()
        self._seq = to_expression(seq, self._builder, f"ForEach#{self._node}")
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            self._builder.refuse(f"ForEach#{self._node}", f"concurrency must be at least 1, not {concurrency!r}")
        self._concurrency = concurrency
        self._block = _Block(self._builder, self._add)

    def _add(self, body: tuple[Statement, ...]) -> None:
        statement = ForEachStatement(id=self._node, seq=self._seq, concurrency=self._concurrency, body=body)
        self._builder.add(statement)

    def __enter__(self) -> Any:
        self._block.open()
        return Value(Ref(node=self._node), self._builder)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._block.close(kind is not None)


class RepeatValue(Value):
    """The value of a ``Repeat`` block: in the body, of this iteration; after the block, the final one."""

    __slots__ = ("_repeat",)

    def __init__(self, expression: Expression, builder: Builder, repeat: Repeat) -> None:
        super().__init__(expression, builder)
        self._repeat = repeat

    def next(self, value: Any) -> None:
        """Says what the next iteration gets, and what the block's value is if this iteration is the last."""
        self._repeat.set_next(value)

    def until(self, condition: Any) -> None:
        """Says after which iteration to stop: the first one for which the condition holds."""
        self._repeat.set_until(condition)


class Repeat:
    """Runs its block one iteration after the other, each getting what the one before passed on with ``next``.

    Args:
        carry: what the first iteration gets.
        times: how many iterations there are at most.
        until: a condition, tested after each iteration; a function of the value that the iteration passed on, or an
            expression. ``current.until(...)`` in the block sets one over nodes of the block.
    """

    def __init__(self, carry: Any, times: Any = None, until: Any = None) -> None:
        self._builder = _builder("Repeat(...)")
        self._node = self._builder.new_id()
        self._where = f"Repeat#{self._node}"
        self._carry = to_expression(carry, self._builder, self._where)
        self._times = None if times is None else to_expression(times, self._builder, self._where)
        self._until: Any = until
        self._next: Expression | None = None
        self._block = _Block(self._builder, self._add)
        self._depth = 0

    def _check_open(self, what: str) -> None:
        if len(self._builder.blocks) != self._depth:
            self._builder.refuse(self._where, f"{what} must stand in the Repeat block itself, not deeper or after it")

    def set_next(self, value: Any) -> None:
        """Records ``current.next(value)``."""
        self._check_open("next(...)")
        if self._next is not None:
            self._builder.refuse(self._where, "next(...) is called twice")
        self._next = to_expression(value, self._builder, self._where)

    def set_until(self, condition: Any) -> None:
        """Records ``current.until(condition)``."""
        self._check_open("until(...)")
        if self._until is not None:
            self._builder.refuse(self._where, "until is given twice")
        self._until = condition

    def _add(self, body: tuple[Statement, ...]) -> None:
        if self._next is None:
            self._builder.refuse(self._where, "the block never says what it passes on: call next(value) in it")
        until = self._until
        if callable(until) and not isinstance(until, Value):
            until = until(Value(self._next, self._builder))
        statement = RepeatStatement(
            id=self._node,
            carry=self._carry,
            times=self._times,
            until=None if until is None else to_expression(until, self._builder, self._where),
            next=self._next,
            body=body,
        )
        self._builder.add(statement)

    def __enter__(self) -> Any:
        self._block.open()
        self._depth = len(self._builder.blocks)
        return RepeatValue(Ref(node=self._node), self._builder, self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._block.close(kind is not None)
        self._depth = -1


class If:
    """Runs its block if a condition holds. ``with If(...) as branch`` and ``with branch.otherwise()`` for the rest."""

    def __init__(self, cond: Any) -> None:
        self._builder = _builder("If(...)")
        self._node = self._builder.new_id()
        self._where = f"If#{self._node}"
        self._cond = to_expression(cond, self._builder, self._where)
        self._home = self._builder.blocks[-1]
        self._statement: IfStatement | None = None
        self._block = _Block(self._builder, self._add)

    def _add(self, body: tuple[Statement, ...]) -> None:
        self._statement = IfStatement(id=self._node, cond=self._cond, body=body)
        self._builder.add(self._statement)

    def __enter__(self) -> If:
        self._block.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._block.close(kind is not None)

    def otherwise(self) -> Otherwise:
        """The block that runs if the condition does not hold."""
        if self._statement is None:
            self._builder.refuse(self._where, "otherwise() comes after the If block, not inside it")
        if self._builder.blocks[-1] is not self._home:
            self._builder.refuse(self._where, "otherwise() must stand in the same block as its If")
        if self._statement.otherwise:
            self._builder.refuse(self._where, "otherwise() is used twice")
        return Otherwise(self._builder, self)

    def set_otherwise(self, body: tuple[Statement, ...]) -> None:
        """Puts the second body into the statement, which moves here: both bodies may use what stands before."""
        assert self._statement is not None  # noqa: S101 - otherwise() checked it
        self._home.remove(self._statement)
        self._statement = msgspec.structs.replace(self._statement, otherwise=body)
        self._home.append(self._statement)


class Otherwise:
    """The second block of an :class:`If`."""

    def __init__(self, builder: Builder, branch: If) -> None:
        self._block = _Block(builder, branch.set_otherwise)

    def __enter__(self) -> None:
        self._block.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._block.close(kind is not None)


class CacheValue(Value):
    """The value of a ``TryFromCache`` block."""

    __slots__ = ("_cache",)

    def __init__(self, expression: Expression, builder: Builder, cache: TryFromCache) -> None:
        super().__init__(expression, builder)
        self._cache = cache

    def store(self, value: Any) -> None:
        """Says what the block's value is, and what the cache keeps, if the key was not in the cache."""
        self._cache.set_store(value)


class TryFromCache:
    """Takes the value of a key from a site's cache; only if it is not there, the block runs and stores one.

    Args:
        key: any value, also with nodes inside, such as ``("temps", day)``.
        site: whose cache; by default that of the site which computes what is stored.
    """

    def __init__(self, key: Any, site: Any = None) -> None:
        self._builder = _builder("TryFromCache(...)")
        self._node = self._builder.new_id()
        self._where = f"TryFromCache#{self._node}"
        self._key = to_expression(key, self._builder, self._where)
        self._site: str | None = getattr(site, "name", site)
        self._store: Expression | None = None
        self._block = _Block(self._builder, self._add)
        self._depth = 0

    def set_store(self, value: Any) -> None:
        """Records ``block.store(value)``."""
        if len(self._builder.blocks) != self._depth:
            self._builder.refuse(self._where, "store(...) must stand in the TryFromCache block itself")
        if self._store is not None:
            self._builder.refuse(self._where, "store(...) is called twice")
        self._store = to_expression(value, self._builder, self._where)

    def _add(self, body: tuple[Statement, ...]) -> None:
        if self._store is None:
            self._builder.refuse(self._where, "the block stores nothing: call store(value) in it")
        statement = CacheStatement(id=self._node, key=self._key, store=self._store, site=self._site, body=body)
        self._builder.add(statement)

    def __enter__(self) -> Any:
        self._block.open()
        self._depth = len(self._builder.blocks)
        return CacheValue(Ref(node=self._node), self._builder, self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._block.close(kind is not None)
        self._depth = -1
