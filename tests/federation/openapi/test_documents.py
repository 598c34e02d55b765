"""Operations from OpenAPI documents: what they take, how they are asked, and all that is wrong at once."""

from __future__ import annotations

import copy
import inspect
import json
import pathlib
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import (
    Federation,
    JobStatus,
    OperationFailed,
    Pipeline,
    PipelineError,
    PlaceParam,
    RetryPolicy,
    Session,
    Yield,
)
from dfm_async.errors import FederationError
from dfm_async.federation import HttpOptions
from dfm_async.model.resources import ClassPath
from dfm_async.planning.prepare import prepare
from tests.conftest import Connect
from tests.federation.openapi.service import TOKEN, Service, body_of, serving
from tests.support.damage import spots
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value

PETS: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Pet Store", "version": "1"},
    "servers": [{"url": "https://{region}.example.com/v1", "variables": {"region": {"default": "eu"}}}],
    "paths": {
        "/pets": {
            "parameters": [{"name": "X-Trace", "in": "header", "schema": {"type": "string"}}],
            "get": {
                "operationId": "listPets",
                "summary": "Lists pets.",
                "parameters": [
                    {"name": "limit", "in": "query", "schema": {"type": "integer", "maximum": 100, "default": 20}},
                    {"name": "from", "in": "query", "schema": {"type": "string", "format": "date"}},
                    {"name": "tag", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
                    {"name": "Accept", "in": "header", "schema": {"type": "string"}},
                ],
                "responses": {
                    "200": {
                        "content": {
                            "application/json": {
                                "schema": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}}
                            }
                        }
                    }
                },
            },
            "post": {
                "operationId": "add_pet",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}},
                },
                "responses": {"201": {"description": "made"}},
            },
        },
        "/pets/{petId}": {
            "get": {
                "parameters": [{"$ref": "#/components/parameters/id"}],
                "responses": {"200": {"description": "a pet"}},
            }
        },
    },
    "components": {
        "parameters": {"id": {"name": "petId", "in": "path", "required": True, "schema": {"type": "integer"}}},
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "id": {"type": "integer", "readOnly": True},
                    "name": {"type": "string"},
                    "born": {"type": "string", "format": "date"},
                    "parents": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}},
                },
            }
        },
    },
}


def federation() -> Federation:
    fed = Federation("shop")
    fed.site("lab")
    return fed


@pytest.fixture
def fed() -> Federation:
    return federation()


def changed(*path: str, **to: Any) -> dict[str, Any]:
    """The document with other values at a place."""
    document = copy.deepcopy(PETS)
    at = document
    for key in path:
        at = at.setdefault(key, {})
    at.update(to)
    return document


def problems(document: Any, **options: Any) -> list[str]:
    fed = federation()
    with pytest.raises(FederationError) as caught:
        fed.add_openapi(document, site="lab", **options)
    assert len(fed.operations) == 0
    assert fed.sites["lab"].adapters == {}
    return [str(problem) for problem in caught.value.problems]


def only(document: Any, *words: str, **options: Any) -> None:
    (found,) = problems(document, **options)
    for word in words:
        assert word in found


# operations


def test_operations_are_named_after_their_ids_and_take_what_the_document_says(fed: Federation) -> None:
    names = [operation.name for operation in fed.add_openapi(PETS, site="lab")]
    assert names == ["pet_store.ListPets", "pet_store.AddPet", "pet_store.GetPetsPetId"]
    operations = fed.operations.pet_store
    listed = inspect.signature(operations.ListPets)
    assert list(listed.parameters) == ["x_trace", "limit", "from_", "tag"]
    assert listed.parameters["limit"].default == 20
    assert operations.ListPets.__doc__.startswith("Lists pets.")
    assert operations.ListPets.signature.returns is list
    added = inspect.signature(operations.AddPet)
    assert [name for name, p in added.parameters.items() if p.default is p.empty] == ["name"]
    assert set(added.parameters) == {"name", "x_trace", "born", "parents"}  # and no id, which is the service's
    assert list(inspect.signature(operations.GetPetsPetId).parameters) == ["petId"]


def test_the_adapter_is_data_that_a_file_could_hold(fed: Federation) -> None:
    (operation,) = fed.add_openapi(
        PETS, site="lab", name="pets", operations=["listPets"], options=HttpOptions(timeout=5)
    )
    adapter = fed.sites["lab"].adapters[operation.name, None]
    assert isinstance(adapter.code, ClassPath)
    assert adapter.code.path == "dfm_async.site.http.HttpCall"
    assert json.loads(json.dumps(adapter.code.args)) == adapter.code.args
    assert adapter.code.args["request"]["base_url"] == "https://eu.example.com/v1"
    assert adapter.code.args["options"] == {"timeout": 5.0}


