"""Pipelines that come with a request, and schemas of those that are registered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from openapi_spec_validator import validate
from pydantic import BaseModel

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield, collect
from tests.web.rig import PIPELINES, Server, all_events, new_service, refusal, serving, square


async def test_a_pipeline_can_come_with_the_request_if_that_is_allowed(server: Server) -> None:
    given = {"pipeline": PIPELINES["squares"].model_dump(), "params": {"x": 6}}
    assert await refusal(server.client.post("/jobs", json=given)) == (403, "pipelines")
    data = server.session.federation.pipeline_to_dfm(PIPELINES["squares"])
    async with serving(new_service(allow_pipelines=True)) as allowing:
        for pipeline in (given["pipeline"], data):  # also DFM's JSON
            found = await allowing.client.post("/jobs", json={**given, "pipeline": pipeline})
            assert found.status_code == 201, found.text
            assert await allowing.results(found.json()["job_id"]) == [36]
        data["dfm_body"][0]["dfm_class_name"] = "os.system"
        found = await allowing.client.post("/jobs", json={**given, "pipeline": data})
        assert (found.status_code, found.json()["error"]) == (422, "pipeline")
        assert "'os.system' is neither" in found.text


async def test_all_problems_of_a_pipeline_are_reported() -> None:
    statements: list[dict[str, Any]] = [
        {"kind": "call", "id": 0, "operation": "nothing"},
        {"kind": "call", "id": 1, "operation": "square", "args": {}},
    ]
    async with serving(new_service(allow_pipelines=True)) as server:
        found = await server.client.post("/jobs", json={"pipeline": {"body": statements}})
        assert (found.status_code, found.json()["error"]) == (422, "pipeline")
        assert len(found.json()["problems"]) == 2


async def test_a_pipeline_cannot_reach_beyond_the_operations() -> None:
    with Pipeline("inside") as inside:
        found = square(PlaceParam("x"))
        Yield(found.real)
    data = json.loads(json.dumps(inside.model_dump()).replace('"real"', '"__class__"'))
    data["body"].append({"kind": "yield", "id": 7, "value": {"kind": "constant", "encoded": "AAAA"}, "place": "p"})
    async with serving(new_service(allow_pipelines=True)) as server:
        answer = await server.client.post("/jobs", json={"pipeline": data, "params": {"x": 1}})
        assert (answer.status_code, answer.json()["error"]) == (422, "pipeline")
        problems = " ".join(answer.json()["problems"])
        assert "__class__" in problems
        assert "plain JSON" in problems
        assert server.session.jobs() == []


# schemas


class Sample(BaseModel):
    name: str
    weight: float = 1.0


@dataclass
class Report:
    lines: list[str]


class Opaque:
    """A type that no schema can be made of."""


typed = Federation("typed")
there = typed.site("there")


@there.operation
async def weigh(sample: Sample, factor: float) -> Report:
    return Report([sample.name] * int(sample.weight * factor))


@there.operation
async def parts(count: int) -> AsyncIterator[Sample]:
    yield Sample(name=str(count))


@there.operation
async def untyped(anything, opaque: Opaque | None = None):  # type: ignore[no-untyped-def]
    return anything


@there.operation
def length(text: str) -> int:
    return len(text)


with Pipeline("typed") as typed_pipeline:
    sample = PlaceParam("sample", default={"name": "a"})
    Yield(weigh(sample, PlaceParam("factor", default=2)), place="report")
    Yield(parts(PlaceParam("count")), place="part")
    Yield(untyped(PlaceParam("anything")), place="same")
    with ForEach(PlaceParam("texts")) as text:
        size = length(text)
    Yield(collect(size), place="sizes")


async def test_schemas_come_from_the_types_that_operations_declare() -> None:
    service = new_service(session=lambda: Session(typed, target="inline"), pipelines={"typed": typed_pipeline})
    async with serving(service) as server:
        document = (await server.client.get("/openapi.json")).json()
        (found,) = (await server.client.get("/pipelines")).json()["pipelines"]
        params = {"count": 1, "anything": [1], "texts": ["one", "three"]}
        events = await all_events(server.client, f"/jobs/{await server.submit('typed', params)}/stream")
    validate(document)
    assert found["params"]["required"] == ["count", "anything", "texts"]
    assert found["params"]["properties"]["factor"] == {"type": "number", "default": 2}
    assert found["params"]["properties"]["anything"] == {}
    assert found["params"]["properties"]["sample"]["$ref"].startswith("#/$defs/Sample")
    assert found["params"]["properties"]["sample"]["default"] == {"name": "a"}
    assert found["results"]["same"] == {}
    assert found["results"]["sizes"] == {"type": "array", "items": {"type": "integer"}}
    assert found["results"]["part"]["$ref"].startswith("#/$defs/Sample")
    run = document["paths"]["/pipelines/typed/jobs"]["post"]
    name = run["x-results"]["report"]["$ref"].rpartition("/")[2]
    assert document["components"]["schemas"][name]["properties"]["lines"]["items"] == {"type": "string"}
    values = {event.data["place"]: event.data["value"] for event in events if event.name == "result"}
    assert values["report"] == {"lines": ["a", "a"]}
    assert values["part"] == {"name": "1", "weight": 1.0}
    assert values["sizes"] == [3, 5]


async def test_the_document_describes_pipeline_functions() -> None:
    described = Federation("described")

    @described.site("lab").operation
    def double(x: Any, y: Any) -> Any:
        return [x, y]

    @described.pipeline
    def pairs(y: int | None = None, x: float = 1.5) -> list[float]:
        """Make pairs.

        Args:
            x: the first one.

        Both are numbers.
        """
        return double(x, y)  # type: ignore[no-any-return]

    service = new_service(session=Session(described, target="inline"), pipelines={"pairs": pairs})
    async with serving(service) as server:
        document = (await server.client.get("/openapi.json")).json()
        validate(document)
        run = document["paths"]["/pipelines/pairs/jobs"]["post"]
        assert run["description"] == "Make pairs.\n\nBoth are numbers."
        params = run["requestBody"]["content"]["application/json"]["schema"]["allOf"][1]["properties"]["params"][
            "anyOf"
        ][0]
        assert params["description"] == run["description"]
        assert list(params["properties"].items()) == [
            ("y", {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}),
            ("x", {"type": "number", "default": 1.5, "description": "the first one."}),
        ]
        refused = await server.client.post("/pipelines/pairs/jobs", json={"params": {"x": "one"}})
        assert refused.json()["problems"][0].startswith("parameter 'x': Input should be a valid number")
