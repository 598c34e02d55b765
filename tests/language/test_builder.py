"""What users write becomes statements; what makes no sense is refused where it is written."""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import datetime
import decimal
import fractions
import inspect
import io
import json
import math
import os
import pathlib
import pickle
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import (
    Advise,
    BestOf,
    Federation,
    ForEach,
    If,
    Pipeline,
    PipelineError,
    PlaceParam,
    Repeat,
    RetryPolicy,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.errors import PlaceholderError
from dfm_async.language import expressions as ex
from dfm_async.language import statements
from dfm_async.planning.prepare import prepare

fed = Federation("builder")
here = fed.site("here")


@here.operation
def load(x: Any = None, y: Any = None) -> Any:
    return (x, y)


@here.operation
def stream(n: int) -> Iterator[int]:
    yield from range(n)


def yielded(pipeline: Pipeline) -> Any:
    last = pipeline.body[-1]
    assert isinstance(last, statements.YieldStatement)
    return last.value


@contextmanager
def refused(statement: str, message: str) -> Iterator[None]:
    with pytest.raises(PipelineError) as caught:
        yield
    (problem,) = caught.value.problems
    assert statement in problem.statement
    assert message in problem.message


# values


def test_fields_of_a_value_are_steps_in_the_order_written() -> None:
    with Pipeline() as p:
        Yield(load(1)[0]["key"].name[-1])
    assert yielded(p) == ex.Ref(
        node=0, path=(ex.Item(key=0), ex.Item(key="key"), ex.Attribute(name="name"), ex.Item(key=-1))
    )


def test_a_parameter_has_fields_too() -> None:
    with Pipeline() as p:
        Yield(PlaceParam("x").day[3])
    assert yielded(p) == ex.Parameter(name="x", path=(ex.Attribute(name="day"), ex.Item(key=3)))


@given(st.recursive(st.integers(0, 2), lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)))
def test_values_inside_lists_and_tuples_become_expressions_and_the_rest_constants(shape: Any) -> None:
    """A 0 stands for a node."""

    def fill(part: Any, node: Any) -> Any:
        if isinstance(part, int):
            return node if part == 0 else part
        return type(part)(fill(inner, node) for inner in part)

    def expected(part: Any) -> Any:
        if isinstance(part, int):
            return ex.Ref(node=0) if part == 0 else ex.Constant(value=part)
        items = tuple(map(expected, part))
        if all(isinstance(item, ex.Constant) for item in items):
            return ex.Constant(value=part)
        return ex.Items(type=cast("Any", type(part).__name__), items=items)

    with Pipeline() as p:
        Yield(fill(shape, load()))
    assert yielded(p) == expected(shape)


def test_nodes_inside_dicts_and_sets_are_found() -> None:
    with Pipeline() as p:
        node, key = load(), PlaceParam("k")
        Yield({"a": node, key: [1, {node}]})
    assert yielded(p) == ex.Entries(
        entries=(
            (ex.Constant(value="a"), ex.Ref(node=0)),
            (
                ex.Parameter(name="k"),
                ex.Items(type="list", items=(ex.Constant(value=1), ex.Items(type="set", items=(ex.Ref(node=0),)))),
            ),
        )
    )


@dataclasses.dataclass(frozen=True)
class Holder:
    value: Any


class Named(NamedTuple):
    value: Any


@pytest.mark.parametrize("wrap", [Holder, Named, lambda v: frozenset({v}), lambda v: [Holder(v)]])
def test_a_value_hidden_where_it_cannot_be_found_is_refused_by_name(wrap: Callable[[Any], Any]) -> None:
    """It would arrive at the operation as a part of the builder."""
    with pytest.raises(PipelineError, match="load#1"):
        with Pipeline("hidden") as p:
            Yield(load(wrap(load())))
        prepare(p, fed, "app")


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda a, b: a == b, "=="),
        (lambda a, b: a != b, "!="),
        (lambda a, b: a < b, "<"),
        (lambda a, b: a <= b, "<="),
        (lambda a, b: a > b, ">"),
        (lambda a, b: a >= b, ">="),
    ],
)
def test_comparisons_become_conditions_from_both_sides(make: Callable[[Any, Any], Any], op: Any) -> None:
    mirrored: Any = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(op, op)
    with Pipeline() as p:
        node = load()
        Yield(make(node, 5), place="a")
        Yield(make(5, node), place="b")
    first, second = (s.value for s in p.body[1:] if isinstance(s, statements.YieldStatement))
    assert first == ex.Comparison(op=op, left=ex.Ref(node=0), right=ex.Constant(value=5))
    assert second == ex.Comparison(op=mirrored, left=ex.Ref(node=0), right=ex.Constant(value=5))


