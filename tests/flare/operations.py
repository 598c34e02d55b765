"""Operations that are installed at a site of these tests."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from dfm_async import Federation

fed = Federation("assignments")
lab = fed.site("lab", workers=1)


@lab.operation
def surroundings() -> dict[str, Any]:
    return {"argv": sys.argv, "data": os.environ.get("LAB_DATA"), "pid": os.getpid()}


@lab.operation
async def for_ever() -> None:
    await asyncio.Event().wait()


@lab.operation(deadline=0.2)
def hangs() -> None:
    threading.Event().wait()


@lab.operation
def same(x: Any = None) -> Any:
    return x


@dataclass
class Reading:
    """What an operation takes."""

    level: float


@dataclass
class Password:
    """What none does."""

    text: str


@lab.operation
def level(reading: Reading) -> float:
    return reading.level


@lab.operation
def shown(x: Any = None) -> str:
    return type(x).__name__
