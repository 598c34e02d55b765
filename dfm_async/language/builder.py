"""What users write inside ``with Pipeline(...)``: values, parameters, yields, loops, branches.

The pipeline under construction is found by a context variable, so that two tasks can build pipelines at the same time.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeAlias, TypeVar, cast, overload

import msgspec

from dfm_async.errors import PipelineError, PlaceholderError, Problem
from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.language.current_pipeline import current_builder
from dfm_async.language.event_types import schema_of
from dfm_async.model.checks import FINITE, is_number
from dfm_async.model.constants import fresh
from dfm_async.model.info import FailureInfo
from dfm_async.model.policies import RetryPolicy, call_problem
from dfm_async.model.replies import Replies

T = TypeVar("T")

Mode: TypeAlias = Literal["execute", "discovery"]
"""What a pipeline is for."""

_TYPES: Final[dict[type, Literal["list", "tuple", "set"]]] = {list: "list", tuple: "tuple", set: "set"}


NOT_GIVEN: Final[Any] = object()
"""Stands for an option that was not given, where None is a value."""


class Builder:
    """Collects the statements of one pipeline while its block is open."""

    def __init__(self, name: str | None, mode: Mode = "execute") -> None:
        self.name = name
        self.mode = mode
        self.blocks: list[list[st.Statement]] = [[]]
        self.shown: set[str] = set()
        """The texts by which ``repr`` has shown values: they must not end up in constants."""
        self.unentered: dict[_Block[Any], Problem] = {}
        """The blocks that were created and have not been entered, and what is wrong if they never are."""
        self._next_id = 0

    def new_id(self) -> int:
        """Return the next statement id."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, statement: st.Statement) -> None:
        """Append a statement to the innermost open block."""
        self.blocks[-1].append(statement)

    def refuse(self, statement: str, message: str) -> NoReturn:
        """Raise an error for something that the user wrote."""
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
        fallback: Any = NOT_GIVEN,
    ) -> Value:
        """Record the call of an operation and return its value."""
        node = self.new_id()
        where = f"{operation}#{node}"
        if isinstance(site, ex.Advise):
            site = self._any_site(where)
        if site is not None and not isinstance(site, (str, st.BestOf)):
            name = getattr(site, "name", None)
            if not isinstance(name, str):
                self.refuse(where, f"site= takes a site, its name or BestOf([...]), not {site!r}")
            site = name
        wrong = call_problem(retry, deadline)
        if wrong is not None:
            self.refuse(where, wrong)
        self.add(
            st.CallStatement(
                id=node,
                operation=operation,
                args={name: to_expression(value, self, where) for name, value in args.items()},
                site=site,
                provider=provider,
                after=_after(after, self, where),
                retry=retry,
                deadline=deadline,
                fallback=None if fallback is NOT_GIVEN else _constant(fallback, self, where, "fallback="),
            )
        )
        return Value(ex.Ref(node=node), self)

    def _any_site(self, where: str) -> st.BestOf:
        """Return what ``site=Advise()`` means: every site that offers the operation is asked."""
        if self.mode != "discovery":
            self.refuse(where, "site=Advise() asks for advice: that needs Pipeline(..., mode='discovery')")
        return st.BestOf()


def _builder(what: str) -> Builder:
    builder = current_builder()
    if not isinstance(builder, Builder):
        hint = "can only be used inside a 'with Pipeline(...)' block or a function with @federation.pipeline"
        raise PipelineError(None, [Problem(what, hint)])
    return builder


