"""``dfm-async flare start`` and ``doctor``: one startup kit, where its site is."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Final

import typer

from dfm_async.cli.doctor import tell
from dfm_async.cli.exits import BadInput, Exit, Unwritable
from dfm_async.cli.program import complain
from dfm_async.cli.streams import StandardOutput
from dfm_async.deploy.examination import examine
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.site_process import run_site
from dfm_async.errors import DeploymentError

__all__ = ["examine_kit", "start_site"]

_MOST: Final = 10_000
"""How many lines may wait to be written."""
_LAST_WORDS: Final = 1.0
"""For how many seconds the last lines may take."""


def _kit(folder: Path) -> Kit:
    kit = Kit(Path(os.path.abspath(folder)))
    try:
        _ = kit.kind
    except DeploymentError as error:
        raise BadInput(f"{folder}: {'; '.join(error.problems)}") from error
    return kit


async def start_site(folder: Path) -> int:
    """Runs the server or the client of a kit. What FLARE writes goes to standard output, what we say to the other."""
    kit = _kit(folder)
    kind = kit.kind
    lines = _Lines()

    def ready() -> None:
        told = "takes clients" if kind == "server" else "is registered"
        typer.echo(f"dfm-async: {kind} {kit.name} {told}", err=True)

    writing = asyncio.ensure_future(lines.write())
    try:
        code = await run_site(kit, lines.put, ready)
    finally:
        lines.end()
        await asyncio.wait([writing], timeout=_LAST_WORDS)
        writing.cancel()
        await asyncio.wait([writing])
    complain(f"{kind} {kit.name} has ended with exit code {code}")
    return Exit.FAILED if code else Exit.SUCCESS


class _Lines:
    """What FLARE writes, on its way to standard output. Whoever does not read there stops nothing: old lines go."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque(maxlen=_MOST)
        self._wake = asyncio.Event()
        self._ended = False

    def put(self, line: str) -> None:
        """Takes a line."""
        self._waiting.append(line)
        self._wake.set()

    def end(self) -> None:
        """Says that there will be no more."""
        self._ended = True
        self._wake.set()

    async def write(self) -> None:
        """Writes lines until the end, or until nobody can read them any more."""
        output = StandardOutput()
        with contextlib.suppress(BrokenPipeError, Unwritable):  # the site goes on, and has logs of its own
            while not self._ended or self._waiting:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await output.line(self._waiting.popleft())
                if self._ended:
                    return


async def examine_kit(folder: Path, *, offline: bool, as_json: bool) -> int:
    """Tells everything that was found about a kit. Gives the exit code: 1 if something is bad."""
    return await tell(examine(_kit(folder), offline=offline), as_json=as_json)