def test_paths_and_operations_may_have_servers_of_their_own() -> None:
    document = {
        "openapi": "3.1.0",
        "paths": {
            "/a": {
                "servers": [{"url": "https://path.example.com"}],
                "get": {"operationId": "one"},
                "put": {"operationId": "two", "servers": [{"url": "https://own.example.com/v2"}]},
            }
        },
    }

    def addresses(base_url: str | None = None) -> list[str]:
        fed = federation()
        added = fed.add_openapi(document, site="lab", name="x", base_url=base_url)
        adapters = [fed.sites["lab"].adapters[operation.name, None] for operation in added]
        return [found.code.args["request"]["base_url"] for found in adapters if isinstance(found.code, ClassPath)]

    assert addresses() == ["https://path.example.com", "https://own.example.com/v2"]
    assert addresses("http://here") == ["http://here"] * 2


def test_headers_that_frame_requests_are_not_parameters(fed: Federation) -> None:
    names = ["Host", "Content-Length", "transfer-encoding", "X-Own"]
    parameters = [{"name": name, "in": "header", "schema": {"type": "string"}} for name in names]
    document = {"openapi": "3.1.0", "paths": {"/a": {"get": {"operationId": "one", "parameters": parameters}}}}
    (operation,) = fed.add_openapi(document, site="lab", name="x", base_url="http://here")
    assert list(inspect.signature(operation).parameters) == ["x_own"]


def test_types_of_parameters_are_checked_before_a_job_runs(fed: Federation) -> None:
    fed.add_openapi(PETS, site="lab", name="pets")
    with Pipeline() as pipeline:
        Yield(fed.operations.pets.ListPets(limit="many"))
    with pytest.raises(PipelineError, match="limit"):
        prepare(pipeline, fed, "home")
    assert set(fed.models.declared) == {"pets.Pet"}
    assert fed.schemas.pets.Pet(name="Rex", parents=[{"name": "Rita"}]).parents[0].name == "Rita"


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_documents_may_refer_to_files_and_to_themselves(fed: Federation, tmp_path: pathlib.Path, suffix: str) -> None:
    write = json.dumps if suffix == "json" else yaml.safe_dump
    document = copy.deepcopy(PETS)
    schemas = document.pop("components")["schemas"]
    schemas["Pet"]["properties"]["parents"]["items"]["$ref"] = "#/definitions/Pet"
    parameter = {"name": "petId", "in": "path", "required": True, "schema": {"type": "integer"}}
    text = json.dumps(document).replace("#/components/schemas", f"parts/models.{suffix}#/definitions")
    document = json.loads(text.replace("#/components/parameters/id", "parts/id.yaml"))
    document["paths"]["/pets"] = {"$ref": f"parts/pets.{suffix}"}
    pets = json.loads(text)["paths"]["/pets"]
    (tmp_path / "parts").mkdir()
    (tmp_path / f"api.{suffix}").write_text(write(document))
    (tmp_path / "parts" / f"pets.{suffix}").write_text(write(json.loads(json.dumps(pets).replace("parts/", ""))))
    (tmp_path / "parts" / f"models.{suffix}").write_text(write({"definitions": schemas}))
    (tmp_path / "parts" / "id.yaml").write_text(write(parameter))
    added = fed.add_openapi(tmp_path / f"api.{suffix}", site="lab", name="pets")
    assert [operation.name for operation in added] == ["pets.ListPets", "pets.AddPet", "pets.GetPetsPetId"]
    assert set(inspect.signature(fed.operations.pets.AddPet).parameters) == {"name", "x_trace", "born", "parents"}
    assert fed.schemas.pets.Pet(name="Rex", parents=[{"name": "Rita"}]).parents[0].name == "Rita"


def test_json_with_tabs_and_surrogates_is_read(tmp_path: pathlib.Path) -> None:
    document = changed("info", title="Pets \N{DOG FACE}")
    (tmp_path / "api.json").write_text(json.dumps(document, indent="\t"))
    assert len(federation().add_openapi(tmp_path / "api.json", site="lab")) == 3


