"""``dfm-async flare probe``: for containers. Loads little, because it runs every few seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import typer

from dfm_async.cli.exits import BadInput, Exit, Unreachable
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.probing import greet, is_connected

__all__ = ["probe_site"]

_PATIENCE: Final = 5.0
"""How many seconds a server may take to answer."""


async def probe_site(folder: Path) -> int:
    """Tells whether a server answers, or a client is connected.

    Raises:
        Unreachable: it does not, or is not.
        BadInput: it is the kit of a user.
    """
    kit = Kit(Path(os.path.abspath(folder)))  # noqa: ASYNC240 - asks nobody
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
