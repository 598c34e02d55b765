"""``dfm-async flare start`` and ``doctor``: one startup kit, where its site is."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from dfm_async.cli.doctor import tell
from dfm_async.cli.exits import Exit
from dfm_async.cli.program import complain
from dfm_async.deploy.examination import examine
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.site_process import run_site

__all__ = ["examine_kit", "start_site"]


def _kit(folder: Path) -> Kit:
    return Kit(Path(os.path.abspath(folder)))


async def start_site(folder: Path) -> int:
    """Runs the server or the client of a kit. What FLARE writes goes to standard output, what we say to the other."""
    kit = _kit(folder)
    kind = kit.kind

    def ready() -> None:
        told = "takes clients" if kind == "server" else "is registered"
        typer.echo(f"dfm-async: {kind} {kit.name} {told}", err=True)

    code = await run_site(kit, typer.echo, ready)
    complain(f"{kind} {kit.name} has ended with exit code {code}")
    return Exit.FAILED if code else Exit.SUCCESS


async def examine_kit(folder: Path, *, offline: bool, as_json: bool) -> int:
    """Tells everything that was found about a kit. Gives the exit code: 1 if something is bad."""
    return await tell(examine(_kit(folder), offline=offline), as_json=as_json)