def test_and_or_not_combine_conditions_in_the_order_written() -> None:
    with Pipeline() as p:
        node = load()
        Yield(~((node > 1) & node.ok | True), place="a")
        Yield(False | node, place="b")
        Yield(True & node, place="c")
    values = [s.value for s in p.body[1:] if isinstance(s, statements.YieldStatement)]
    both = ex.Combination(
        op="and",
        terms=(
            ex.Comparison(op=">", left=ex.Ref(node=0), right=ex.Constant(value=1)),
            ex.Ref(node=0, path=(ex.Attribute(name="ok"),)),
        ),
    )
    assert values[0] == ex.Negation(term=ex.Combination(op="or", terms=(both, ex.Constant(value=True))))
    assert values[1] == ex.Combination(op="or", terms=(ex.Constant(value=False), ex.Ref(node=0)))
    assert values[2] == ex.Combination(op="and", terms=(ex.Constant(value=True), ex.Ref(node=0)))


@pytest.mark.parametrize(
    ("misuse", "statement", "hint"),
    [
        (bool, "n0", "If"),
        (lambda node: node > 1 and node < 5, "n0 > 1", "If"),
        (list, "n0", "ForEach"),
        (lambda node: 1 in node, "n0", "operation"),
        (len, "n0", "length yet: its value is known only when the pipeline runs. Write an operation"),
        (lambda node: 0 < node < 2, "n0 > 0", "(a < b) & (b < c)"),
        (lambda node: node in [1, 2], "n0 == 1", "(a == b) | (a == c) instead of a in [b, c]"),
        (lambda node: (node > 1).name, "n0 > 1", "fields"),
        (lambda node: node[1:2], "n0", "string or a number, not by slice(1, 2, None). Write an operation"),
        (lambda node: node[node], "n0", "string or a number"),
        (lambda node: node | 4, "n0", "| combines conditions, not 4:"),
        (lambda node: 1 & node, "n0", "& combines conditions, not 1:"),
        (lambda node: node | {"more": 1}, "n0", "| combines conditions, not {'more': 1}:"),
        (lambda node: {"more": node} | node, "n0", "| combines conditions"),
        (lambda node: (node > 1) & "text", "n0 > 1", "& combines conditions"),
        (lambda node: Yield(node | node), "Yield", "(n0) | (n0) is a condition over values that are not compared"),
        (lambda node: Yield([~node]), "Yield", "~(n0) is a condition over values that are not compared"),
        (lambda node: load(node & ~node), "load#1", "only If and until take it"),
        (lambda node: (node & node) == 1, "a comparison", "only If and until take it"),
        (lambda node: load(ForEach([1])), "load#2", "'with ForEach(...) as ...'"),
        (lambda node: load(deadline=cast(Any, "x")), "load#1", "deadline= takes a positive number of seconds, not 'x'"),
        (lambda node: load(deadline=0), "load#1", "deadline= takes a positive number of seconds, not 0"),
        (lambda node: load(retry=cast(Any, 3)), "load#1", "retry= takes a RetryPolicy, not 3"),
    ],
)
def test_the_hint_of_a_misused_value_names_what_to_use(misuse: Callable[[Any], Any], statement: str, hint: str) -> None:
    with Pipeline():
        node = load()
        with refused(statement, hint):
            misuse(node)


def test_conditions_take_the_truth_of_values_and_pass_comparisons_on_as_values() -> None:
    with Pipeline() as p:
        a, b = load(), load()
        with If(a & ~b | True):
            Yield((a > 1) & ~(b == 2))
        with Repeat(0, times=2) as x:
            x.next(a)
            x.until(a | b)
    assert "If(((n0) & (~(n1))) | (True))" in str(p)
    assert "Yield((n0 > 1) & (~(n1 == 2))" in str(p)


