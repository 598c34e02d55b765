"""Ends a federation when whoever started it dies in a way that leaves no time: a small process that outlives it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from dfm_async.base.descriptors import close_in_children, no_fork
from dfm_async.deploy.processes import MARK
from dfm_async.exchange.exits import process_exit

__all__ = ["guarded"]

# Only what every interpreter has, and nothing that would have to be found: it must start fast, and run anywhere.
# The jobs of a client do not end with it, and are in groups of their own: the mark finds them. What was killed may
# have started something in the same moment, so it looks until there is nothing.
_SCRIPT: Final = f"""
import glob, os, shutil, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
mark = b"{MARK}=" + sys.argv[1].encode() + b"/"
sys.stdin.read()
found = True
while found:
    found = False
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                variables = file.read().split(b"\\0")
            if any(variable.startswith(mark) for variable in variables):
                os.kill(int(path.split("/")[2]), signal.SIGKILL)
                found = True
        except OSError:
            pass
for folder in sys.argv[2:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


@asynccontextmanager
async def guarded(mark: str, folders: tuple[Path, ...]) -> AsyncGenerator[None, None]:
    """Has everything with a mark killed, and folders removed, when the block ends or this process does.

    Args:
        mark: what marks the processes.
        folders: what else must not be left.
    """
    guard = _start(mark, folders)
    assert guard.stdin is not None  # noqa: S101 - it was made with one
    try:
        yield
    finally:
        guard.stdin.close()
        await process_exit(guard.pid)
        guard.wait()


def _start(mark: str, folders: tuple[Path, ...]) -> subprocess.Popen[bytes]:
    with no_fork():
        guard = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", "-c", _SCRIPT, mark, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends our group must not end it
            bufsize=0,
            cwd="/",
        )
        assert guard.stdin is not None  # noqa: S101 - it was made with one
        close_in_children(guard.stdin)
    return guard
