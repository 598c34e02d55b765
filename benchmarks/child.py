"""A fresh process with three sites, for ``cold_start`` and ``idle``.

Run as ``python -m benchmarks.child CONTENDER START``: prints one JSON object with the seconds since START until the
first result, and until all three sites have answered; then stays connected and idle until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

SITES = 3


async def _until_end_of_input() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())


def _report(start: float, first: float, ready: float) -> None:
    print(json.dumps({"first": first - start, "ready": ready - start}), flush=True)


async def _ours(start: float) -> None:
    from benchmarks.ours import SITES as NAMES
    from benchmarks.ours import Contender

    async with Contender() as ours:
        await ours.run(await ours.one(False), {"x": 1})
        first = time.time()
        await ours.run(await ours.chain(list(NAMES)), {"x": 1})
        _report(start, first, time.time())
        await _until_end_of_input()


async def _peer(name: str, start: float) -> None:
    from benchmarks import operations
    from benchmarks.backends import BACKENDS

    async with BACKENDS[name](SITES) as backend:
        await backend.call(0, operations.echo, 1)
        first = time.time()
        await backend.warm()
        _report(start, first, time.time())
        await _until_end_of_input()


@dataclass(frozen=True, slots=True)
class Child:
    """A running child, connected and idle."""

    pid: int
    mark: str
    first: float
    ready: float


@contextlib.contextmanager
def running(contender: str, python: str = sys.executable, bytecode: str | None = None) -> Iterator[Child]:
    """Starts a child, waits until its sites have answered, and ends it with the context.

    Args:
        contender: "ours", or the name of a peer.
        python: its interpreter.
        bytecode: a directory for compiled modules, used instead of the usual places.
    """
    from benchmarks.common import TREE
    from benchmarks.external import ROOT, environment

    variables = environment()
    if bytecode is not None:
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables["PYTHONPYCACHEPREFIX"] = bytecode
    start = time.time()
    mark = f"{os.getpid()}-{start!r}"
    process = subprocess.Popen(
        [python, "-m", "benchmarks.child", contender, repr(start)],
        env={**variables, TREE: mark},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if contender in ("ours", "pool") else subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = ""
        while not line.startswith('{"first"'):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{contender} ended before it was ready")
        yield Child(process.pid, mark, **json.loads(line))
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(_ours(float(sys.argv[2])) if sys.argv[1] == "ours" else _peer(sys.argv[1], float(sys.argv[2])))