def test_python_can_inspect_a_value_without_making_fields() -> None:
    with Pipeline():
        node = load()
        assert not hasattr(node, "__len_hint__")
        assert repr(node[0].x) == "<n0[0].x>"
        assert {node: 1}[node] == 1


PLACEHOLDERS: dict[str, Callable[[], Any]] = {
    "node": load,
    "parameter": lambda: PlaceParam("x"),
    "item": lambda: load()["key"],
    "attribute": lambda: PlaceParam("x").name,
    "comparison": lambda: load() > 1,
    "negation": lambda: ~load(),
    "element": lambda: ForEach([1]).__enter__(),
    "iteration": lambda: Repeat(0, times=1).__enter__(),
    "cached": lambda: TryFromCache("key").__enter__(),
}

MISUSES: dict[str, Callable[[Any], object]] = {
    "f-string": lambda v: f"/data/{v}.csv",
    "f-string with a format": lambda v: f"{v:>10}",
    "str": str,
    "percent": lambda v: "/data/%s.csv" % v,  # noqa: UP031 - the test is the point
    "percent of a dict": lambda v: "%(name)s" % {"name": v},  # noqa: UP031 - the test is the point
    "format": lambda v: "{}".format(v),  # noqa: UP032 - the test is the point
    "format of a keyword": lambda v: "{name}".format(name=v),  # noqa: UP032 - the test is the point
    "percent operator": lambda v: v % 2,
    "add": lambda v: v + 1,
    "add to a text": lambda v: "a" + v,
    "add to a list": lambda v: [1] + v,  # noqa: RUF005 - the test is the point
    "add to an array": lambda v: numpy.arange(3) + v,
    "multiply with a number of numpy": lambda v: numpy.float64(2) * v,
    "function of numpy": numpy.sqrt,
    "function of several arrays": lambda v: numpy.concatenate([v, v]),
    "mean": numpy.mean,
    "array": numpy.array,
    "multiply": lambda v: 2 * v,
    "power": lambda v: v**2,
    "divide": lambda v: 1 / v,
    "path": lambda v: pathlib.Path("/data") / v,
    "negative": lambda v: -v,
    "abs": abs,
    "round": round,
    "floor": math.floor,
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes,
    "hex": hex,
    "index": lambda v: [1, 2][v],
    "range": range,
    "fspath": os.fspath,
    "open": lambda v: open(v),  # noqa: SIM115 - it does not get that far
    "method": lambda v: v(),
    "iterate": list,
    "next": next,
    "unpack": lambda v: dict(**v) if not isinstance(v, (int, float)) else None,
    "star": lambda v: print(*v),
    "length": len,
    "search": lambda v: 1 in v,
    "member": lambda v: v in [1, 2],
    "truth": bool,
    "reversed": reversed,
    "enter": lambda v: v.__enter__(),
    "set an item": lambda v: v.__setitem__(0, 1),
    "delete an item": lambda v: v.__delitem__(0),
    "set an attribute": lambda v: setattr(v, "name", 1),
    "delete an attribute": lambda v: delattr(v, "name"),
    "pickle": pickle.dumps,
    "await": lambda v: v.__await__(),
}


@pytest.mark.parametrize("made", PLACEHOLDERS)
def test_a_value_that_does_not_exist_yet_is_refused_where_it_is_needed(made: str) -> None:
    for name, misuse in MISUSES.items():
        with Pipeline("p") as pipeline, pytest.raises(PipelineError) as caught:
            misuse(PLACEHOLDERS[made]())
        assert caught.value.pipeline == "p", name
        del pipeline
        if not (made in ("comparison", "negation") and name == "unpack"):  # they have no fields at all
            assert isinstance(caught.value, PlaceholderError), name
            assert isinstance(caught.value, TypeError), name


@pytest.mark.parametrize("made", PLACEHOLDERS)
@pytest.mark.parametrize("misuse", ["".join, json.dumps, sum], ids=["join", "json", "sum"])
def test_code_that_needs_a_value_is_refused_with_a_hint(misuse: Callable[[Any], object], made: str) -> None:
    with pytest.raises(PlaceholderError, match="Write an operation"), Pipeline("p"):
        misuse([PLACEHOLDERS[made]()])


