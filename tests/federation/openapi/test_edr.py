"""A document in the shape of OGC API - Environmental Data Retrieval, and a service that it describes."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dfm_async import Federation, Pipeline, PipelineError, PlaceParam, Session, Yield
from dfm_async.errors import HttpCallFailed
from tests.federation.openapi.service import serving_app

DOCUMENT = Path(__file__).parent / "edr" / "service.yaml"
FORMATS = {"CSV": "text/csv", "NetCDF": "application/x-netcdf"}
TABLE = "wind-speed\n3.5\n"
stored: list[dict[str, Any]] = []


async def answer(request: Request) -> Response:
    """Repeats what it was asked, in the format that was asked for."""
    said = {
        "path": request.url.path,
        "query": dict(request.query_params),
        "kind": request.headers.get("content-type", "").partition(";")[0],
        "body": (await request.body()).decode(),
    }
    if request.path_params.get("collection") == "nothing":
        return JSONResponse({"code": "NotFound", "description": "there is no such collection"}, 404)
    if request.method == "PUT":
        stored.append({**said, "match": request.headers.get("if-match")})
        return Response(status_code=204)
    form = request.query_params.get("f", "CoverageJSON")
    if form in FORMATS:
        return Response(TABLE, media_type=FORMATS[form])
    return Response(json.dumps({"type": "Coverage", "said": said}), media_type="application/prs.coverage+json")


paths = ("/", "/collections", "/collections/{collection}", "/collections/{collection}/{rest:path}")
app = Starlette(routes=[Route(f"/edr{path}", answer, methods=["GET", "POST", "PUT"]) for path in paths])


@pytest.fixture
async def fed() -> AsyncIterator[Federation]:
    stored.clear()
    async with serving_app(app) as url:
        fed = Federation("coast")
        fed.site("desk")
        fed.add_openapi(DOCUMENT, site="desk", name="edr", base_url=f"{url}/edr")
        yield fed


async def test_operations_of_the_document_have_names_and_types_of_python(fed: Federation) -> None:
    assert [name.removeprefix("edr.") for name in fed.operations] == [
        *("GetLandingPage", "ListCollections", "GetQueries", "GetDataForPosition", "PostDataForArea"),
        *("PostDataForCube", "GetLocation", "StoreItem"),
    ]
    edr = fed.operations.edr
    assert str(inspect.signature(edr.GetDataForPosition)).startswith(
        "(collectionId: str, coords: str, *, z: str | None = None, datetime: str | None = None, parameter_name=None, "
        "crs: str | None = 'CRS84', f: "
    )
    assert str(inspect.signature(edr.PostDataForCube)) == (
        "(collectionId: str, *, bbox: list[float] | None = None, z: str | None = None, datetime: str | None = None, "
        "parameter_name=None, resolution_x: int | str | None = None)"
    )
    assert str(inspect.signature(edr.GetLocation)).startswith("(collectionId: str, locId: str | int, *, f: ")
    assert str(inspect.signature(edr.StoreItem)) == (
        "(collectionId: str, itemId: str, body, *, if_match: str | None = None) -> None"
    )


async def test_queries_of_every_kind_are_answered(fed: Federation) -> None:
    edr = fed.operations.edr
    with Pipeline("queries") as pipeline:
        names = ["wind-speed", "wave-height"]
        where = {"collectionId": "winds", "coords": "POINT(0 51.48)"}
        Yield(edr.ListCollections(bbox=[-10, 40.5, 10, 60], datetime="2026-01-01/.."), place="list")
        Yield(edr.GetDataForPosition(**where, parameter_name=PlaceParam("names")), place="position")
        Yield(edr.GetDataForPosition(**where, f="CSV"), place="text")
        Yield(edr.GetDataForPosition(**where, f="NetCDF"), place="bytes")
        Yield(edr.PostDataForCube("winds", bbox=[0, 0, 0, 1, 1, 9], parameter_name=names, resolution_x=3), place="cube")
        Yield(edr.PostDataForArea("winds", "POLYGON((0 0,1 0,1 1,0 0))", resolution_x="5/km"), place="area")
        Yield(edr.GetLocation("winds", 7), place="location")
        Yield(edr.StoreItem("winds", "a/b", b"CDF", if_match="*"), place="stored")
    async with Session(fed, target="inline") as session:
        job = await session.execute(pipeline, {"names": names})
        found = {result.place: result.value for result in await job.collect()}
    assert (found.pop("text"), found.pop("bytes"), found.pop("stored")) == (TABLE, TABLE.encode(), None)
    asked = {place: (*value["said"].values(),) for place, value in found.items()}
    here = "/edr/collections"
    boxes = {"bbox": [0.0, 0.0, 0.0, 1.0, 1.0, 9.0], "parameter-name": names, "resolution-x": 3}
    assert json.loads(asked["cube"][3]) == boxes
    assert asked == {
        "list": (here, {"bbox": "-10.0,40.5,10.0,60.0", "datetime": "2026-01-01/.."}, "", ""),
        "position": (
            f"{here}/winds/position",
            {"coords": "POINT(0 51.48)", "parameter-name": "wind-speed,wave-height", "crs": "CRS84"},
            "",
            "",
        ),
        "cube": (f"{here}/winds/cube", {}, "application/json", asked["cube"][3]),
        "area": (f"{here}/winds/area", {"resolution-x": "5/km"}, "text/plain", "POLYGON((0 0,1 0,1 1,0 0))"),
        "location": (f"{here}/winds/locations/7", {}, "", ""),
    }
    kind = "application/octet-stream"
    assert stored == [{"path": f"{here}/winds/items/a/b", "query": {}, "kind": kind, "body": "CDF", "match": "*"}]


async def test_box_that_is_neither_of_the_alternatives_is_refused(fed: Federation) -> None:
    with Pipeline("boxes") as pipeline:
        Yield(fed.operations.edr.ListCollections(bbox=[0, 1, 2]))
    async with Session(fed, target="inline") as session:
        with pytest.raises(PipelineError, match="bbox"):
            await session.prepare(pipeline)


async def test_exception_of_the_service_is_an_error_with_its_text(fed: Federation) -> None:
    with Pipeline("nothing") as pipeline:
        Yield(fed.operations.edr.GetQueries("nothing"))
    async with Session(fed, target="inline") as session:
        job = await session.execute(pipeline)
        await job.wait_until_finished()
        (error,) = job.errors
    assert isinstance(error.__cause__, HttpCallFailed)
    assert error.__cause__.status == 404
    assert "there is no such collection" in error.__cause__.answer
