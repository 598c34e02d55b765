"""With the real nv_dfm_core: what it builds, writes and runs, we read and run with the same results."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dfm_async import BestOf, Federation, ForEach, If, Pipeline, PlaceParam, Session, Yield
from tests.federations import ROOT, file_of
from tests.interop.conftest import PROGRAMS, output_of

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Peer:
    """The real one: how to call it, and what it ran."""

    command: tuple[Path, ...]
    environment: dict[str, str]
    cases: tuple[dict[str, Any], ...]

    def written_again(self, pipelines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lets it read pipelines and write them again."""
        given = "".join(f"{json.dumps(pipeline)}\n" for pipeline in pipelines)
        output = output_of(*self.command, "read", env=self.environment, input=given)
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def peer(nv_dfm_core: Path, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Lets the real one run its pipelines, once for all tests."""
    folder = tmp_path_factory.mktemp("dfm")
    for name in ("examplefed", "myfed"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(folder)}
    command = (nv_dfm_core, PROGRAMS / "dfm_peer.py", folder)
    output = output_of(*command, env=environment)
    return Peer(command, environment, tuple(json.loads(line) for line in output.splitlines()))


def federation(name: str) -> Federation:
    return Federation.from_yaml(file_of(name), compat=True)


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value.tolist() if hasattr(value, "tolist") else value))


@pytest.mark.usefixtures("adapter_packages")
@pytest.mark.parametrize("name", ["examplefed", "myfed"])
async def test_what_nv_dfm_core_runs_yields_the_same_here(name: str, peer: Peer) -> None:
    cases = [case for case in peer.cases if case["federation"] == name]
    found = federation(name)
    assert cases
    async with Session(found, homesite=cases[0]["homesite"]) as session:
        for case in cases:
            assert case["errors"] == []
            job = await session.execute(found.pipeline_from_dfm(case["pipeline"]), case["params"])
            ours = [[result.place, list(result.frame), plain(result.value)] for result in await job.collect()]
            assert sorted(ours, key=str) == sorted(case["yielded"], key=str), case["pipeline"]["name"]


def test_what_we_write_nv_dfm_core_reads(peer: Peer) -> None:
    """All but TryFromCache, which it cannot read itself: the class name that it writes for it does not exist."""
    fed = federation("examplefed")
    greet = fed.operations.users.GreetMe
    with Pipeline("ours", api_version="0.0.1") as ours:
        first = greet(PlaceParam("name"), site="server")
        second = fed.sites["concierge"].operations.users.GreetMe("Ann", greeting="Hey {name}", after=first)
        with ForEach(first) as letter:
            with If((letter != "x") & ~(second == [1, "y"]) | (second.name > 3)):
                Yield(greet(letter, site=BestOf(["server", "reception"])), place="letters")
        Yield(greet(second["k"]), place="cached")
        Yield({"a": [1, None, {"b": 2.5}]}, place="literal")
    theirs = [fed.pipeline_from_dfm(case["pipeline"]) for case in peer.cases if case["federation"] == "examplefed"]
    pipelines = [ours, *theirs]
    again = peer.written_again([fed.pipeline_to_dfm(pipeline) for pipeline in pipelines])
    assert [fed.pipeline_from_dfm(pipeline) for pipeline in again] == pipelines