def test_keywords_of_version_3_0_are_converted() -> None:
    document = changed(openapi="3.0.3")
    document["paths"]["/pets"]["get"]["parameters"][0]["schema"] = {
        "type": "integer",
        "nullable": True,
        "minimum": 1,
        "exclusiveMinimum": True,
    }
    fed = federation()
    operation = fed.add_openapi(document, site="lab")[0]
    assert operation.declaration is not None
    assert operation.declaration.parameters["limit"] == {"type": "integer", "nullable": True, "exclusiveMinimum": 1}


def test_names_that_clash_become_distinct(fed: Federation) -> None:
    document = changed()
    document["paths"]["/pets/{petId}"]["get"]["parameters"] += [
        {"name": "petId", "in": "query", "schema": {}},
        {"name": "pet-id", "in": "cookie", "schema": {}},
        {"name": "context", "in": "query", "schema": {}},
        {"name": "class", "in": "query", "schema": {}},
        {"name": "2nd", "in": "query", "schema": {}},
    ]
    document["paths"]["/pets/{petId}"]["put"] = {
        "operationId": "get/pets/PetId",
        "parameters": document["paths"]["/pets/{petId}"]["get"]["parameters"],
        "requestBody": {
            "content": {"application/json": {"schema": {"type": "object", "properties": {"petId": {}, "x": {}}}}}
        },
    }
    get, put = [op for op in fed.add_openapi(document, site="lab") if "PetId" in op.name]
    assert (get.name, put.name) == ("pet_store.GetPetsPetId", "pet_store.GetPetsPetId_2")
    names = ["petId", "petId_query", "pet_id", "context_", "class_", "p2nd"]
    assert list(inspect.signature(get).parameters) == names
    assert list(inspect.signature(put).parameters) == [*names, "body"]


# mistakes


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"swagger": "2.0"}, ["OpenAPI 2.0", "convert"]),
        ({}, ["'openapi' is missing"]),
        ({"openapi": "4.0.0"}, ["3.0 and 3.1"]),
        (changed(openapi=[]), ["3.0 and 3.1"]),
        (changed(paths={}), ["no operations"]),
        (changed(servers=[]), ["base_url="]),
        (changed(servers=[{"url": "/v1"}]), ["'/v1'", "base_url="]),
        (changed(servers=[{"url": "https://{x}/"}]), ["base_url="]),
        (changed(servers=[{"url": "https://u:p@h/"}]), ["base_url="]),
        (changed("paths", "/pets/{petId}", "get", parameters=[]), ["['/pets/{petId}'].get", "petId"]),
        (changed("paths", "/pets", get=5), ["must be a mapping, not 5"]),
        (changed("paths", "pets", get={}), ["begin with '/'"]),
        (changed("components", "parameters", "id", style="matrix"), ["components.parameters.id", "simple"]),
        (changed("components", "parameters", "id", **{"in": ["path"]}), ["path, query, header, cookie"]),
        (changed("components", "parameters", "id", schema={"type": "file"}), ["string, number"]),
        (
            changed("paths", "/pets", "post", requestBody={"content": {"multipart/form-data": {}}}),
            ["multipart/form-data is not supported"],
        ),
        (changed("paths", "/pets", "get", parameters=[{"$ref": "#/nowhere"}]), ["does not exist"]),
        (changed("paths", "/pets", "get", parameters=[{"$ref": "https://example.com/x.yaml"}]), ["save it next to"]),
        (changed("components", parameters={"id": {"$ref": "#/components/parameters/id"}}), ["refers to itself"]),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_what_is_wrong_is_reported_with_its_place(document: Any, words: list[str]) -> None:
    found = problems(document)
    assert all(any(word in problem for problem in found) for word in words), found


