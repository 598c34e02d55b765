"""A small federation in files, and its startup kits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dfm_async import Federation
from dfm_async.deploy.example import write_example
from dfm_async.deploy.federation_kits import Provisioned, project_of, provision_federation
from dfm_async.flare import User

HOST = "flare-server"
ANN = "ann@example.org"


class Made(NamedTuple):
    """A provisioned federation."""

    folder: Path
    example: Path
    """The folder of its package, for PYTHONPATH."""
    federation: Federation
    provisioned: Provisioned
    kits: Path


def make(folder: Path) -> Made:
    file, _ = write_example(folder / "example")
    federation = Federation.from_yaml(file)
    provisioned = asyncio.run(provisioned_in(folder / "out", federation))
    return Made(folder / "out", folder / "example", federation, provisioned, provisioned.folder)


async def provisioned_in(folder: Path, federation: Federation, **changes: Any) -> Provisioned:
    allow_code = changes.pop("allow_code", ["desk"])
    project = replace(project_of(federation, server=HOST, users=[User(ANN)]), **{"orgs": {"lab": "Uni"}, **changes})
    return await provision_federation(federation, project, folder, allow_code=allow_code)