class Value:
    """A value that will exist when the pipeline runs: a node, a field of one, a parameter, or a condition over them.

    ``value[key]`` and ``value.name`` are fields; comparisons and ``&``, ``|``, ``~`` make conditions.
    """

    __slots__ = ("_builder", "_expression")

    def __init__(self, expression: ex.Expression, builder: Builder) -> None:
        self._expression = expression
        self._builder = builder

    def __getitem__(self, key: Any) -> Value:
        if not isinstance(key, (int, str, bool, float, type(None))):
            self._builder.refuse(
                self._text(), f"a field is chosen by a string or a number, not by {key!r}. {_BY_OPERATION}"
            )
        return self._field(ex.Item(key=key))

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):  # Python asks for these on its own (copy, pickle, inspection)
            raise AttributeError(name)
        return self._field(ex.Attribute(name=name))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._refuse(f"cannot be changed: {IN_OPERATION}")
        object.__setattr__(self, name, value)

    def _field(self, step: ex.Item | ex.Attribute) -> Value:
        found = self._expression
        if not isinstance(found, (ex.Ref, ex.Parameter)):
            self._builder.refuse(self._text(), "only a node or a parameter has fields")
        return Value(msgspec.structs.replace(found, path=(*found.path, step)), self._builder)

    def _text(self) -> str:
        from dfm_async.language.pipeline_text import expression_text

        return expression_text(self._expression)

    def _refuse(self, message: str) -> NoReturn:
        raise PlaceholderError(self._builder.name, [Problem(self._text(), message)])

    def _compare(self, op: Any, other: Any) -> Value:
        left, right = (to_expression(side, self._builder, "a comparison") for side in (self, other))
        return Value(ex.Comparison(op=op, left=left, right=right), self._builder)

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

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **_options: Any) -> Value:
        """Do what an operator does whose left side is a value of numpy, and refuse all functions of numpy."""
        operator = _OF_NUMPY.get(function.__name__)
        if operator is None or method != "__call__" or len(inputs) != 2 or isinstance(inputs[0], Value):
            self._refuse(f"cannot be used in a calculation: {IN_OPERATION}")
        left = inputs[0]
        if getattr(left, "shape", None) == ():
            left = left[()]  # the number itself
        found: Value = getattr(self, operator)(left)
        return found

    def _combine(self, op: Any, other: Any, *, swapped: bool = False) -> Value:
        sign = "&" if op == "and" else "|"
        term = to_expression(other, self._builder, f"'{sign}'", is_condition=True)
        if isinstance(term, (ex.Items, ex.Entries)) or (isinstance(term, ex.Constant) and type(term.value) is not bool):
            self._refuse(f"{sign} combines conditions, not {other!r}: {_CONDITIONS}")
        terms = (self._expression, term)
        return Value(ex.Combination(op=op, terms=terms[::-1] if swapped else terms), self._builder)

    def __and__(self, other: Any) -> Value:
        return self._combine("and", other)

    def __rand__(self, other: Any) -> Value:
        return self._combine("and", other, swapped=True)

    def __or__(self, other: Any) -> Value:
        return self._combine("or", other)

    def __ror__(self, other: Any) -> Value:
        return self._combine("or", other, swapped=True)

    def __invert__(self) -> Value:
        return Value(ex.Negation(term=self._expression), self._builder)

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
_OF_NUMPY: Final = {
    "equal": "__eq__",
    "not_equal": "__ne__",
    "less": "__gt__",
    "less_equal": "__ge__",
    "greater": "__lt__",
    "greater_equal": "__le__",
    "bitwise_and": "__rand__",
    "bitwise_or": "__ror__",
}
"""The functions of numpy that stand for operators, and what does the same with the sides swapped."""
_UNKNOWN: Final = "its value is known only when the pipeline runs. "
_BY_OPERATION: Final = "Write an operation that does it, and call the operation with this value."
IN_OPERATION: Final = _UNKNOWN + _BY_OPERATION
"""What to write instead of something that only a known value can do."""
_CONDITIONS: Final = (
    "put each comparison in parentheses, such as (a > 1) & (b == 2). To combine numbers, sets or dicts, write an "
    "operation, and call it with this value."
)
_REFUSED: Final[dict[str, tuple[str, str]]] = {
    "has no value yet": (
        "__bool__",
        "it is known only when the pipeline runs. Use 'with If(...)' instead of 'if', &, |, ~ instead of and, or, not, "
        "(a < b) & (b < c) instead of a < b < c, and (a == b) | (a == c) instead of a in [b, c]. Instead of max, min "
        "and sorted, write an operation.",
    ),
    "has no elements yet": ("__iter__ __reversed__ __next__", "use 'with ForEach(...) as element'"),
    "has no length yet": ("__len__ __length_hint__", IN_OPERATION),
    "cannot be formatted as text": (
        "__str__ __format__",
        _UNKNOWN + "Write an operation that builds the text, and call it with this value; repr() shows the name.",
    ),
    "cannot be searched with 'in'": ("__contains__", IN_OPERATION),
    "cannot be used in a calculation": (
        " ".join(f"__{name}__ __r{name}__" for name in _ARITHMETIC)
        + " __neg__ __pos__ __abs__ __round__ __floor__ __ceil__ __trunc__",
        IN_OPERATION,
    ),
    "cannot be converted": (
        "__int__ __float__ __complex__ __bytes__ __fspath__ __buffer__ __array__ __array_function__",
        IN_OPERATION,
    ),
    "cannot be used as an integer": (
        "__index__",
        f"{IN_OPERATION} Instead of a loop over range(count), use 'with Repeat(start, times=count) as current'.",
    ),
    "cannot be called": ("__call__", "only operations can. Call the method in an operation."),
    "cannot be awaited": (
        "__await__ __aiter__ __anext__",
        "a pipeline waits for values itself. Remove 'await' and 'async'.",
    ),
    "cannot be entered by 'with'": ("__enter__ __exit__ __aenter__ __aexit__", IN_OPERATION),
    "cannot be changed": ("__setitem__ __delitem__ __delattr__", IN_OPERATION),
    "cannot be pickled": ("__reduce__ __reduce_ex__", "it is a part of a pipeline that is being built"),
}
"""What Python can do with an object but not with a value that does not exist yet: methods, and an alternative."""


