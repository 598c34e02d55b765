"""Advisors of adapters see the arguments of their own code; the tree has the names of the operation's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dfm_async import Advise, Federation, Pipeline, PipelineError, PlaceParam, Session
from dfm_async.discovery import Discovery, SingleFieldAdvice
from dfm_async.federation import ClassPath, Const, ExposedParameter, FromParam, FromSecrets
from dfm_async.federation.operation import Declaration
from tests.conftest import Connect

SECRET = "hunter2-hunter2"


def stations() -> Federation:
    federation = Federation("stations")

    def read(city: str, span: int = 24) -> str:
        return city

    federation.declare("weather.Read", read, declaration=Declaration(parameters={"span": {"discoverable": False}}))
    federation.declare("weather.Leak", lambda text: text)
    north, south = federation.site("north"), federation.site("south")
    quality = ExposedParameter(param="grade", type="string")
    bindings: dict[str, Any] = {
        "place": FromParam("city"),
        "hours": FromParam("span"),
        "source": Const("radar"),
        "token": FromSecrets("KEY"),
    }
    path = ClassPath("tests.discovery.adapters.Station", {"kind": "north"})
    north.adapt("weather.Read", path, bind={**bindings, "quality": Const("raw", expose_as=quality)})
    path = ClassPath("tests.discovery.adapters.Station")
    south.adapt("weather.Read", path, bind={**bindings, "quality": Const("odd")}, provider="archive")
    leak = ClassPath("tests.discovery.adapters.Leak")
    south.adapt("weather.Leak", leak, bind={"text": FromParam("text"), "token": FromSecrets("KEY")})
    return federation


@pytest.fixture
def federation() -> Federation:
    return stations()


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFM_SECRET_KEY", SECRET)


async def asked(pipeline: Pipeline, federation: Federation) -> Discovery:
    async with Session(federation, target="inline") as session:
        return await session.discover(pipeline)


async def test_advice_for_arguments_has_the_names_of_parameters(federation: Federation, connect: Connect) -> None:
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.weather.Read(Advise())
    async with connect(federation) as session:
        discovery = await session.discover(pipeline)
    city = discovery.sites["north"]["weather.Read#0"]
    assert city == SingleFieldAdvice(field="city", value=["north", "north", "radar", len(SECRET)], form="one of")
    (wrong,) = discovery.errors()
    assert (wrong.site, wrong.field) == ("south", "quality")
    assert wrong.message == "expected one of ['raw', 'fine'], not 'odd'"


async def test_a_parameter_that_a_site_adds_is_asked_only_there_and_only_on_request(federation: Federation) -> None:
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.weather.Read("radar", grade=Advise())
        federation.operations.weather.Read("radar", grade="coarse")
    discovery = await asked(pipeline, federation)
    assert list(discovery.sites) == ["north"]
    nodes = discovery.sites["north"]
    assert nodes["weather.Read#0"] == SingleFieldAdvice(field="grade", value=["raw", "fine"], form="one of")
    assert {error.field for error in discovery.errors()} == {"grade"}


async def test_asking_for_what_is_not_discoverable_is_a_problem(federation: Federation) -> None:
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.weather.Read("radar", Advise(), site="north")
        federation.operations.weather.Read("radar", PlaceParam("span"), site="north")
    with pytest.raises(PipelineError) as caught:
        await asked(pipeline, federation)
    (problem,) = caught.value.problems
    assert problem.statement == "weather.Read#0"
    assert "'span'" in problem.message
    assert "not discoverable" in problem.message


async def test_values_of_closed_parameters_are_checked_all_the_same(federation: Federation) -> None:
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.weather.Read("radar", 7, site="north")
    (wrong,) = (await asked(pipeline, federation)).errors()
    assert (wrong.field, wrong.message) == ("span", "expected one of [1, 2], not 7")


async def test_secrets_are_not_in_the_errors_of_advisors(federation: Federation, connect: Connect) -> None:
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.weather.Leak()
    async with connect(federation) as session:
        discovery = await session.discover(pipeline)
    (error,) = discovery.errors()
    assert error.message == "RuntimeError: cannot use ***"
    assert SECRET not in discovery.to_json()
    assert SECRET not in str(discovery)


FILE = """
dfm: 1.0.0
info: {api-version: 0.1.0, code-package: minifed}
operations:
  weather.Read:
    parameters:
      city: {type: string}
      span: {type: integer, default: 24, discoverable: false}
    required: [city]
    returns: string
sites:
  north:
    interface:
      "#/operations/weather.Read":
        adapter: {path: tests.discovery.adapters.Station, args: {kind: file}}
        args:
          place: {from-param: city}
          hours: {from-param: span}
          source: radar
          token: {from-secrets: KEY}
          quality: {const: raw, expose-as: {param: grade, type: string, description: how good, discoverable: false}}
"""


async def test_a_federation_from_a_file_gives_advice(tmp_path: Path) -> None:
    path = tmp_path / "federation.dfm.yaml"
    path.write_text(FILE)
    federation = Federation.from_yaml(path)
    with Pipeline(mode="discovery") as pipeline:
        federation.operations.weather.Read(Advise())
    assert str(await asked(pipeline, federation)).splitlines() == [
        "Discovery",
        "north",
        "└─ weather.Read#0",
        f'   └─ city: one of "file", "north", "radar", {len(SECRET)}',
    ]
    with Pipeline(mode="discovery") as closed:
        federation.operations.weather.Read("radar", span=Advise(), grade=Advise())
    with pytest.raises(PipelineError) as caught:
        await asked(closed, federation)
    assert [problem.message.split("'")[1] for problem in caught.value.problems] == ["span", "grade"]
