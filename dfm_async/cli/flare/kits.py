"""Startup kits: ``dfm-async flare start``, ``probe`` and ``doctor``, and the option ``--flare``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

import typer

from dfm_async.cli.command_options import SessionOptions
from dfm_async.cli.command_runner import BadInput, Exit, Unreachable, Unwritable, print_message
from dfm_async.cli.terminal import StandardOutput
from dfm_async.deploy.kit import Kit, greet, is_connected
from dfm_async.errors import DeploymentError
from dfm_async.model.flare import FlareOptions

_MOST: Final = 10_000
"""The maximum number of lines that wait to be written."""
_DRAIN: Final = 1.0
"""The time limit for writing the last lines, in seconds."""


def _kit(folder: Path) -> Kit:
    kit = Kit(Path(os.path.abspath(folder)))
    try:
        _ = kit.kind
    except DeploymentError as error:
        raise BadInput(f"{folder}: {'; '.join(error.problems)}") from error
    return kit


async def start_site(folder: Path) -> int:
    """Run the server or the client of a kit; output of FLARE goes to standard output, our own to standard error."""
    from dfm_async.deploy.flare_process import run_site

    kit = _kit(folder)
    kind = kit.kind
    lines: asyncio.Queue[str | None] = asyncio.Queue(_MOST)

    def put(line: str | None) -> None:
        if lines.full():  # a slow reader loses the oldest lines, and blocks nothing
            lines.get_nowait()
        lines.put_nowait(line)

    def ready() -> None:
        state = "accepts clients" if kind == "server" else "is registered"
        typer.echo(f"dfm-async: {kind} {kit.name} {state}", err=True)

    writing = asyncio.ensure_future(_write(lines))
    try:
        code = await run_site(kit, put, ready)
    finally:
        put(None)
        await asyncio.wait([writing], timeout=_DRAIN)
        writing.cancel()
        await asyncio.wait([writing])
    print_message(f"{kind} {kit.name} has ended with exit code {code}")
    return Exit.FAILED if code else Exit.SUCCESS


async def _write(lines: asyncio.Queue[str | None]) -> None:
    """Write lines to standard output until None comes, or the reader has gone: the site continues, and has logs."""
    output = StandardOutput()
    with contextlib.suppress(BrokenPipeError, Unwritable):
        while (line := await lines.get()) is not None:
            await output.line(line)


async def examine_kit(folder: Path, *, offline: bool, as_json: bool) -> int:
    """Check a kit, and show each finding. Return the exit code: 1 if something is bad."""
    from dfm_async.cli.doctor import show_findings
    from dfm_async.deploy.doctor import diagnose

    return await show_findings(diagnose(_kit(folder), offline=offline), as_json=as_json)


_TIMEOUT: Final = 5.0
"""The time limit for the answer of a server, in seconds."""


async def probe_site(folder: Path) -> int:
    """Check whether a server answers, or a client is connected."""
    kit = Kit(Path(os.path.abspath(folder)))  # noqa: ASYNC240 - no I/O
    if kit.kind == "server":
        _, port = kit.server_address()
        try:
            answer = await greet(kit, "localhost", port, timeout=_TIMEOUT)
        except OSError as error:
            raise Unreachable(f"the server does not answer at port {port}: {error or type(error).__name__}") from error
        typer.echo(f"the server answers, with {answer}")
        return Exit.SUCCESS
    if kit.kind == "user":
        raise BadInput(f"{folder} is the kit of a user, which has no process to probe")
    if not is_connected(kit):
        host, port = kit.server_address()
        raise Unreachable(f"client {kit.name} does not run on this machine, or has no connection to {host}:{port}")
    typer.echo(f"client {kit.name} is connected")
    return Exit.SUCCESS


def flare_options(options: SessionOptions) -> FlareOptions | None:
    """Return the options of a session on FLARE; None if it runs on this machine."""
    kit = options.flare
    if kit is None:
        if options.user is not None or options.bring_code:
            raise BadInput("--user and --bring-code need --flare KIT")
        return None
    if options.store is not None:
        raise BadInput("--store cannot be used with --flare: the federation keeps the jobs")
    if options.workers is not None:
        raise BadInput("--workers cannot be used with --flare: each site chooses its number of workers")
    found = Kit(Path.cwd() / kit)
    try:
        found.start_file()
    except DeploymentError as error:
        raise BadInput(f"--flare {kit}: {'; '.join(error.problems)}") from error
    if found.kind != "user":
        raise BadInput(f"--flare {kit}: this is the kit of a {found.kind}: name the folder of a user's startup kit")
    return FlareOptions(
        startup_kit=str(found.folder),
        user=options.user or found.name,
        code="travels" if options.bring_code else "installed",
    )
