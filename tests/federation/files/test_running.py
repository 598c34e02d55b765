"""The federations of files run, on both targets, with the classes that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield
from tests.conftest import Connect
from tests.federation.files.rig import loaded
from tests.federations import file_of

pytestmark = pytest.mark.usefixtures("adapter_packages")


def read(name: str) -> Federation:
    return Federation.from_yaml(file_of(name), packages=(name,), compat=True)


async def results(connect: Connect, federation: Federation, pipeline: Pipeline, **params: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    async with connect(federation, homesite="homesite") as session:
        job = await session.execute(pipeline, params)
        async for result in job.results(ordered=True):
            found.setdefault(result.place, []).append(result.value)
    return found


async def test_every_site_of_the_example_federation_greets_in_its_own_words(connect: Connect) -> None:
    federation = read("examplefed")
    greet = federation.operations.users.GreetMe
    with Pipeline("greet") as pipeline:
        name = PlaceParam("name", multiuse=True)
        for site in ("concierge", "server", "reception"):
            Yield(greet(name, site=site), place=site)
        here = federation.sites["concierge"].operations.users.GreetMe
        Yield(here(name, greeting="Hello, {name}."), place="own words")
    assert await results(connect, federation, pipeline, name="Ann") == {
        "concierge": ["The concierge says good morning, Ann!"],
        "server": ["The server says good evening, Ann!"],
        "reception": ["examplefed has the honour to receive you, Ann."],
        "own words": ["Hello, Ann."],
    }


async def test_arrays_are_made_sliced_and_drawn(connect: Connect) -> None:
    federation = read("myfed")
    array = federation.operations.array
    with Pipeline("plot") as pipeline:
        whole = array.Create(shape=(3, 4, 5), min=0, site="loader")
        part = array.Subset(array=whole, index=[2], site="loader")
        Yield(part, place="part")
        Yield(array.Plot2D(part, site="plotter"), place="picture")
        Yield(array.Create(shape=[2]), place="bound")
    found = await results(connect, federation, pipeline)
    (part,), (picture,), (bound,) = found["part"], found["picture"], found["bound"]
    assert part.shape == (4, 5)
    assert (part.min(), part.max()) == pytest.approx((100 / 3, 100.0))  # what is exposed overrides, also with nought
    assert (picture.dtype, picture.min(), picture.max()) == (np.uint8, 0, 255)
    assert bound.tolist() == [-100.0, 100.0]


async def test_parameters_may_have_names_that_mean_something_in_python(tmp_path: Path) -> None:
    names = ["self", "args", "kwargs", "after", "retry", "deadline", "context", "name"]
    parameters = ", ".join(f"{name}: {{type: integer}}" for name in names)
    federation = loaded(
        tmp_path,
        f"""\
        operations: {{a.Tell: {{parameters: {{{parameters}}}, returns: object}}}}
        sites:
          s:
            interface:
              "#/operations/a.Tell":
                adapter: tests.site.adapters.Echo
                args: {{{", ".join(f"{name}_: {{from-param: {name}}}" for name in names)}}}
        """,
    )
    given = dict(zip(names, range(8), strict=True))
    with Pipeline() as pipeline:
        Yield(federation.operations.a.Tell(**given), place="anywhere")
        Yield(federation.sites["s"].operations.a.Tell(**given), place="placed")
    async with Session(federation, target="inline") as session:
        found = await (await session.execute(pipeline)).collect()
    assert [result.value for result in found] == [{f"{name}_": value for name, value in given.items()}] * 2


async def test_every_binding_has_its_value_at_the_call(connect: Connect) -> None:
    federation = read("minifed")
    operations = federation.operations
    with Pipeline("all") as pipeline:
        x = PlaceParam("x", multiuse=True)
        label = operations.text.Label
        Yield(label(x), place="label")
        Yield(label(x, ending="!", unit=""), place="exposed")
        Yield(operations.math.Scale(x), place="default")
        Yield(operations.math.Square(x, site="alpha", provider="acme"), place="provider")
        with ForEach(operations.data.Range(3, start=4)) as number:
            Yield(operations.math.Square(number, site="beta"), place="squares")
        state = federation.schemas.states.State(value=1)
        Yield(operations.states.Step(state, mode="quick", limits={"low": 0, "high": 1.5}), place="state")
    found = await results(connect, federation, pipeline, x=2.5)
    assert found.pop("squares") == [16, 25, 36]
    assert found == {
        "label": ["no. 2 metres in the north (3 places, 14 letters)"],
        "exposed": ["no. 2  in the north! (3 places, 14 letters)"],
        "default": [6.0],
        "provider": [6.25],
        "state": [{"value": 1.5, "mode": "quick"}],
    }