def test_an_error_that_is_not_about_a_value_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"^unsupported") as caught, Pipeline("p"):
        Yield(1 + None)  # type: ignore[operator]
    assert type(caught.value) is TypeError


def test_hints_say_what_to_write_instead_of_range_and_max() -> None:
    with Pipeline("p"):
        with pytest.raises(PlaceholderError, match="with Repeat"):
            range(PlaceParam("count"))
        with pytest.raises(PlaceholderError, match="Instead of max, min and sorted, write an operation"):
            max(load(), load())


def test_a_number_of_numpy_is_compared_from_the_left() -> None:
    with Pipeline("p") as pipeline:
        Yield(numpy.float64(2) < PlaceParam("x"), place="less")
        Yield(numpy.float64(2) >= PlaceParam("x"), place="greater")
        Yield(numpy.float64(2) == PlaceParam("x"), place="equal")
    assert re.findall(r"Yield\((.*), place", str(pipeline)) == [
        "PlaceParam('x') > np.float64(2.0)",
        "PlaceParam('x') <= np.float64(2.0)",
        "PlaceParam('x') == np.float64(2.0)",
    ]


def test_every_special_method_of_python_works_or_is_refused() -> None:
    kinds: list[Any] = [int, float, complex, str, bytes, bytearray, memoryview, list, tuple, dict, set, frozenset]
    kinds += [types.FunctionType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, io.BytesIO]
    kinds += [pathlib.Path, decimal.Decimal, fractions.Fraction, datetime.timedelta, collections.deque, asyncio.Future]
    kinds += [range, collections.Counter, asyncio.Lock]
    special = {name for kind in kinds for name in dir(kind) if name.startswith("__") and name.endswith("__")}
    special -= set(dir(object)) - {"__str__", "__format__", "__reduce__", "__reduce_ex__", "__delattr__"}
    works = {"__getitem__", "__and__", "__rand__", "__or__", "__ror__", "__invert__", "__copy__", "__deepcopy__"}
    # What belongs to a class, to the making of an object, or to one kind of object only.
    neutral = {"__class_getitem__", "__getnewargs__", "__alloc__", "__missing__", "__del__", "__get__", "__setstate__"}
    neutral |= {"__dict__", "__module__", "__weakref__", "__abstractmethods__", "__orig_bases__", "__parameters__"}
    neutral |= {"__name__", "__qualname__", "__code__", "__globals__", "__closure__", "__defaults__", "__builtins__"}
    neutral |= {"__kwdefaults__", "__annotations__", "__type_params__", "__annotate__", "__slots__", "__match_args__"}
    neutral |= {"__static_attributes__", "__firstlineno__", "__release_buffer__", "__replace__", "__getformat__"}
    # Those that change an object in place fall back to the others.
    neutral |= {name for name in special if name.startswith("__i") and f"__{name[3:]}" in special}
    with Pipeline("p"):
        node = load()
        for name in sorted(special - neutral - works):
            method = getattr(type(node), name, None)
            assert method is not None, f"{name} is neither supported nor refused"
            with pytest.raises(PlaceholderError, match=r"^pipeline 'p': n0: "):
                method(node, "other")


def test_the_hint_of_a_refused_text_names_the_value_and_a_remedy() -> None:
    with Pipeline("p"):
        with pytest.raises(PlaceholderError, match=r"n0\.name: cannot be formatted as text.*Write an operation"):
            f"{load().name}"
        with pytest.raises(PlaceholderError, match=r"Advise\(\): cannot be formatted as text"):
            f"{Advise()}"
        with pytest.raises(PlaceholderError, match=r"PlaceParam\('y'\): cannot be formatted as text"):
            load(f"/data/{PlaceParam('y')}.csv")


def test_the_name_of_a_value_is_refused_as_a_part_of_a_constant() -> None:
    def inside(value: Any) -> list[Any]:
        return [f"{value!r}.csv", str([value]), {"paths": [f"{(value, 1)}"]}]

    with Pipeline("p") as pipeline:
        node = load()
        for text in inside(node):
            with pytest.raises(PipelineError, match=r"holds the name of <n0>, not its value"):
                load(text)
        load("<n1> and n0 are just texts")
    assert len(pipeline.body) == 2


