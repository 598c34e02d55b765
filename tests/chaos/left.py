"""What a session must not leave behind: processes, descriptors, files, errors that reach nobody."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dfm_async.workers.fork_server import ForkServer

_PATIENCE = 10.0
"""Seconds within which what ends by itself must have ended."""


def _kept() -> set[int]:
    """The fork server that the tests share, and its descriptor: a session may have replaced it."""
    return set() if ForkServer._shared is None else ForkServer._shared.kept


def processes() -> set[int]:
    """All processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)} - _kept()


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        parent, age = process.parent(), time.time() - process.create_time()
        return f"{process} of {parent}, {age:.1f} s old, {process.num_threads()} threads: {process.cmdline()}"
    return f"{process}, which has just ended"


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {number: what for number, what in found.items() if number not in _kept()}


def files() -> set[str]:
    """Temporary files of ours."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("dfm*")}


def _warm() -> None:
    """Starts what all tests share, so that nobody takes it for something that was left."""
    server = ForkServer.acquire(())
    server.warm()
    server.release()


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Fails if what runs inside leaves something behind, or an error reaches nobody."""
    loop = asyncio.get_running_loop()
    loose: list[str] = []

    def tell(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loose.append(f"{context.get('message')}: {context.get('exception')!r} {context}")

    logger, errors = logging.getLogger("dfm_async"), _Errors()
    await asyncio.to_thread(_warm)
    gc.collect()
    before = processes(), descriptors(), files(), asyncio.all_tasks()
    previous = loop.get_exception_handler()
    loop.set_exception_handler(tell)
    logger.addHandler(errors)
    try:
        yield
        gc.collect()
        await asyncio.sleep(0)
        assert not (asyncio.all_tasks() - before[3]), "tasks are left"
        gone = [psutil.Process(pid) for pid in processes() - before[0] if psutil.pid_exists(pid)]
        _, alive = await asyncio.to_thread(psutil.wait_procs, gone, _PATIENCE)
        assert not alive, f"processes are left: {[_described(process) for process in alive]}"
        gc.collect()
        now = descriptors()
        assert not (new := {at: now[at] for at in now.keys() - before[1].keys()}), f"descriptors are left: {new}"
        assert not (files() - before[2]), f"files are left: {files() - before[2]}"
        assert not loose, "an error reached nobody:\n" + "\n".join(loose)
        assert not errors.said, "an error was logged:\n" + "\n".join(errors.said)
    finally:
        logger.removeHandler(errors)
        loop.set_exception_handler(previous)