def _refusal(what: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(self: Value, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse(f"{what}: {hint}")

    return refuse


for _what, (_methods, _hint) in _REFUSED.items():
    for _method in _methods.split():
        setattr(Value, _method, _refusal(_what, _hint))


def to_expression(value: Any, builder: Builder, where: str, *, is_condition: bool = False) -> ex.Expression:
    """Turn what a user wrote into an expression: values stay references, everything else is a constant.

    A constant is a copy: what the user changes later does not change the pipeline. ``is_condition``: only its truth is
    used.
    """
    if isinstance(value, Value):
        owner: Builder = object.__getattribute__(value, "_builder")
        if owner is not builder:
            builder.refuse(where, f"uses {value!r}, which belongs to pipeline {owner.name!r}")
        found = cast("ex.Expression", object.__getattribute__(value, "_expression"))
        if not is_condition and isinstance(found, (ex.Combination, ex.Negation)) and not _compares(found):
            text = value._text()  # noqa: SLF001 - it is of this module
            what = "is a condition over values that are not compared: only If and until take it"
            hint = f"{text} {what}. For a value that is true or false, {_CONDITIONS}"
            raise PlaceholderError(builder.name, [Problem(where, hint)])
        return found
    if isinstance(value, _Block):
        word = type(value).__name__
        builder.unentered.pop(value, None)  # this error names it
        builder.refuse(where, f"uses a {word} without its block: write 'with {word}(...) as ...', and use that name")
    if isinstance(value, ex.Advise):
        return value
    kind = type(value)
    if kind in (list, tuple, set):
        items = tuple(to_expression(item, builder, where) for item in value)
        if kind is set:
            items = tuple(sorted(items, key=repr))  # the same pipeline on every run
        constants = [item.value for item in items if isinstance(item, ex.Constant)]
        if len(constants) < len(items):
            return ex.Items(type=_TYPES[kind], items=items)
        return ex.Constant(value=kind(constants))
    if kind is dict:
        entries = tuple((to_expression(k, builder, where), to_expression(v, builder, where)) for k, v in value.items())
        pairs = [(k.value, v.value) for k, v in entries if isinstance(k, ex.Constant) and isinstance(v, ex.Constant)]
        if len(pairs) < len(entries):
            return ex.Entries(entries=entries)
        return ex.Constant(value=dict(pairs))
    if kind is str:
        shown = next((text for text in builder.shown if text in value), None)
        if shown is not None:
            hint = "write an operation that makes the text"
            builder.refuse(where, f"the text {value!r} holds the name of {shown}, not its value: {hint}")
    elif _hides_a_value(value):
        builder.refuse(where, f"a value of the pipeline is hidden in {kind.__name__}: use a list, tuple, set or dict")
    return ex.Constant(value=fresh(value))


def _compares(found: ex.Expression) -> bool:
    """Return whether a condition has a part that is certainly true or false."""
    return any(
        isinstance(part, ex.Comparison) or (isinstance(part, ex.Constant) and type(part.value) is bool)
        for part in ex.walk(found)
    )


def _hides_a_value(value: Any) -> bool:
    """Return whether a constant holds a value that exists only when the pipeline runs."""
    if isinstance(value, (Value, ex.Advise)):
        return True
    if isinstance(value, (str, bytes, int, float, type(None), type)):
        return False
    if isinstance(value, (tuple, frozenset, list, set)):
        return any(map(_hides_a_value, value))
    if isinstance(value, dict):
        return any(map(_hides_a_value, value.values()))
    fields = getattr(value, "__dataclass_fields__", None) or getattr(type(value), "model_fields", None)
    return any(_hides_a_value(getattr(value, name, None)) for name in fields or ())


def _node_of(value: Any, builder: Builder, where: str, what: str) -> ex.Ref:
    expression = to_expression(value, builder, where)
    if not isinstance(expression, ex.Ref):
        builder.refuse(where, f"{what} takes a node of this pipeline, not {value!r}")
    return expression


def _after(value: Any, builder: Builder, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    values: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_node_of(item, builder, where, "after=").node for item in values)


def _constant(value: Any, builder: Builder, where: str, what: str) -> ex.Constant:
    """Return a value that is known when the pipeline is built."""
    expression = to_expression(value, builder, where)
    if not isinstance(expression, ex.Constant):
        builder.refuse(where, f"{what} must be known when the pipeline is built: it cannot contain nodes or parameters")
    return expression


def PlaceParam(name: str, multiuse: bool = False, *, default: Any = NOT_GIVEN) -> Any:
    """Return a parameter of the pipeline: a value that each parameter set provides.

    Args:
        name: the name in parameter sets. Every use of the name is the same parameter.
        multiuse: has no effect; DFM needs it for a name that is used more than once.
        default: the value for parameter sets without the parameter. Without a default, every set needs it. If the name
            is used more than once, one default is enough.
    """
    where = f"PlaceParam({name!r})"
    builder = _builder(where)
    if not isinstance(name, str) or not name:
        builder.refuse("PlaceParam", f"the name must be a non-empty string, not {name!r}")
    given = None if default is NOT_GIVEN else _constant(default, builder, where, "default=")
    return Value(ex.Parameter(name=name, multiuse=multiuse, default=given), builder)


if TYPE_CHECKING:

    class Advise(ex.Advise, Any):  # type: ignore[misc] # it is accepted where any other type is expected
        """Asks the sites which values a parameter may have."""
else:
    Advise = ex.Advise


def Yield(value: Any, place: str = "yield", multiuse: bool = False, after: Any = None) -> None:
    """Send a value to the application. An iterator or async iterator is sent element by element.

    Args:
        value: a node, a field, a literal or a parameter.
        place: the place of the results. Several statements can yield to the same place.
        multiuse: has no effect; DFM needs it for a place that is used more than once.
        after: a node, or a list of nodes, that must end first.
    """
    where = f"Yield(place={place!r})"
    builder = _builder(where)
    builder.add(
        st.YieldStatement(
            id=builder.new_id(),
            value=to_expression(value, builder, where),
            place=place,
            multiuse=multiuse,
            after=_after(after, builder, where),
        )
    )


@overload
def collect(value: T, errors: Literal["fail", "skip"] = "fail") -> list[T]: ...
@overload
def collect(value: T, errors: Literal["keep"]) -> list[T | FailureInfo]: ...
def collect(value: Any, errors: Literal["fail", "skip", "keep"] = "fail") -> Any:
    """Return the list of a loop's values, in the order of the elements, for use after the loop.

    Elements for which the value was not computed, because it is in a branch that did not run, are left out.

    Args:
        value: a node of the loop's block, or its element.
        errors: what happens if the value failed for some elements. "fail": there is no list. "skip": these elements are
            left out. "keep": a :class:`~dfm_async.FailureInfo` takes the place of the value. With "skip" and "keep", a
            failure that has no other use is not an error of the job.
    """
    builder = _builder("collect(...)")
    node = builder.new_id()
    where = f"collect#{node}"
    if errors not in ("fail", "skip", "keep"):
        builder.refuse(where, f"errors must be 'fail', 'skip' or 'keep', not {errors!r}")
    found = _node_of(value, builder, where, "collect")
    builder.add(st.CollectStatement(id=node, node=found.node, errors=errors, path=found.path))
    return Value(ex.Ref(node=node), builder)


def gather(calls: Iterable[T], at_least: int = 1, within: float | None = None) -> Replies[T]:
    """Return the replies of several calls, of which some may fail: a :class:`~dfm_async.events.Replies`.

    Its ``failures`` are the calls that failed or exceeded ``within``. They are not errors of the job. If fewer calls
    than ``at_least`` succeed, the gather itself fails, with an error that names all failures.

    Args:
        calls: the calls, such as ``[train(model, site=site) for site in sites]``.
        at_least: the minimum number of calls that must succeed.
        within: the number of seconds that each call may take after its inputs are available. All attempts, and the wait
            for a thread, a worker or a limit of its site, are included.
    """
    builder = _builder("gather(...)")
    node = builder.new_id()
    where = f"gather#{node}"
    if isinstance(calls, Value):
        builder.refuse(where, "takes a list of calls, not a node")
    found = [_node_of(call, builder, where, "gather") for call in calls]
    if any(ref.path for ref in found):
        builder.refuse(where, "takes calls, not fields of them")
    if not isinstance(at_least, int) or isinstance(at_least, bool) or not 0 <= at_least <= len(found):
        builder.refuse(
            where, f"at_least must be a number from 0 to {len(found)}, the number of calls, not {at_least!r}"
        )
    if within is not None:
        if not is_number(within, positive=True, most=FINITE):
            builder.refuse(where, f"within must be a number of seconds, not {within!r}")
        within = float(within)
    nodes = tuple(ref.node for ref in found)
    builder.add(st.GatherStatement(id=node, calls=nodes, at_least=at_least, within=within))
    return cast("Replies[T]", Value(ex.Ref(node=node), builder))


@overload
def Wait(
    event: str, type: builtins.type[T], timeout: Any = None, *, fallback: Any = NOT_GIVEN, after: Any = None
) -> T: ...
@overload
def Wait(event: str, type: Any = Any, timeout: Any = None, *, fallback: Any = NOT_GIVEN, after: Any = None) -> Any: ...
def Wait(
    event: str,
    type: Any = Any,  # noqa: A002 - what users look for
    timeout: Any = None,
    *,
    fallback: Any = NOT_GIVEN,
    after: Any = None,
) -> Any:
    """Wait for an event, and return its value. While it waits, the parameter set holds no thread and no call.

    :meth:`Job.send <dfm_async.Job.send>` sends an event to a parameter set. Each execution of a ``Wait``, also in
    loops, consumes the next event of its name, in the order in which the events were sent.

    Args:
        event: the name of the event.
        type: the type of its value: ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``, lists, dicts and unions of
            them. ``Job.send`` rejects values of other types.
        timeout: the maximum number of seconds: a number, a parameter or a node; None means no limit. After the timeout,
            a statement without a fallback fails with a ``TimeoutError``.
        fallback: the value to use after the timeout.
        after: a node, or a list of nodes, that must end before it begins to wait.
    """
    builder = _builder("Wait(...)")
    node = builder.new_id()
    where = f"Wait#{node}"
    if not isinstance(event, str) or not event:
        builder.refuse(where, f"the name of an event must be a non-empty string, not {event!r}")
    try:
        schema = schema_of(type)
    except TypeError as error:
        builder.refuse(where, str(error))
    if fallback is not NOT_GIVEN and timeout is None:
        builder.refuse(where, "fallback= is the value after a timeout: it needs timeout=")
    statement = st.WaitStatement(
        id=node,
        event=event,
        schema=schema,
        timeout=None if timeout is None else _seconds(timeout, builder, where, "timeout="),
        fallback=None if fallback is NOT_GIVEN else _constant(fallback, builder, where, "fallback="),
        after=_after(after, builder, where),
    )
    builder.add(statement)
    return Value(ex.Ref(node=node), builder)


def Sleep(seconds: Any, after: Any = None) -> Any:
    """Wait for a number of seconds. Return a node to pass as ``after=`` to later statements; its value is None.

    While it waits, the parameter set holds no thread and no call. With a store, the wait ends when it would have ended
    without an interruption.

    Args:
        seconds: the number of seconds: a number, a parameter or a node.
        after: a node, or a list of nodes, that must end before it begins.
    """
    builder = _builder("Sleep(...)")
    node = builder.new_id()
    where = f"Sleep#{node}"
    found = _seconds(seconds, builder, where, "seconds")
    builder.add(st.SleepStatement(id=node, seconds=found, after=_after(after, builder, where)))
    return Value(ex.Ref(node=node), builder)


def _seconds(value: Any, builder: Builder, where: str, what: str) -> ex.Expression:
    """Return a number of seconds, or what it will be."""
    expression = to_expression(value, builder, where)
    if isinstance(expression, ex.Constant) and not is_number(expression.value, most=FINITE):
        builder.refuse(where, f"{what} must be a number of seconds, not {value!r}")
    return expression


def _caller() -> str:
    """Return the line that has called this module."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return "" if frame is None else f" in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno},"


class _Block(Generic[T]):
    """A ``with`` block of the language: collects the statements of its body, and adds its own when it ends."""

    _value: T

    def __init__(self, word: str, builder: Builder | None = None, node: int | None = None) -> None:
        self._builder = _builder(f"{word}(...)") if builder is None else builder
        self._node = self._builder.new_id() if node is None else node
        self._word = word
        self._given: dict[str, Any] = {}
        self._depth = 0

    def _expect_with(self, remedy: str) -> None:
        """Report this block when the pipeline is built, unless it is entered before. Constructors end with this."""
        message = f"the block created{_caller()} is never entered, so no statements belong to it: write '{remedy}:'"
        self._builder.unentered[self] = Problem(f"{self._word}#{self._node}", message)

    def __bool__(self) -> NoReturn:
        self._refuse(
            "is a block, which is neither true nor false: combine conditions in one If, as in "
            "'with If((a > 1) & (b < 3)):', and enter each block by a 'with' of its own"
        )

    def __enter__(self) -> T:
        self._builder.unentered.pop(self, None)
        self._builder.blocks.append([])
        self._depth = len(self._builder.blocks)
        return self._value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        body = tuple(self._builder.blocks.pop())
        if kind is None:
            self._add(body)
        self._depth = -1

    def _add(self, body: tuple[st.Statement, ...]) -> None:
        raise NotImplementedError

    def _refuse(self, message: str) -> NoReturn:
        self._builder.refuse(f"{self._word}#{self._node}", message)

    def _expression(self, value: Any, *, is_condition: bool = False) -> ex.Expression:
        return to_expression(value, self._builder, f"{self._word}#{self._node}", is_condition=is_condition)

    def give(self, what: str, value: Any, *, later: bool = False) -> None:
        """Record what a method of the block's value sets: in the block itself, and once. ``later``: as it is."""
        if len(self._builder.blocks) != self._depth:
            self._refuse(
                f"{what}(...) must be called in the {self._word} block itself, not in a nested block or after it"
            )
        if self._given.get(what) is not None:
            self._refuse(f"{what}(...) is given twice")
        self._given[what] = value if later else self._expression(value)


class _BlockValue(Value):
    """The value of a block, with methods that set parts of the block."""

    __slots__ = ("_block",)

    def __init__(self, block: _Block[Any], expression: ex.Expression, builder: Builder) -> None:
        super().__init__(expression, builder)
        self._block = block


class ForEach(_Block[T]):
    """Run a block once per element of a list, iterator or async iterator; the elements run concurrently.

    Args:
        seq: the node, parameter or list of elements.
        concurrency: the maximum number of elements that run at the same time.
    """

    def __init__(self, seq: Iterable[T] | AsyncIterable[T], concurrency: int | None = None) -> None:
        super().__init__("ForEach")
        self._value = cast("T", Value(ex.Ref(node=self._node), self._builder))
        self._seq = self._expression(seq)
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            self._refuse(f"concurrency must be at least 1, not {concurrency!r}")
        self._concurrency = concurrency
        self._expect_with("with ForEach(...) as element")

    def _add(self, body: tuple[st.Statement, ...]) -> None:
        self._builder.add(st.ForEachStatement(id=self._node, seq=self._seq, concurrency=self._concurrency, body=body))


class RepeatValue(_BlockValue):
    """The value of a ``Repeat`` block: in the body, of this iteration; after the block, the final one."""

    __slots__ = ()

    def next(self, value: Any) -> None:
        """Set what the next iteration gets, and what the block's value is if this iteration is the last."""
        self._block.give("next", value)

    def until(self, condition: Any) -> None:
        """Set the condition to stop: the first iteration for which it holds is the last."""
        self._block.give("until", condition, later=True)


class Repeat(_Block[Any]):
    """Run a block sequentially: each iteration gets the value that the previous one passed to ``next``.

    Args:
        carry: the value for the first iteration.
        times: the maximum number of iterations.
        until: a condition, tested after each iteration: an expression, or a function of the value that was passed to
            ``next``. For a condition on other nodes of the block, call ``until(...)`` of the variable in the block.
    """

    def __init__(self, carry: Any, times: Any = None, until: Any = None) -> None:
        super().__init__("Repeat")
        self._value = RepeatValue(self, ex.Ref(node=self._node), self._builder)
        self._carry = self._expression(carry)
        self._times = None if times is None else self._expression(times)
        self._given["until"] = until
        self._expect_with("with Repeat(...) as current")

    def _add(self, body: tuple[st.Statement, ...]) -> None:
        following, until = self._given.get("next"), self._given["until"]
        if following is None:
            self._refuse("the block passes nothing on: call next(value) in it")
        if callable(until) and not isinstance(until, Value):
            until = until(Value(following, self._builder))
        statement = st.RepeatStatement(
            id=self._node,
            carry=self._carry,
            times=self._times,
            until=None if until is None else self._expression(until, is_condition=True),
            next=following,
            body=body,
        )
        self._builder.add(statement)


class If(_Block["If"]):
    """Run a block if a condition is true: ``with If(...) as branch``, ``with branch.otherwise()``.

    After the blocks, ``branch.value(a, b)`` is a value of the branch that ran.
    """

    def __init__(self, cond: Any) -> None:
        super().__init__("If")
        self._value = self
        self._cond = self._expression(cond, is_condition=True)
        self._home = self._builder.blocks[-1]
        self._statement: st.IfStatement | None = None
        self._valued = False
        self._expect_with("with If(...)")

    def _add(self, body: tuple[st.Statement, ...]) -> None:
        self._statement = st.IfStatement(id=self._node, cond=self._cond, body=body)
        self._builder.add(self._statement)

    def otherwise(self) -> Otherwise:
        """Return the block that runs if the condition is false."""
        if self._statement is None:
            self._refuse("otherwise() comes after the If block, not inside it")
        if self._builder.blocks[-1] is not self._home:
            self._refuse("otherwise() must be in the same block as its If")
        if self._statement.otherwise:
            self._refuse("otherwise() is used twice")
        if self._valued:
            self._refuse("otherwise() must come before value(...)")
        return Otherwise(self._builder, self._node, self.set_otherwise)

    def value(self, value: T, otherwise: T) -> T:
        """Return one of two values, by the branch that ran; for use after the blocks.

        Args:
            value: the value if the condition holds. It may be a node of the block.
            otherwise: the value if it does not hold. It may be a node of the ``otherwise`` block.
        """
        if self._statement is None:
            self._refuse("value(...) comes after the If block, not inside it")
        if self._builder.blocks[-1] is not self._home:
            self._refuse("value(...) must be in the same block as its If")
        self._valued = True
        node = self._builder.new_id()
        where = f"{st.ChoiceStatement.word}#{node}"
        statement = st.ChoiceStatement(
            id=node,
            branch=self._node,
            value=to_expression(value, self._builder, where),
            otherwise=to_expression(otherwise, self._builder, where),
        )
        self._builder.add(statement)
        return cast("T", Value(ex.Ref(node=node), self._builder))

    def set_otherwise(self, body: tuple[st.Statement, ...]) -> None:
        """Put the second body into the statement, which moves here: both bodies may use what is defined before."""
        assert self._statement is not None  # noqa: S101 - otherwise() checked it
        self._home.remove(self._statement)
        self._statement = msgspec.structs.replace(self._statement, otherwise=body)
        self._home.append(self._statement)


class Otherwise(_Block[None]):
    """The second block of an :class:`If`."""

    def __init__(self, builder: Builder, node: int, add: Callable[[tuple[st.Statement, ...]], None]) -> None:
        super().__init__("If", builder, node)
        self._value = None
        self._set = add
        self._expect_with("with branch.otherwise()")

    def _add(self, body: tuple[st.Statement, ...]) -> None:
        self._set(body)


class CacheValue(_BlockValue):
    """The value of a ``TryFromCache`` block."""

    __slots__ = ()

    def store(self, value: Any) -> None:
        """Set what the block's value is, and what the cache keeps, if the key was not in the cache."""
        self._block.give("store", value)


class TryFromCache(_Block[Any]):
    """Look a value up in a site's cache. The block runs, and stores a value, only if the key is not in the cache.

    Args:
        key: any value, which may contain nodes, such as ``("temps", day)``.
        site: the site whose cache is used; by default the site that computes the stored value.
    """

    def __init__(self, key: Any, site: Any = None) -> None:
        super().__init__("TryFromCache")
        self._value = CacheValue(self, ex.Ref(node=self._node), self._builder)
        self._key = self._expression(key)
        self._site: str | None = getattr(site, "name", site)
        self._expect_with("with TryFromCache(...) as cached")

    def _add(self, body: tuple[st.Statement, ...]) -> None:
        store = self._given.get("store")
        if store is None:
            self._refuse("the block stores nothing: call store(value) in it")
        self._builder.add(st.CacheStatement(id=self._node, key=self._key, store=store, site=self._site, body=body))