def test_copies_of_a_value_are_the_value() -> None:
    with Pipeline("p") as pipeline:
        node = load()
        load(copy.deepcopy({"a": [node]}), copy.copy(node))
    last = pipeline.body[-1]
    assert isinstance(last, statements.CallStatement)
    assert last.args["y"] == ex.Ref(node=0)


# calls


def test_a_call_records_its_arguments_by_name_and_its_options() -> None:
    policy = RetryPolicy(attempts=2, on=(KeyError,))
    with Pipeline() as p:
        first = load(1)
        load(first, y=[first], site=here, provider="fast", after=first, retry=policy, deadline=5)
        load(site=BestOf([here, "there"]), after=[first, first["a"]])
        load(site="elsewhere")
    plain, full, best, fixed = (s for s in p.body if isinstance(s, statements.CallStatement))
    assert plain == statements.CallStatement(id=0, operation="load", args={"x": ex.Constant(value=1)})
    assert full.args == {"x": ex.Ref(node=0), "y": ex.Items(type="list", items=(ex.Ref(node=0),))}
    assert (full.site, full.provider, full.after, full.retry, full.deadline) == ("here", "fast", (0,), policy, 5.0)
    assert best.site == BestOf(["here", "there"])
    assert best.after == (0, 0)
    assert fixed.site == "elsewhere"


def test_a_call_that_does_not_fit_its_signature_is_refused_where_it_is_written() -> None:
    with Pipeline():
        with pytest.raises(TypeError, match=r"load\(\).*'z'"):
            load(z=1)
        with pytest.raises(TypeError, match=r"stream\(\).*'n'"):
            stream()  # type: ignore[call-overload]
        with refused("load#", "site="):
            load(site=5)
        with refused("load#", "after="):
            load(after=PlaceParam("p"))
        with refused("load#", "after="):
            load(after=3)


# blocks


def test_blocks_hold_what_is_written_inside_them() -> None:
    with Pipeline() as p:
        with ForEach(stream(3), concurrency=2) as element:
            inner = load(element)
            with If(inner > 1) as branch:
                load(1)
            with branch.otherwise():
                load(2)
        every = collect(inner)
        with Repeat(every, times=3, until=lambda value: value > 5) as current:
            current.next(load(current))
        with TryFromCache(key=("k", current), site=here) as cached:
            cached.store(load(current))
        Yield(cached)
    _, loop, gather, repeat, cache, last = p.body
    assert isinstance(loop, statements.ForEachStatement)
    assert (loop.seq, loop.concurrency) == (ex.Ref(node=0), 2)
    call, branch_statement = loop.body
    assert isinstance(branch_statement, statements.IfStatement)
    assert call.id == 2
    assert [s.id for s in branch_statement.body] == [4]
    assert [s.id for s in branch_statement.otherwise] == [5]
    assert isinstance(gather, statements.CollectStatement)
    assert gather.node == call.id
    assert isinstance(repeat, statements.RepeatStatement)
    assert (repeat.carry, repeat.times) == (ex.Ref(node=6), ex.Constant(value=3))
    assert repeat.next == ex.Ref(node=8)
    assert repeat.until == ex.Comparison(op=">", left=ex.Ref(node=8), right=ex.Constant(value=5))
    assert isinstance(cache, statements.CacheStatement)
    assert (cache.site, cache.store) == ("here", ex.Ref(node=10))
    assert isinstance(last, statements.YieldStatement)
    assert last.value == ex.Ref(node=9)


def test_otherwise_may_use_what_is_between_it_and_its_if() -> None:
    with Pipeline("between") as p:
        x = PlaceParam("x")
        with If(x > 1) as branch:
            Yield(1, place="a")
        between = load(5)
        with branch.otherwise():
            Yield(between, place="b")
    prepare(p, fed, "app")
    assert [type(s).__name__ for s in p.body] == ["CallStatement", "IfStatement"]


