"""A federation whose files refer to each other from the root of their repository, as in DFM, on both targets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dfm_async import Advise, Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.flare import FlareOptions, LocalFlare
from tests.federations import FROM_ROOT, ROOT, file_of
from tests.flare.shared import KITS

Target = Literal["local", "flare"]
CODE = ROOT.parents[1]
GRID = np.arange(6.0).reshape(1, 2, 3)


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter_packages: None) -> Federation:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    federation = Federation.from_yaml(file_of(FROM_ROOT), compat=True)
    monkeypatch.chdir(tmp_path)  # nothing is found from here any longer
    return federation


@asynccontextmanager
async def connected(fed: Federation, target: Target, folder: Path) -> AsyncIterator[Session]:
    """Connects a session; on FLARE with the adapters that are installed at the sites."""
    if target == "local":
        async with Session(fed, homesite="homesite") as session:
            yield session
        return
    environment = {"PYTHONPATH": f"{CODE}:{ROOT}", "XDG_CACHE_HOME": str(folder / "cache")}
    up = LocalFlare.up(fed, folder / "flare", homesite="homesite", kits=KITS, environment=environment)
    async with up as flare:
        options = FlareOptions(startup_kit=str(flare.startup_kit), user=flare.user)
        async with Session(fed, homesite="homesite", target="flare", options=options) as session:
            yield session


def winds(fed: Federation) -> Pipeline:
    """Loads at the archive, calculates at the server, and draws at home."""
    operations = fed.operations
    with Pipeline("winds") as pipeline:
        loaded = operations.data.LoadWinds(["u10m", "v10m"], PlaceParam("selection"), site="archive")
        speed = operations.grids.Norm(loaded, ["u10m", "v10m"], output_name="speed", site="server")
        levels = fed.sites["homesite"].operations.grids.ToLevels(speed, "speed", highest=5.0)
        Yield(loaded, place="loaded")
        Yield(speed, place="speed")
        Yield(operations.grids.Render(levels, "speed", site="homesite"), place="pictures")
    return pipeline


def questions(fed: Federation) -> Pipeline:
    with Pipeline("questions", mode="discovery") as pipeline:
        fed.operations.data.LoadWinds(variables=Advise(), selection=Advise(), site="archive")
        fed.operations.grids.Norm(PlaceParam("data"), ["u10m"], p=Advise(), site="server")
    return pipeline


@pytest.mark.timeout(180)
@pytest.mark.parametrize("target", ["local", "flare"])
async def test_federation_of_a_repository_runs_as_in_its_root(target: Target, fed: Federation, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    async with connected(fed, target, tmp_path) as session:
        for kept in (None, "yes"):
            job = await session.execute(winds(fed), {"selection": {"time": "2026-01-02T00:00"}})
            found = {result.place: result.value for result in await job.collect()}
            assert found["loaded"].attrs.get("kept") == kept
        discovery = await session.discover(questions(fed))
    assert np.allclose(found["loaded"]["v10m"], GRID * 4 / 5)
    assert np.allclose(found["speed"]["speed"], GRID)
    assert found["speed"].attrs["source"] == "made up"
    assert list(found["speed"]["lat"]) == [10.0, 20.0]
    assert type(found["pictures"]).__name__ == "Image"
    assert np.asarray(found["pictures"]).tolist() == [[0, 51, 102], [153, 204, 255]]
    assert discovery.errors() == []
    assert str(discovery).splitlines()[1:] == [
        "server",
        "└─ grids.Norm#1",
        "   └─ p: one of 1.0, 2.0",
        "archive",
        "└─ data.LoadWinds#0",
        '   └─ variables: some of "u10m", "v10m"',
        '      └─ selection: {"time": from 2026-01-01 to 2026-01-31}',
    ]
