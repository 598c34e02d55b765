"""Documents as frameworks write them: their services are asked by operations made of them."""

from __future__ import annotations

import datetime as dt
import enum
from typing import Annotated, Any

from fastapi import Cookie, FastAPI, Header, HTTPException
from pydantic import BaseModel

from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.errors import HttpCallFailed
from dfm_async.web import AllowAnyone, Service
from tests.federation.openapi.service import serving_app
from tests.web import rig


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Pet(BaseModel):
    name: str
    size: Size = Size.SMALL
    born: dt.date | None = None
    parents: list[Pet] = []


app = FastAPI(title="Pets of FastAPI", version="1")


@app.get("/pets/{pet_id}")
async def read_pet(
    pet_id: int,
    tag: Annotated[list[str], Header()],
    who: Annotated[str, Cookie()],
    since: dt.datetime | None = None,
    sizes: Annotated[list[Size] | None, "query"] = None,
) -> dict[str, Any]:
    if pet_id == 404:
        raise HTTPException(404, "no such pet")
    return {"id": pet_id, "tag": tag, "who": who, "since": since, "sizes": sizes}


@app.post("/pets")
async def add_pet(pet: Pet) -> Pet:
    return pet


async def test_a_service_of_fastapi_is_asked_by_its_own_document() -> None:
    fed = Federation("shop")
    fed.site("lab")
    async with serving_app(app) as url:
        fed.add_openapi(app.openapi(), site="lab", name="pets", base_url=url)
        pets = fed.operations.pets
        with Pipeline() as pipeline:
            pet = {"name": "Rex", "size": "large", "parents": [{"name": "Rita", "born": "2020-02-01"}]}
            Yield(pets.AddPetPetsPost(**pet), place="added")
            Yield(
                pets.ReadPetPetsPetIdGet(PlaceParam("id"), tag=["x"], who="ann", since="2024-01-02T03:04:05Z"),
                place="read",
            )
        async with Session(fed, target="inline") as session:
            job = await session.execute(pipeline, {"id": 7})
            found = {result.place: result.value for result in await job.collect()}
            job = await session.execute(pipeline, {"id": 404})
            await job.wait_until_finished()
            (error,) = job.errors
    assert found["added"] == Pet.model_validate(pet).model_dump(mode="json")
    assert found["read"] == {"id": 7, "tag": ["x"], "who": "ann", "since": "2024-01-02T03:04:05Z", "sizes": None}
    assert isinstance(error.__cause__, HttpCallFailed)
    assert (error.__cause__.status, error.__cause__.answer) == (404, '{"detail":"no such pet"}')


async def test_a_federation_can_ask_another_one_by_the_document_of_its_web_service() -> None:
    async with rig.serving(Service(session=rig.inline, pipelines=rig.PIPELINES, authorizer=AllowAnyone())) as server:
        document = (await server.client.get("/openapi.json")).json()
        fed = Federation("asking")
        fed.site("lab")
        fed.add_openapi(document, site="lab", name="other", base_url=str(server.client.base_url))
        others = fed.operations.other
        with Pipeline() as pipeline:
            made = others.RunSquares({"params": {"x": 7}})
            Yield(others.ShowJob(made["job_id"]))
        async with Session(fed, target="inline") as session:
            shown = (await (await session.execute(pipeline)).first()).value
    assert shown["pipeline"] == "squares"