def test_everything_wrong_is_reported_at_once_with_file_and_line(tmp_path: pathlib.Path) -> None:
    document = changed(servers=[{"url": "/v1"}])
    document["paths"]["/pets"]["get"]["parameters"][0]["in"] = "body"
    document["paths"]["/pets/{petId}"]["get"]["parameters"] = [{"$ref": "other.yaml#/id"}]
    (tmp_path / "api.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "other.yaml").write_text("id: {in: path}")
    found = problems(tmp_path / "api.yaml")
    assert len(found) == 4
    assert any(problem.startswith(f"{tmp_path}/other.yaml:1:5: id: a parameter must have a name") for problem in found)


def test_the_same_mistake_at_several_places_is_reported_for_each() -> None:
    document = changed()
    for method in ("get", "post"):
        document["paths"]["/pets"][method]["parameters"] = [{"in": "query"}]
    assert problems(document) == [
        f"the document: paths['/pets'].{method}.parameters[0]: a parameter must have a name"
        for method in ("get", "post")
    ]


def test_a_wrong_site_address_or_choice_is_refused() -> None:
    fed = federation()
    with pytest.raises(ValueError, match="no site 'nowhere'"):
        fed.add_openapi(PETS, site="nowhere")
    with pytest.raises(ValueError, match="base_url"):
        fed.add_openapi(PETS, site="lab", base_url="example.com")
    only(PETS, "no operation 'listCats'", "listPets", operations=["listCats"])
    fed.add_openapi(PETS, site="lab")
    with pytest.raises(ValueError, match=r"pet_store\.ListPets.* already"):
        fed.add_openapi(PETS, site="lab")


def secured(*ways: dict[str, list[str]], **schemes: Any) -> dict[str, Any]:
    found = changed("components", securitySchemes=schemes)
    return {**found, "security": list(ways)}


BEARER = {"type": "http", "scheme": "Bearer"}
KEY = {"type": "apiKey", "in": "query", "name": "key"}


def test_secrets_are_bound_to_keys_of_the_vault(fed: Federation) -> None:
    document = secured({"key": []}, {"token": [], "key": []}, token=BEARER, key=KEY)
    fed.add_openapi(document, site="lab", auth={"token": "PETS_TOKEN", "key": "PETS_KEY"}, operations=["listPets"])
    (adapter,) = fed.sites["lab"].adapters.values()
    assert adapter.bindings is not None
    assert getattr(adapter.bindings["auth_key"], "key", None) == "PETS_KEY"
    assert "auth_token" not in adapter.bindings  # the first way that there are secrets for


@pytest.mark.parametrize(
    ("document", "auth", "words"),
    [
        (secured({"token": []}, token=BEARER), {}, ["auth={'token': 'KEY'}"]),
        (secured({"token": []}, token=BEARER), {"tokn": "K"}, ["'tokn'", "did you mean 'token'"]),
        (secured({"token": []}), {}, ["'token'"]),
        (secured({"token": []}, token={"type": "mutualTLS"}), {"token": "K"}, ["mutualTLS"]),
        (secured({"token": []}, token={"type": "http", "scheme": "digest"}), {"token": "K"}, ["digest"]),
        (secured({"token": []}, token={**KEY, "in": "body"}), {"token": "K"}, ["'body'"]),
        (secured({"token": []}, token={**KEY, "in": "header", "name": "a b"}), {"token": "K"}, ["name"]),
    ],
)
def test_unsupported_security_is_reported(document: Any, auth: dict[str, str], words: list[str]) -> None:
    found = "\n".join(problems(document, auth=auth, operations=["listPets"]))
    assert all(word in found for word in words), found


def test_a_scheme_without_secrets_is_used_if_there_is_one() -> None:
    document = secured({"token": []}, {}, token=BEARER)
    fed = federation()
    (operation,) = fed.add_openapi(document, site="lab", operations=["listPets"])
    adapter = fed.sites["lab"].adapters[operation.name, None]
    assert set(adapter.bindings or ()) == {"x_trace", "limit", "from_", "tag"}


# untrusted documents

WORDS = """openapi paths /x/{a} get post parameters name in schema type properties items $ref content application/json
requestBody security components securitySchemes schemas allOf required servers url explode style responses 200 default
enum x-y path query object array #/ http"""
SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS.split()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS.split()), inner, max_size=5),
    max_leaves=25,
)


@given(st.data())
def test_an_untrusted_document_gives_all_its_operations_or_problems(data: st.DataObject) -> None:
    document = copy.deepcopy(PETS)
    holder, key = data.draw(st.sampled_from(spots(document)))
    holder[key] = data.draw(SCRAPS)
    fed = federation()
    try:
        fed.add_openapi(document, site="lab")
    except FederationError as error:
        found = error.problems
        assert found
        assert len(fed.operations) == 0
    else:
        assert len(fed.operations) == len(fed.sites["lab"].adapters) > 0


# calls


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as found:
        yield found


async def test_pipelines_ask_the_service(fed: Federation, connect: Connect, service: Service) -> None:
    fed.add_openapi(PETS, site="lab", name="pets", base_url=service.url)
    pets = fed.operations.pets
    with Pipeline() as pipeline:
        Yield(pets.ListPets(limit=PlaceParam("limit"), from_="2024-01-02", tag=["a", "b"]), place="list")
        Yield(pets.AddPet("Rex", born="2024-01-02", x_trace="t"), place="add")
        Yield(pets.GetPetsPetId(7), place="get")
    async with connect(fed) as session:
        job = await session.execute(pipeline, {"limit": 5})
        found = {result.place: result.value for result in await job.collect()}
        assert await job is JobStatus.FINISHED
    assert found["list"]["query"] == "limit=5&from=2024-01-02&tag=a&tag=b"
    assert body_of(found["add"]) == {"name": "Rex", "born": "2024-01-02"}
    assert found["add"]["headers"]["x-trace"] == "t"
    assert found["get"]["path"] == "/v1/pets/7"


