"""Constants of a pipeline stay what they are, whatever operations do to them."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
from pydantic import BaseModel

from dfm_async import (
    Federation,
    ForEach,
    OperationContext,
    Pipeline,
    Repeat,
    RetryPolicy,
    Session,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.federation import Const, FromParam
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of, yielding

fed = Federation("constants")
lab, desk = fed.site("lab"), fed.site("desk")


@dataclasses.dataclass
class Point:
    x: int
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    tags: list[str]


class Model(BaseModel):
    tags: list[str]


def changed(value: Any) -> Any:
    """Changes whatever can be changed of a value, and gives what it was before."""
    before = copy.deepcopy(value)
    match value:
        case list() | collections.deque() | bytearray():
            value.append(1)
        case dict():
            for part in list(value.values()):
                changed(part)
            value["changed"] = True
        case set():
            value.add("changed")
        case tuple():
            for part in value:
                changed(part)
        case numpy.ndarray():
            value += 1
        case Point() | Frozen() | Model():
            value.tags.append("changed")
    return before


@lab.operation
def change(value: Any, number: int = 0) -> Any:
    return changed(value)


@desk.operation
async def change_on_loop(value: Any, number: int = 0) -> Any:
    return changed(value)


@lab.operation(retry=RetryPolicy(attempts=3, backoff=0.001))
def change_and_fail(value: Any, context: OperationContext) -> Any:
    before = changed(value)
    if context.attempt < 3:
        raise OSError("again")
    return before


@desk.operation(retry=RetryPolicy(attempts=3, backoff=0.001))
async def change_and_fail_on_loop(value: Any, context: OperationContext) -> Any:
    before = changed(value)
    if context.attempt < 3:
        raise OSError("again")
    return before


@lab.operation
def name_classes(frozen: Frozen, model: Model, point: Point) -> None:
    """Has FLARE take these classes from other sites."""


@lab.operation
def declared(point: Point, numbers: tuple[int, ...], rate: float) -> str:
    return repr((point, numbers, rate))


class Bound:
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    async def body(self, known: dict[str, list[int]], number: int) -> list[int]:
        self.seen.append(number)
        known["numbers"].append(number)
        return [len(self.seen), len(known["numbers"])]


fed.declare("remember", lambda number: None)
lab.adapt(
    "remember",
    Bound,
    bind={"known": Const({"numbers": [1]}), "number": FromParam("number")},
    args={"seen": [0]},
)


class Plain:
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def body(self, number: int) -> int:
        self.seen.append(number)
        return len(self.seen)


plain = lab.operation(Plain, name="plain", args={"seen": []})

VALUES: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "nested": lambda: {"a": [[1], {"b": [2]}], "c": ([3], "text")},
    "set": lambda: {1, 2},
    "tuple": lambda: (1, [2]),
    "bytearray": lambda: bytearray(b"abc"),
    "deque": lambda: collections.deque([1]),
    "array": lambda: numpy.arange(3),
    "dataclass": lambda: Point(1, ["a"]),
    "frozen dataclass": lambda: Frozen(["a"]),
    "model": lambda: Model(tags=["a"]),
}


async def values(session: Session, pipeline: Pipeline, params: Any = {}) -> list[Any]:  # noqa: B006
    job = await session.execute(pipeline, params)
    return [result.value async for result in job.results(ordered=True)]


def same(found: Any, expected: Any) -> bool:
    return bool(numpy.array_equal(found, expected)) if isinstance(expected, numpy.ndarray) else found == expected


async def test_an_operation_that_changes_a_constant_changes_only_its_own(connect: Connect, target: str) -> None:
    with Pipeline("all") as pipeline:
        for name, make in VALUES.items():
            if name == "deque" and target == "flare":  # it would have to be pickled
                continue
            for operation in (change, change_on_loop):
                with ForEach([1, 2]) as number:
                    Yield(operation(make(), number), place=f"{name} {operation.name}")
    async with connect(fed) as session:
        plan = await session.prepare(pipeline)
        for _ in range(2):
            job = await session.execute(plan, [{}, {}])
            async for result in job.results():
                expected = VALUES[result.place.rpartition(" ")[0]]()
                assert same(result.value, expected), result.place
    async with connect(fed) as session:  # a pipeline outlives its sessions
        async for result in (await session.execute(pipeline)).results():
            assert same(result.value, VALUES[result.place.rpartition(" ")[0]]()), result.place


async def test_constants_of_a_call_are_made_anew_for_each_attempt(session: Session) -> None:
    with Pipeline("again") as pipeline:
        number = change(1)
        for operation in (change_and_fail, change_and_fail_on_loop):
            Yield(operation([1, [2]]), place=f"constant {operation.name}")
            Yield(operation([number, [2]]), place=f"list {operation.name}")
            Yield(operation({"a": number, "b": [2]}), place=f"dict {operation.name}")
    found = await (await session.execute(pipeline)).collect()
    assert len(found) == 6
    for result in found:
        expected = {"a": 1, "b": [2]} if result.place.startswith("dict") else [1, [2]]
        assert result.value == expected, result.place


async def test_constants_of_loops_caches_and_yields_stay_what_they_are(session: Session) -> None:
    with Pipeline("blocks") as pipeline:
        with ForEach([[1], [2]]) as element:
            first = change(element)
        Yield(collect(first), place="loop")
        with Repeat([0], times=2) as current:
            current.next(change(current))
        Yield(current, place="repeat")
        with TryFromCache(("key", (1, 2))) as cached:
            cached.store([1, 2])
        Yield(change(cached), place="cache")
        Yield([7], place="constant")
    for _ in range(3):
        found = {result.place: result.value for result in await (await session.execute(pipeline)).collect()}
        assert found == {"loop": [[1], [2]], "repeat": [0], "cache": [1, 2], "constant": [7]}
        found["constant"].append("changed by the application")


async def test_parameters_of_the_caller_are_not_changed(session: Session) -> None:
    pipeline = pipeline_of(change, "value")
    shared = {"a": [1]}
    assert await values(session, pipeline, [{"value": shared}] * 3) == [{"a": [1]}] * 3
    assert shared == {"a": [1]}


async def test_later_changes_of_a_constant_do_not_change_the_pipeline(session: Session) -> None:
    numbers, point = [1], Point(1)
    pipeline = yielding(lambda: change({"numbers": numbers, "point": point}))
    numbers.append(2)
    point.tags.append("later")
    for _ in range(2):
        assert await values(session, pipeline) == [{"numbers": [1], "point": Point(1)}]


async def test_constants_that_a_site_binds_stay_what_they_are(session: Session) -> None:
    with Pipeline("bound") as pipeline:
        with ForEach([1, 2]) as number:
            Yield(fed.operations["remember"](number), place="bound")
        Yield(plain(1), place="plain")
    for _ in range(2):
        found = [(r.place, r.value) for r in await (await session.execute(pipeline)).collect()]
        assert sorted(found) == [("bound", [2, 2]), ("bound", [3, 2]), ("plain", 1)]


async def test_a_constant_is_converted_to_the_declared_type_as_a_parameter_is(session: Session) -> None:
    with Pipeline("constants") as constants:
        Yield(declared({"x": 3}, [1, 2], 1))  # type: ignore[call-overload]
    parameters = pipeline_of(declared, "p", "n", "r")
    loaded = fed.pipeline_from_dfm(fed.pipeline_to_dfm(constants))
    expected = [repr((Point(3), (1, 2), 1.0))]
    assert await values(session, parameters, {"p": {"x": 3}, "n": [1, 2], "r": 1}) == expected
    assert await values(session, constants) == expected
    assert await values(session, loaded) == expected
