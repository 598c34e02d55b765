"""Plain coroutines for a site's worker and for a stock pool alike. Imports little: workers load it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

_gates: dict[str, asyncio.Event] = {}
_finished: list[str] = []


class Torn(Exception):
    """An exception with an attribute of its own."""

    def __init__(self, where: str) -> None:
        super().__init__(f"torn at {where}")
        self.where = where


async def nothing() -> None:
    pass


async def pid() -> int:
    return os.getpid()


async def die(how: str) -> Any:
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "SystemExit":
        raise SystemExit(3)
    elif how == "os._exit":
        os._exit(3)
    return threading.Lock()  # what no pickle can hold


async def tear(where: str) -> None:
    raise Torn(where)


async def work(name: str) -> str:
    """Waits for its gate, and then has a result."""
    await _gates.setdefault(name, asyncio.Event()).wait()
    _finished.append(name)
    return name


async def open_gate(name: str) -> None:
    _gates.setdefault(name, asyncio.Event()).set()


async def finished() -> list[str]:
    return _finished
