"""The federations of DFM's tutorials, and one with everything, load from their own files."""

from __future__ import annotations

import sys

import pytest

from dfm_async import Federation, Session
from dfm_async.federation import (
    CacheConfig,
    ClassPath,
    Const,
    Cost,
    ExposedParameter,
    FromParam,
    FromProvider,
    FromSecrets,
    FromSite,
    SendCost,
    VaultConfig,
)
from tests.federation.files.rig import parameters_of
from tests.federations import NAMES, file_of


@pytest.mark.parametrize("name", NAMES)
def test_a_federation_loads_without_importing_its_code(name: str) -> None:
    Federation.from_yaml(file_of(name))
    before = set(sys.modules)
    federation = Federation.from_yaml(file_of(name))
    assert federation.name == name
    assert set(sys.modules) == before
    assert not set(NAMES) & set(sys.modules)


def test_a_session_takes_the_path_of_a_file() -> None:
    for path in (file_of("myfed"), str(file_of("myfed"))):
        session = Session(path, homesite="homesite", target="inline")
        assert list(session.federation.sites) == ["homesite", "loader", "plotter"]


def test_sites_of_the_example_federation_have_adapters_of_their_own() -> None:
    federation = Federation.from_yaml(file_of("examplefed"))
    adapters = {name: site.adapters["users.GreetMe", None] for name, site in federation.sites.items()}
    assert {name: adapter.code for name, adapter in adapters.items()} == {
        "concierge": ClassPath("examplefed.lib.customer_service.GreetMe"),
        "server": ClassPath("examplefed.lib.customer_service.GreetMe"),
        "reception": ClassPath("examplefed.lib.customer_service.GreetMeReception"),
    }
    assert adapters["reception"].bindings == {"name": FromParam("name"), "venue": FromSite("federation_name")}
    assert list(adapters["concierge"].exposed) == ["greeting"]
    assert (
        str(federation.operations.users.GreetMe.call_signature) == "(name: str, *, greeting: str | None = None) -> str"
    )
    assert federation.provision["docker"]["tag"] == "0.0.1"


def test_what_is_exposed_may_have_the_name_of_a_parameter() -> None:
    federation = Federation.from_yaml(file_of("myfed"))
    create = federation.operations.array.Create
    assert str(create.call_signature) == "(shape: list, *, min: float | None = None, max: float | None = None)"
    assert set(create.exposed) == {"min", "max"}
    assert create.__doc__ == (
        "Makes an array whose values rise from one corner to the other\n\nArgs:\n    shape: How long each side is\n"
        "    min: The least value\n    max: The greatest value"
    )


def test_every_binding_is_read() -> None:
    alpha = Federation.from_yaml(file_of("minifed")).sites["alpha"]
    assert alpha.adapters["text.Label", None].bindings == {
        "number": FromParam("number", "as it comes"),
        "prefix": Const("no."),
        "digits": Const(0),
        "upper": Const(False),
        "suffix": Const("", ExposedParameter(param="ending", type="string", description="What comes last")),
        "places": Const([1, 2, {"deep": None}]),
        "token": FromSecrets("token"),
        "region": FromSite("region"),
        "unit": FromProvider("acme", "unit", ExposedParameter(param="unit", type="string")),
    }
    assert alpha.adapters["text.Label", None].is_async is False
    assert alpha.adapters["math.Square", None].bindings is None
    assert alpha.adapters["math.Square", None].is_async is True


def test_sites_have_what_their_files_say() -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    assert list(federation.sites) == ["alpha", "beta", "gamma"]
    alpha = federation.sites["alpha"]
    assert alpha.impl == ClassPath("minifed.lib.objects.AlphaSite", {"region": "north"})
    assert alpha.cache == CacheConfig(protocol="memory", base_path="/minifed")
    assert alpha.vault == VaultConfig(path="minifed.lib.objects.Shelf", args={"secrets": {"token": "opens the door"}})
    assert alpha.send_cost == {"beta": SendCost(fixed_time=0.1, bandwidth=1e6), "gamma": SendCost(fixed_time=0.5)}
    assert alpha.adapters["math.Square", None].cost == Cost(
        fixed_time=0.01, throughput=1e6, fixed_size=8, output_factor=0.5
    )
    assert federation.info == {"maintainer": "somebody"}


def test_providers_have_adapters_and_an_object() -> None:
    alpha = Federation.from_yaml(file_of("minifed")).sites["alpha"]
    assert alpha.providers["acme"].impl == ClassPath("minifed.lib.objects.Acme", {"unit": "metres"})
    assert alpha.providers["plain"].impl is None
    assert alpha.adapters["math.Scale", "acme"].code == ClassPath("minifed.lib.numbers.Scale", {"bias": 1})
    assert [name for name, provider in alpha.adapters if provider == "acme"] == ["math.Square", "math.Scale"]


def test_parts_of_other_files_are_in_their_places() -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    assert list(federation.operations) == ["math.Square", "math.Scale", "text.Label", "data.Range", "states.Step"]
    assert (
        str(federation.operations.data.Range.signature.parameters) == "(count: int, *, start: int | None = 0) -> list"
    )
    gamma = federation.sites["gamma"]
    assert [name for name, _ in gamma.adapters] == ["math.Square", "data.Range", "states.Step"]
    assert parameters_of(federation, "states.Step")["model"] == {
        "type": "minifed.lib.models.Model",
        "accepts_literal_input": True,
        "accepts_node_input": False,
        "accepts_place_input": True,
        "discoverable": False,
    }
