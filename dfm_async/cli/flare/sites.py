"""``dfm-async flare start``, ``probe`` and ``doctor``: one startup kit, where its site is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import typer

from dfm_async.cli.doctor import tell
from dfm_async.cli.exits import BadInput, Exit, Unreachable
from dfm_async.cli.program import complain
from dfm_async.deploy.examination import examine
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.site_process import greet, is_connected, run_site

__all__ = ["examine_kit", "probe_site", "start_site"]

_PATIENCE: Final = 5.0
"""How many seconds a server may take to answer a probe."""


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


async def probe_site(folder: Path) -> int:
    """Tells whether a server answers, or a client is connected.

    Raises:
        Unreachable: it does not, or is not.
        BadInput: it is the kit of a user.
    """
    kit = _kit(folder)
    if kit.kind == "server":
        _, port = kit.server_address()
        try:
            told = await greet(kit, "localhost", port, timeout=_PATIENCE)
        except OSError as error:
            raise Unreachable(f"the server does not answer at port {port}: {error or type(error).__name__}") from error
        typer.echo(f"the server answers, with {told}")
        return Exit.SUCCESS
    if kit.kind == "user":
        raise BadInput(f"{folder} is the kit of a user: nothing of it runs that could be probed")
    if not is_connected(kit):
        host, port = kit.server_address()
        raise Unreachable(f"client {kit.name} does not run here, or has no connection to {host}:{port}")
    typer.echo(f"client {kit.name} is connected")
    return Exit.SUCCESS


async def examine_kit(folder: Path, *, offline: bool, as_json: bool) -> int:
    """Tells everything that was found about a kit. Gives the exit code: 1 if something is bad."""
    return await tell(examine(_kit(folder), offline=offline), as_json=as_json)
