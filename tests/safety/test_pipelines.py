"""A pipeline of a stranger gives errors: no crash, no hang, nothing but the operations that the sites offer."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, JobFailed, JobStatus, Pipeline, PipelineError
from dfm_async.net import spec
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import prepare
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value

fed = Federation("target")
here = fed.site("here")


@here.operation
def items(x: Any = None) -> list[int]:
    return [1, 2, 3]


CALL = {"kind": "call", "id": 0, "operation": "items", "args": {}}


def yielding(**value: Any) -> dict[str, Any]:
    return {"kind": "yield", "id": 1, "value": value}


def nested(depth: int, before: str, core: str, behind: str) -> str:
    return before * depth + core + behind * depth


def with_argument(expression: str) -> str:
    return '{"body": [{"kind": "call", "id": 0, "operation": "items", "args": {"x": ' + expression + "}}]}"


def constant(value: str) -> str:
    return with_argument('{"kind": "constant", "value": ' + value + "}")


def used(text: str) -> Plan:
    """Everything that is done with a pipeline before it runs."""
    pipeline = Pipeline.model_validate_json(text)
    assert Pipeline.model_validate_json(pipeline.model_dump_json()) == pipeline
    assert str(pipeline)
    assert pipeline.to_mermaid()
    plan = prepare(pipeline, fed, "home")
    assert Plan.from_json(plan.to_json()).hash == plan.hash
    assert str(plan.explain())
    assert pipeline.to_svg()
    return plan


DEEP = {
    "negations": ('{"kind": "negation", "term": ', '{"kind": "constant"}', "}"),
    "items": ('{"kind": "items", "type": "list", "items": [', '{"kind": "parameter", "name": "p"}', "]}"),
    "lists": ('{"kind": "constant", "value": [', "1", "]}"),
    "one constant": ("[", "", "]"),
    "dicts": ('{"a": ', "1", "}"),
}


@pytest.mark.parametrize("depth", [60, 99, 120, 240, 256, 300, 500, 800, 990, 5_000, 100_000])
@pytest.mark.parametrize("kind", DEEP)
def test_depth_is_an_error_or_works(kind: str, depth: int) -> None:
    text = nested(depth, *DEEP[kind])
    with allowed(depth, 60):
        used(constant(text) if kind in ("one constant", "dicts") else with_argument(text))


@pytest.mark.parametrize("depth", [90, 101, 200, 600, 10_000])
def test_blocks_within_blocks_are_an_error_or_work(depth: int) -> None:
    statement: dict[str, Any] = yielding(kind="constant")
    head = json.dumps({"kind": "if", "cond": {"kind": "constant", "value": True}, "id": -7, "body": []})[:-2]
    heads = "".join(head.replace("-7", str(number + 2)) for number in range(depth))
    with allowed(depth, 90):
        used('{"body": [' + heads + json.dumps(statement) + "]}" * depth + "]}")


def allowed(depth: int, works: int) -> contextlib.AbstractContextManager[Any]:
    """What is not too deep has to work; the rest may be refused."""
    return contextlib.nullcontext() if depth <= works else contextlib.suppress(PipelineError)


def test_too_many_statements_are_refused_at_once() -> None:
    body = [{"kind": "yield", "id": n, "value": {"kind": "constant"}, "multiuse": True} for n in range(100_001)]
    with pytest.raises(PipelineError, match="more than 100,000 statements"):
        Pipeline.model_validate({"body": body})


BAD_TEXT = [
    "", "null", "[]", "{", '{"body": 3}', '{"body": [null]}', '{"name": "\\ud800", "body": []}', "\x00", "NaN",
    constant('NaN'),
    constant('Infinity'),
    constant('1e999'),
    constant('"\\udc00"'),
    constant("9" * 100_000),
    with_argument('{"kind": "constant", "encoded": "' + "A" * 4096 + '"}'),
    with_argument('{"kind": "pickle", "value": 1}'),
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXT, ids=range(len(BAD_TEXT)))
def test_invalid_pipeline_is_refused(text: str) -> None:
    with pytest.raises(PipelineError):
        used(text)


BAD_BODIES: dict[str, list[dict[str, Any]]] = {
    "another operation": [{**CALL, "operation": "os.system"}],
    "an operation of ours": [{**CALL, "operation": "#discover"}],
    "another site": [{**CALL, "site": "../../etc/passwd"}],
    "another provider": [{**CALL, "provider": "__class__"}],
    "Python's inside": [CALL, yielding(kind="ref", node=0, path=[{"kind": "attribute", "name": "__class__"}])],
    "a private field": [CALL, yielding(kind="ref", node=0, path=[{"kind": "attribute", "name": "_data"}])],
    "globals": [
        CALL,
        yielding(
            kind="ref", node=0, path=[{"kind": "attribute", "name": name} for name in ("append", "__self__", "x")]
        ),
    ],
    "an index beyond all": [CALL, yielding(kind="ref", node=0, path=[{"kind": "item", "key": 10**30}])],
    "a concurrency beyond all": [
        {"kind": "for_each", "id": 0, "seq": {"kind": "constant", "value": [1]}, "concurrency": 10**30}
    ],
    "tries without end": [{**CALL, "retry": {"attempts": 10**30}}],
    "lost workers without end": [{**CALL, "retry": {"attempts": 1, "on_worker_lost": 10**30}}],
    "the past": [{**CALL, "retry": {"attempts": 2, "backoff": -1.0}}],
    "a reference to nothing": [yielding(kind="ref", node=10**30)],
    "a cycle": [{**CALL, "after": [0]}],
}


async def test_pipeline_beyond_the_limits_is_refused_and_the_session_goes_on(connect: Connect) -> None:
    good = pipeline_of(items)
    async with connect(fed) as session:
        for name, body in BAD_BODIES.items():
            with pytest.raises(PipelineError):
                await session.execute(Pipeline.model_validate({"name": name, "body": body}))
            assert await first_value(session, good) == [1, 2, 3]


async def test_unsendable_plan_ends_only_its_own_job(connect: Connect) -> None:
    good = pipeline_of(items)
    async with connect(fed) as session:
        plan = await session.prepare(good)
        first, *others = plan.nets[0].transitions
        broken = msgspec.structs.replace(first, inputs=(spec.Input(10**30, "data"),))
        net = msgspec.structs.replace(plan.nets[0], transitions=(broken, *others))
        bad = msgspec.structs.replace(plan, nets=(net, *plan.nets[1:]))
        with pytest.raises(PipelineError, match="does not fit together"):
            Plan.from_json(bad.to_json())
        for _ in range(2):  # the second time, the workers must not believe that they know it
            with pytest.raises(JobFailed, match="cannot be given to the sites"):
                await (await session.execute(bad))
        job = await session.execute(good)
        assert await job is JobStatus.FINISHED