def test_misuse_of_repeat_is_refused_with_its_name() -> None:
    with Pipeline("misuse"):
        with refused("Repeat#0", "call next"), Repeat(1, times=2):
            load()
        with refused("Repeat#2", "twice"), Repeat(1, times=2) as current:
            current.next(1)
            current.next(2)
        with refused("Repeat#3", "until(...) is given twice"), Repeat(1, until=lambda v: v > 1) as current:
            current.until(current > 5)
        with refused("Repeat#4", "nested block"), Repeat(1, times=2) as current, If(current > 1):
            current.next(2)
        with Repeat(1, times=2) as current:
            current.next(2)
        with refused("Repeat#6", "after it"):
            current.next(3)
        with refused("Repeat#6", "after it"):
            current.until(current > 1)


def test_misuse_of_a_cache_block_is_refused_with_its_name() -> None:
    with Pipeline():
        with refused("TryFromCache#0", "stores nothing"), TryFromCache("k"):
            load()
        with refused("TryFromCache#2", "twice"), TryFromCache("k") as found:
            found.store(1)
            found.store(2)
        with refused("TryFromCache#3", "itself"), TryFromCache("k") as found, If(load() > 1):
            found.store(1)
        with TryFromCache("k") as found:
            found.store(1)
        with refused("TryFromCache#6", "itself"):
            found.store(2)


def test_misuse_of_otherwise_is_refused_with_its_name() -> None:
    with Pipeline():
        node = load()
        with If(node > 1) as branch:
            load()
            with refused("If#1", "after the If block"):
                branch.otherwise()
        with ForEach([1]), refused("If#1", "same block"):
            branch.otherwise()
        with branch.otherwise():
            load()
        with refused("If#1", "twice"):
            branch.otherwise()


def test_the_truth_of_a_block_is_refused_with_a_remedy() -> None:
    made: tuple[Callable[[Any], Any], ...] = (If, ForEach, lambda node: Repeat(node, times=1), TryFromCache)
    for make in made:
        with pytest.raises(PipelineError, match=r"#1: is a block, .*If\(\(a > 1\) & \(b < 3\)\)"), Pipeline():
            node = load()
            with make(node) and make(node):
                load()
    with pytest.raises(PipelineError, match="If#1: is a block"), Pipeline():
        with If(load()) as branch:
            load()
        assert branch.otherwise()


def test_blocks_that_are_never_entered_are_reported_with_their_lines() -> None:
    with pytest.raises(PipelineError) as caught, Pipeline("dropped") as p:
        node = load()
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        ForEach(node)
        If(node > 1)
        with Repeat(node, times=2) as current:
            TryFromCache("key")
            current.next(node)
        with If(node > 1) as branch:
            load()
        branch.otherwise()
        load()
        Repeat(node, times=1)
    assert caught.value.pipeline == "dropped"
    lines = [line, line + 1, line + 3, line + 7, line + 9]
    assert [(found.statement, found.message.partition(" is never")[0]) for found in caught.value.problems] == [
        (label, f"the block created in test_builder.py, line {at},")
        for label, at in zip(["ForEach#1", "If#2", "TryFromCache#4", "If#5", "Repeat#8"], lines, strict=True)
    ]
    assert "write 'with branch.otherwise():'" in caught.value.problems[3].message
    assert p.body == ()


def test_a_pipeline_function_refuses_a_block_that_is_never_entered() -> None:
    with pytest.raises(PipelineError, match=r"pipeline 'bare': ForEach#1: .* is never entered"):

        @fed.pipeline
        def bare(x: int) -> Any:
            found = load(x)
            ForEach([found])
            return found


def test_a_block_whose_constructor_raised_is_not_reported_again() -> None:
    with Pipeline() as p:
        node = load()
        with refused("ForEach#1", "concurrency"):
            ForEach([1], concurrency=0)
        with refused("Yield", "without its block"):
            Yield(If(node))
    assert len(p.body) == 1


