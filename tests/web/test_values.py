"""Values as JSON, and pipelines that come with a request."""

from __future__ import annotations

import asyncio
import base64
import collections
import datetime as dt
import decimal
import enum
import json
import math
import os
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dfm_async import Federation, LocalOptions, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.web import Service, WebLimits
from dfm_async.web.values import JsonValues
from tests.web.rig import PIPELINES, all_events, events, inline, serving, square

LIMITS = WebLimits(array_items=10, record_bytes=10_000)


def written(value: Any) -> Any:
    return json.loads(JsonValues(LIMITS).encode(value))


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: float
    y: Any = None


class Model(BaseModel):
    name: str
    when: dt.date


class Record(msgspec.Struct):
    a: int


Pair = collections.namedtuple("Pair", ["left", "right"])


class Odd:
    def __repr__(self) -> str:
        return "odd"


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


PLAIN = [
    (None, None),
    (True, True),
    (2**53, 2**53),
    ("é", "é"),
    (1.5, 1.5),
    (math.nan, None),
    (math.inf, None),
    (2**70, 2**70),
    (Pair(1, Colour.RED), [1, "red"]),
    ("\ud800", "?"),
    (dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), "2026-01-02T03:04:05Z"),
    (dt.date(2026, 1, 2), "2026-01-02"),
    (dt.time(3, 4), "03:04:00"),
    (dt.timedelta(seconds=90), "PT90S"),
    (b"\x00\xff", base64.b64encode(b"\x00\xff").decode()),
    (bytearray(b"ab"), base64.b64encode(b"ab").decode()),
    (decimal.Decimal("1.10"), "1.10"),
    (uuid.UUID(int=5), str(uuid.UUID(int=5))),
    (Colour.RED, "red"),
    ({1, 2}, [1, 2]),
    ((1, [2]), [1, [2]]),
    (range(3), [0, 1, 2]),
    (Point(1.0, Point(2.0)), {"x": 1.0, "y": {"x": 2.0, "y": None}}),
    (Model(name="a", when=dt.date(2026, 1, 2)), {"name": "a", "when": "2026-01-02"}),
    (Record(1), {"a": 1}),
    ({(1, 2): "x"}, {"(1, 2)": "x"}),
    ({1: "x"}, {"1": "x"}),
    (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
    (np.float32(0.5), 0.5),
    (np.array([math.nan, 1.0]), [None, 1.0]),
    (np.zeros((100, 3), "f4"), {"type": "numpy.ndarray", "shape": [100, 3], "dtype": "float32"}),
    (Odd(), {"type": f"{__name__}.Odd", "repr": "odd"}),
    (Rude(), {"type": f"{__name__}.Rude", "repr": "repr raised RuntimeError"}),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN, ids=lambda found: type(found).__name__)
def test_each_value_has_a_form_in_json(value: Any, expected: Any) -> None:
    assert written(value) == expected
    assert written({"inside": [value]}) == {"inside": [expected]}
    assert written({"inside": [value, {(1,): 2}]})["inside"][0] == expected  # also where the quick way fails


def test_a_value_that_is_too_large_is_told_in_short() -> None:
    assert written(["x" * 20_000]) == {"type": "list", "json_bytes": 20_004, "omitted": True}


def test_a_value_that_contains_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert written(value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.decimals(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=8,
)


@given(ANYTHING)
def test_there_is_no_value_that_cannot_be_written(value: Any) -> None:
    written(value)


# pipelines of clients


def body(pipeline: Pipeline, **more: Any) -> dict[str, Any]:
    return {"pipeline": pipeline.model_dump(), **more}


async def test_a_pipeline_can_come_with_the_request_if_that_is_allowed() -> None:
    async with serving(Service(session=inline, allow_pipelines=True)) as server:
        found = await server.client.post("/jobs", json=body(PIPELINES["squares"], params={"x": 6}))
        assert found.status_code == 201, found.text
        events = await all_events(server.client, f"/jobs/{found.json()['job_id']}/stream")
        assert [event.data["value"] for event in events if event.name == "result"] == [36]
    async with serving(Service(session=inline)) as server:
        found = await server.client.post("/jobs", json=body(PIPELINES["squares"], params={"x": 6}))
        assert (found.status_code, found.json()["error"]) == (403, "pipelines")


async def test_everything_that_is_wrong_with_a_pipeline_is_told() -> None:
    statements: list[dict[str, Any]] = [
        {"kind": "call", "id": 0, "operation": "nothing"},
        {"kind": "call", "id": 1, "operation": "square", "args": {}},
    ]
    async with serving(Service(session=inline, allow_pipelines=True)) as server:
        found = await server.client.post("/jobs", json={"pipeline": {"body": statements}})
        assert (found.status_code, found.json()["error"]) == (422, "pipeline")
        assert len(found.json()["problems"]) == 2


async def test_a_pipeline_cannot_reach_beyond_the_operations() -> None:
    with Pipeline("inside") as inside:
        found = square(PlaceParam("x"))
        Yield(found.real)
    data = json.loads(json.dumps(inside.model_dump()).replace('"real"', '"__class__"'))
    data["body"].append({"kind": "yield", "id": 7, "value": {"kind": "constant", "encoded": "AAAA"}, "place": "p"})
    async with serving(Service(session=inline, allow_pipelines=True)) as server:
        answer = await server.client.post("/jobs", json={"pipeline": data, "params": {"x": 1}})
        assert (answer.status_code, answer.json()["error"]) == (422, "pipeline")
        problems = " ".join(answer.json()["problems"])
        assert "__class__" in problems
        assert "plain JSON" in problems
        assert server.session.jobs() == []


# workers


fragile = Federation("fragile")
there = fragile.site("there")


@there.operation
async def dies_once(mark: str) -> int:
    """Kills its own worker, unless it has done so before."""
    path = Path(mark)
    if not path.exists():  # noqa: ASYNC240 - a small local file
        path.touch()  # noqa: ASYNC240 - a small local file
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
    return os.getpid()


with Pipeline("dies") as dies:
    Yield(dies_once(PlaceParam("mark"), retry=RetryPolicy(on_worker_lost=1)))


async def test_a_stream_goes_on_while_a_worker_is_lost(tmp_path: Path) -> None:
    options = LocalOptions(lanes=1)
    service = Service(session=Session(fragile, options=options), pipelines={"dies": dies})
    async with serving(service) as server:
        async with server.client.stream(
            "POST",
            "/pipelines/dies/jobs",
            json={"params": {"mark": str(tmp_path / "mark")}},
            headers={"accept": "text/event-stream"},
        ) as response:
            found = [event async for event in events(response)]
        names = [event.name for event in found]
        assert names.count("result") == 1
        assert [event.data["kind"] for event in found if event.name == "worker"] == ["lost"]
        assert found[-1].data["status"] == "finished"
        assert [event.id for event in found[:-1]] == list(range(len(found) - 1))