def add_door(fed: Federation, url: str, scheme: dict[str, str], *paths: str) -> Any:
    """Add operations with one security scheme, and return them."""
    document = secured({"token": []}, token=scheme)
    document["paths"] = {path: {"get": {"operationId": path[1:]}} for path in paths}
    options = HttpOptions(retry=RetryPolicy(attempts=1))
    fed.add_openapi(document, site="lab", name="door", base_url=url, auth={"token": "PETS_TOKEN"}, options=options)
    return fed.operations.door


async def test_secrets_come_from_the_vault_of_the_site(
    fed: Federation, connect: Connect, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFM_SECRET_PETS_TOKEN", TOKEN)
    door = add_door(fed, service.url, BEARER, "/denied", "/wrong")
    with Pipeline() as pipeline:
        Yield(door.Denied(), place="entered")
        Yield(door.Wrong(), place="failed")
    async with connect(fed) as session:
        job = await session.execute(pipeline)
        await job.wait_until_finished()
        assert (await job.first("entered")).value == "welcome"
        (error,) = job.errors
    assert "door.Wrong (GET /wrong)" in str(error)
    assert isinstance(error, OperationFailed)
    assert TOKEN not in str(error) + error.remote_traceback


@pytest.mark.parametrize(
    ("scheme", "secret", "repeated"),
    [
        ({"type": "http", "scheme": "bearer"}, "of-somebody-else", ["of-somebody-else"]),
        ({"type": "http", "scheme": "basic"}, "ann:of-süme-one", ["of-süme-one", "YW5uOm9mLXPDvG1lLW9uZQ=="]),
        ({"type": "apiKey", "in": "query", "name": "who"}, "of some/one", ["of some/one", "of%20some%2Fone"]),
        ({"type": "apiKey", "in": "cookie", "name": "who"}, "of some;one", ["of some;one", "of%20some%3Bone"]),
    ],
    ids=["bearer", "basic", "query", "cookie"],
)
async def test_a_service_that_repeats_a_secret_does_not_make_it_known(
    scheme: dict[str, str], secret: str, repeated: list[str], fed: Federation, connect: Connect, service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("DFM_SECRET_PETS_TOKEN", secret)
    pipeline = pipeline_of(add_door(fed, service.url, scheme, "/repeats").Repeats)
    service.repeated = repeated
    async with connect(fed) as session:
        job = await session.execute(pipeline)
        await job.wait_until_finished()
        (error,) = job.errors
    assert isinstance(error, OperationFailed)
    seen = service.seen[-1]
    assert any(text in f"{seen.query} {seen.headers}" for text in repeated)
    shown = "".join(traceback.format_exception(error)) + repr(error.__cause__) + error.remote_traceback
    assert "who are you," in shown
    assert not [text for text in repeated if text in shown]


def test_operations_of_services_survive_a_file(fed: Federation, tmp_path: pathlib.Path) -> None:
    fed.add_openapi(secured({"token": []}, token=BEARER), site="lab", name="pets", auth={"token": "PETS_TOKEN"})
    fed.to_yaml(tmp_path / "federation.dfm.yaml")
    read = Federation.from_yaml(tmp_path / "federation.dfm.yaml")
    for key, adapter in fed.sites["lab"].adapters.items():
        found = read.sites["lab"].adapters[key]
        assert (found.code, found.bindings) == (adapter.code, adapter.bindings)
        assert read.operations[key[0]].declaration == fed.operations[key[0]].declaration


async def test_an_adapter_in_a_file_asks_the_service(fed: Federation, service: Service, tmp_path: pathlib.Path) -> None:
    fed.add_openapi(PETS, site="lab", name="pets", base_url=service.url, operations=["listPets"])
    fed.to_yaml(tmp_path / "federation.dfm.yaml")
    read = Federation.from_yaml(tmp_path / "federation.dfm.yaml")
    async with Session(read, target="inline") as session:
        found = await first_value(session, pipeline_of(read.operations.pets.ListPets, limit=3))
    assert found["query"] == "limit=3"
