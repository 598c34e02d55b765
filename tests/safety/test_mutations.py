"""Documents that are almost right: whatever is changed in one, it is refused, or it works."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dfm_async import (
    Federation,
    ForEach,
    If,
    JobFailed,
    ParameterError,
    Pipeline,
    PipelineError,
    PlaceParam,
    Repeat,
    Session,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.discovery import Discovery, ErrorFieldAdvice, SingleFieldAdvice
from dfm_async.errors import EncodingError
from dfm_async.federation.dfm_json import read_pipeline, write_pipeline
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import prepare
from dfm_async.wire.codec import Codec
from tests.wire.shapes import values

fed = Federation("target")
left, right = fed.site("left"), fed.site("right")


@left.operation
def source(n: Any = 3) -> list[int]:
    return [1, 2, 3]


@right.operation
async def inc(x: Any = 0, y: Any = None) -> int:
    return 1 + (x if isinstance(x, int) else 0)


with Pipeline("everything") as everything:
    numbers = source(PlaceParam("n"))
    with ForEach(numbers, concurrency=2) as number:
        more = inc(number, [number, {"k": numbers}])
        with If((more > 1) | (more == 7)) as branch:
            Yield(more, place="big")
        with branch.otherwise():
            Yield(number, place="small")
    with Repeat(1, times=3) as current:
        current.next(inc(current))
    with TryFromCache(("k", 1), site="left") as cached:
        cached.store(inc(3))
    Yield([collect(more), current, cached], place="out", after=[numbers])

with Pipeline("simple", api_version="0.0.1") as simple:
    first = source(PlaceParam("n"), site=left)
    with ForEach(first) as item:
        Yield(inc(item, 3.5))

OURS = json.loads(everything.model_dump_json())
THEIRS = json.loads(json.dumps(write_pipeline(simple, fed)))
PLAN = json.loads(prepare(everything, fed, "home").to_json())
TREE = SingleFieldAdvice(field="x", value=[1], edge=ErrorFieldAdvice("no"), form="one of")
FOUND = json.loads(Discovery("d", {"s": {"n": TREE, "m": None}}).to_json())

HOSTILE: list[Any] = [
    None, True, 0, -1, 2**63, 10**30, 1.5, 1e308, "", "a", "os.system", "__class__", "#discover", "../x", "\x00",
    "a" * 5000, [], {}, [[]], {"": 1}, {"kind": "constant", "value": 1}, {"kind": "ref", "node": 0}, {"kind": "advise"},
    {"tag": "@dfm-node", "ident": 0}, {"tag": "@dfm-advise", "advise": "Field"},
    {"id": {"tag": "@dfm-node", "ident": 0}, "sel": None, "issubs": False}, {"operator": "not", "exp": 1},
]  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(data[key], (*path, key))


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three changes."""
    data = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(data)) or [()]))
        if not path:
            return data
        target = data
        for key in path[:-1]:
            target = target[key]
        match draw(st.sampled_from(["replace", "replace", "drop", "repeat", "add"])):
            case "drop":
                del target[path[-1]]
            case "repeat" if isinstance(target, list):
                target.append(copy.deepcopy(target[path[-1]]))
            case "add" if isinstance(target, dict):
                target[str(draw(st.sampled_from(HOSTILE)))[:40]] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
            case _:
                target[path[-1]] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
    return data


def use(pipeline: Pipeline) -> None:
    assert str(pipeline)
    assert pipeline.to_mermaid()
    assert Pipeline.model_validate(pipeline.model_dump()) == pipeline
    if pipeline.mode == "execute":
        plan = prepare(pipeline, fed, "home")
        assert Plan.from_json(plan.to_json()).hash == plan.hash


@given(changed(OURS))
def test_a_changed_pipeline_is_refused_or_can_be_used(data: Any) -> None:
    try:
        use(Pipeline.model_validate(data))
    except PipelineError as error:
        assert error.problems  # noqa: PT017 - both are fine


@given(changed(THEIRS))
def test_a_changed_pipeline_of_dfm_is_refused_or_can_be_used(data: Any) -> None:
    try:
        use(read_pipeline(data, fed))
    except PipelineError as error:
        assert error.problems  # noqa: PT017 - both are fine


@given(changed(PLAN))
def test_a_changed_plan_is_refused_or_fits_together(data: Any) -> None:
    try:
        plan = Plan.from_json(json.dumps(data))
    except PipelineError as error:
        assert error.problems  # noqa: PT017 - both are fine
    else:
        assert len(plan.nets) == len(plan.locations)


@given(changed(FOUND))
def test_a_changed_discovery_is_refused_or_can_be_shown(data: Any) -> None:
    try:
        found = Discovery.from_json(json.dumps(data))
    except ValueError as error:
        assert "this is not" in str(error) or "begins with" in str(error)  # noqa: PT017 - both are fine
    else:
        assert str(found)
        assert found._repr_html_()


@given(values, st.data())
def test_changed_bytes_are_refused_or_a_value(value: Any, data: st.DataObject) -> None:
    codec = Codec.for_untrusted()
    try:
        encoded = bytearray(codec.encode(value))
    except EncodingError:
        return  # only pickle could hold it
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    try:
        codec.loads(bytes(encoded))
    except EncodingError as error:
        assert str(error)  # noqa: PT017 - both are fine


def numbers_in(data: Any) -> Iterator[float]:
    for path in places(data):
        found = data
        for key in path:
            found = found[key]
        if isinstance(found, (int, float)):
            yield found


@given(changed(OURS))
async def test_a_changed_pipeline_runs_and_ends(data: Any) -> None:
    assume(max(numbers_in(data), default=0) < 1000)  # a Repeat may be meant to run for ever
    async with Session(fed, target="inline") as session:
        try:
            job = await session.execute(Pipeline.model_validate(data), {"n": 3})
        except (PipelineError, ParameterError) as error:
            assert str(error)  # noqa: PT017 - both are fine
            return
        try:
            await job.collect()
        except JobFailed as error:
            assert error.errors  # noqa: PT017 - both are fine


async def test_a_repeat_without_an_end_is_refused() -> None:
    body = {"kind": "repeat", "id": 0, "carry": {"kind": "constant"}, "times": {"kind": "constant"}}
    pipeline = Pipeline.model_validate({"body": [{**body, "next": {"kind": "ref", "node": 0}, "body": []}]})
    async with Session(fed, target="inline") as session:
        with pytest.raises(JobFailed, match="number of iterations, not None"):
            await (await session.execute(pipeline))