def test_wrong_options_of_blocks_are_refused() -> None:
    with Pipeline():
        for wrong in (0, -1, "two"):
            with refused("ForEach#", "concurrency"):
                ForEach([1], concurrency=wrong)  # type: ignore[arg-type]
        with refused("PlaceParam", "non-empty"):
            PlaceParam("")
        with refused("collect#", "takes a node"):
            collect(PlaceParam("x"))
        with refused("collect#", "takes a node"):
            collect([1])


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: PlaceParam("x"), "PlaceParam('x')"),
        (lambda: Yield(1, place="p"), "Yield(place='p')"),
        (lambda: collect(1), "collect"),
        (lambda: ForEach([1]), "ForEach"),
        (lambda: Repeat(1, times=1), "Repeat"),
        (lambda: If(True), "If"),
        (lambda: TryFromCache("k"), "TryFromCache"),
    ],
)
def test_statements_outside_a_pipeline_are_refused(use: Callable[[], Any], name: str) -> None:
    with refused(name, "inside a 'with Pipeline(...)' block"):
        use()
    with Pipeline():
        pass
    with refused(name, "inside a 'with Pipeline(...)' block"):
        use()


def test_a_value_of_another_pipeline_is_refused_with_that_pipelines_name() -> None:
    with Pipeline("first"):
        stranger = load()
        parameter = PlaceParam("x")
    with Pipeline("second") as second:
        node = load()
        with refused("load#1", "'first'"):
            load(stranger)
        with refused("Yield", "'first'"):
            Yield([stranger])
        with refused("ForEach", "'first'"):
            ForEach(parameter)
        with refused("comparison", "'first'"):
            node == stranger  # noqa: B015 - the comparison is the test
        with refused("load#", "'first'"):
            load(after=stranger)
    assert [s.id for s in second.body] == [0], "nothing of a refused statement is left"


# the open pipeline


def test_a_pipeline_can_be_built_only_once() -> None:
    with Pipeline("once") as p:
        load()
    with pytest.raises(PipelineError, match="already built"), p:
        pass
    with Pipeline("open") as p, pytest.raises(PipelineError, match="already built"), p:
        pass


def test_an_exception_in_the_block_leaves_no_open_pipeline_and_no_statements() -> None:
    p = Pipeline("broken")
    with pytest.raises(ZeroDivisionError), p:
        load()
        1 / 0  # noqa: B018 - raises
    assert p.body == ()
    with pytest.raises(PipelineError):
        PlaceParam("x")


def test_a_pipeline_inside_another_one_is_built_apart() -> None:
    with Pipeline("outer") as outer:
        load(1)
        with Pipeline("inner") as inner:
            load("inner")
        load(2)
    assert [s.args["x"].value for s in outer.body] == [1, 2]  # type: ignore[union-attr]
    assert [s.args["x"].value for s in inner.body] == ["inner"]  # type: ignore[union-attr]


async def test_two_tasks_build_pipelines_at_the_same_time() -> None:
    turn = asyncio.Barrier(2)

    async def build(name: str) -> Pipeline:
        with Pipeline(name) as p:
            for i in range(3):
                load(f"{name}{i}")
                await turn.wait()
                with ForEach([1]) as element:
                    await turn.wait()
                    load(element)
        return p

    a, b = await asyncio.gather(build("a"), build("b"))
    for name, p in (("a", a), ("b", b)):
        assert [s.args["x"].value for s in p.body[::2]] == [f"{name}{i}" for i in range(3)]  # type: ignore[union-attr]
        assert [len(s.body) for s in p.body[1::2]] == [1, 1, 1]  # type: ignore[union-attr]
        prepare(p, fed, "app")


async def test_a_task_started_inside_a_block_can_add_to_it() -> None:
    async def part() -> None:
        load(2)

    with Pipeline() as p:
        load(1)
        await asyncio.create_task(part())
    assert len(p.body) == 2


def test_loading_a_pipeline_inside_an_open_block_adds_nothing_to_it(tmp_path: Any) -> None:
    with Pipeline("stored") as stored:
        with ForEach([1, 2]) as element:
            load(element)
        Yield(5)
    stored.save_to_file(tmp_path / "p.json")
    text = stored.model_dump_json()
    with Pipeline("open") as p:
        load(1)
        with ForEach([1]):
            again = Pipeline.model_validate_json(text)
            more = Pipeline.load_from_file(tmp_path / "p.json")
    assert again == more == stored
    assert [type(s).__name__ for s in p.body] == ["CallStatement", "ForEachStatement"]
    assert p.body[1].body == ()  # type: ignore[union-attr]
