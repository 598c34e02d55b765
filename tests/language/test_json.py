"""A pipeline is data: written to JSON and read back, it is the same pipeline."""

from __future__ import annotations

import datetime as dt
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfm_async import (
    BestOf,
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
    gather,
)
from dfm_async.language.expressions import Constant, Ref
from dfm_async.language.statements import YieldStatement
from tests.language.test_builder import here, load
from tests.property.random_pipelines import pipelines
from tests.wire.shapes import Colour, Frozen, same, values


def constant(value: Any) -> Pipeline:
    with Pipeline("constant") as p:
        Yield(value)
    return p


def full() -> Pipeline:
    with Pipeline("full", api_version="1.2") as p:
        a = load(PlaceParam("x", multiuse=True), y=(1, {"k": [2.5, None]}))
        policy = RetryPolicy(attempts=5, backoff=0.5, max_backoff=9.0, on=(KeyError, "x.Y"))
        b = load(a["k"][0].name, site=BestOf([here]), retry=policy, deadline=2.5, after=a)
        load({"p": PlaceParam("x", default=[1]).field, (1,): {a}}, site=here, provider="prov", fallback={2})
        with If((a > 1) & ~(b == "no") | a.ok) as branch:
            Yield(b, place="p", multiuse=True)
        with branch.otherwise():
            Yield([a, (b,)], place="p", multiuse=True, after=[a, b])
        branch.value(a.x, [b])
        gather([a, b], at_least=0, within=2)
        with ForEach(a, concurrency=3) as element, TryFromCache(key=("k", element), site="here") as found:
            found.store(load(element))
        with Repeat(collect(found, errors="keep"), times=a, until=lambda v: v > 3) as current:
            current.next(load(current))
        Yield(current, place="last")
    return p


def test_a_pipeline_with_every_kind_of_statement_survives_json(tmp_path: Path) -> None:
    p = full()
    assert Pipeline.model_validate_json(p.model_dump_json()) == p
    assert Pipeline.model_validate(json.loads(p.model_dump_json())) == p
    p.save_to_file(tmp_path / "p.json")
    loaded = Pipeline.load_from_file(str(tmp_path / "p.json"))
    assert loaded == p
    assert str(loaded) == str(p)
    assert (loaded.name, loaded.api_version) == ("full", "1.2")
    loaded.save_to_file(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "p.json").read_bytes()


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(pipelines())
def test_any_pipeline_survives_json(pipeline: Pipeline) -> None:
    again = Pipeline.model_validate_json(pipeline.model_dump_json())
    assert again == pipeline
    assert str(again) == str(pipeline)
    assert again.to_mermaid() == pipeline.to_mermaid()


@given(values)
def test_a_constant_of_any_sendable_value_survives_json(value: Any) -> None:
    again = Pipeline.model_validate_json(constant(value).model_dump_json())
    statement = again.body[0]
    assert isinstance(statement, YieldStatement)
    assert isinstance(statement.value, Constant)
    assert same(statement.value.value, value)


@given(st.integers() | st.text() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_field_chosen_by_any_key_survives_json(key: Any) -> None:
    with Pipeline() as p:
        Yield(load()[key])
    statement = Pipeline.model_validate_json(p.model_dump_json()).body[1]
    assert isinstance(statement, YieldStatement)
    assert isinstance(statement.value, Ref)
    (step,) = statement.value.path
    assert same(step.key, key)  # type: ignore[union-attr]


def test_plain_constants_are_readable_in_the_file() -> None:
    text = constant({"a": [1, 2.5, "x", None, True]}).model_dump_json()
    assert '"value":{"a":[1,2.5,"x",null,true]}' in text
    assert "encoded" not in text


@pytest.mark.parametrize(
    "value", [(1,), {1: 2}, math.nan, math.inf, b"x", {1}, Colour.RED, Frozen((1,)), np.arange(3), dt.date(2024, 1, 1)]
)
def test_a_file_of_what_json_cannot_hold_is_strict_json(value: Any) -> None:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = constant([value]).model_dump_json()
    data = json.loads(text, parse_constant=no_constants)
    assert "encoded" in data["body"][0]["value"]


def broken(**changes: Any) -> dict[str, Any]:
    call = {"kind": "call", "id": 0, "operation": "load", "args": {"x": {"kind": "constant", "value": 1}}}
    return {"name": "broken", "body": [{**call, **changes}]}


BROKEN: list[tuple[Any, str]] = [
    (broken(kind="cal"), "$.body[0].kind"),
    (broken(colour="red"), "$.body[0]"),
    (broken(args={"x": {"kind": "ref", "node": "one"}}), "$.body[0].args[...].node"),
    (broken(args={"x": {"kind": "constant", "encoded": "%%"}}), "$.body[0].args[...]"),
    (broken(args={"x": {"kind": "constant", "encoded": "wQ=="}}), "$.body[0].args[...]"),
    (broken(args={"x": {"kind": "constant", "encoded": 5}}), "$.body[0].args[...].encoded"),
    (broken(after="x"), "$.body[0].after"),
    (broken(deadline="soon"), "$.body[0].deadline"),
    (broken(retry={"attempts": 0}), "$.body[0].retry"),
    (broken(retry={"tries": 3}), "$.body[0].retry"),
    (broken(retry={"attempts": "many"}), "$.body[0].retry.attempts"),
    (broken(retry={"on": 5}), "$.body[0].retry.on"),
    (broken(retry=3), "$.body[0].retry"),
    ({"body": [{"kind": "for_each", "id": 0}]}, "$.body[0]"),
    ({"body": [], "mode": "discover"}, "$.mode"),
    ({"bodies": []}, "$"),
    ([], "$"),
]


@pytest.mark.parametrize(("data", "place"), BROKEN)
def test_an_error_in_a_file_names_the_file_and_the_place(data: Any, place: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PipelineError) as caught:
        Pipeline.load_from_file(path)
    assert caught.value.pipeline == str(path)
    assert place in [problem.statement for problem in caught.value.problems]


def test_the_errors_of_all_statements_in_a_file_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    statements = [
        broken(**changes)["body"][0] for changes in ({"colour": "red"}, {}, {"deadline": "soon"}, {"id": "x"})
    ]
    path.write_text(json.dumps({"mode": "discover", "body": statements}))
    with pytest.raises(PipelineError) as caught:
        Pipeline.load_from_file(path)
    places = [problem.statement for problem in caught.value.problems]
    assert places == ["$.mode", "$.body[0]", "$.body[2].deadline", "$.body[3].id"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null"])
def test_a_file_that_holds_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(FileNotFoundError):
        Pipeline.load_from_file(path)
    path.write_bytes(content)
    with pytest.raises(PipelineError):
        Pipeline.load_from_file(path)
