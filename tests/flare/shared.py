"""One real federation for all processes of a test run: the first that needs it starts it, it ends with the last.

``python -m tests.flare.shared NAME FOLDER`` keeps it up as long as somebody is connected to its socket.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dfm_async.deploy.local_flare import LocalFlare

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".nox" / "federations"
KITS = HOME / "kits"
SITES = ("archive", "lab", "desk", "server")
"""The sites of all federations that tests run there, besides ``home``."""
USERS = tuple(f"user{number}@dfm.local" for number in range(4))
"""Each process of a test run is another one: their jobs do not meet."""


class Shared(NamedTuple):
    """The federation, as a test sees it."""

    startup_kit: str
    user: str
    folder: str
    hold: socket.socket
    """Keeps it up."""


def acquire(name: str) -> Shared:
    """Gives the federation of a test run, by the name of the run; starts it if nobody has."""
    HOME.mkdir(parents=True, exist_ok=True)
    state = HOME / f"{name}.json"
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hold = _connect(name)
        if hold is None:
            state.unlink(missing_ok=True)
            command = [sys.executable, "-m", __name__, name, str(HOME / name)]
            environment = {key: value for key, value in os.environ.items() if key != "TMPDIR"}
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment) as keeper:
                assert keeper.stdout is not None
                ready = keeper.stdout.readline()  # it closes its output then
                assert ready.strip() == b"ready", f"the federation does not start: {ready!r}"
                keeper.returncode = 0  # it is left alone: it ends with the last of us
            hold = _connect(name)
            assert hold is not None
    found = json.loads(state.read_text())
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(USERS)
    return Shared(f"{found['folder']}/{USERS[number]}", USERS[number], found["folder"], hold)


def _address(name: str) -> str:
    return f"\0dfm-async-tests-{name}"


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address(name))
    except OSError:
        connection.close()
        return None
    return connection


async def _keep(name: str, folder: Path) -> None:
    held = 0
    left = asyncio.Event()

    async def holding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        held += 1
        await reader.read()
        held -= 1
        writer.close()
        if not held:
            left.set()

    state = HOME / f"{name}.json"
    environment = {"PYTHONPATH": str(ROOT)}
    async with LocalFlare.up(SITES, folder, users=USERS, allow_code=True, kits=KITS, environment=environment) as flare:
        server = await asyncio.start_unix_server(holding, path=_address(name))
        found: dict[str, Any] = {"folder": str(flare.folder)}
        state.write_text(json.dumps(found))
        try:
            print("ready", flush=True)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            await left.wait()
        finally:
            server.close()
            state.unlink(missing_ok=True)


if __name__ == "__main__":
    asyncio.run(_keep(sys.argv[1], Path(sys.argv[2])))
