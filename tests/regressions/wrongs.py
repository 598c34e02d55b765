"""The operations of the tests about known wrongs. Imports little: workers load it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

from dfm_async import Federation

fed = Federation("wrongs", api_version="2.1.0")
a, b, c = fed.site("a"), fed.site("b"), fed.site("c")


@a.operation
async def echo(value: Any) -> Any:
    return value


b.operation(echo)
c.operation(echo)


@a.operation
async def pid() -> int:
    return os.getpid()


@a.operation
async def flood() -> AsyncIterator[str]:
    while True:
        yield "flood"


@a.operation
async def harmed() -> bool:
    return "HARMED" in os.environ


b.operation(harmed)

# What waits is kept by names that only one test knows: sites of the inline target share one process.

_gates: dict[str, asyncio.Event] = {}
_meetings: dict[str, asyncio.Barrier] = {}
_thread_meetings: dict[str, threading.Barrier] = {}


@a.operation
async def gated(gate: str, value: Any) -> Any:
    """Gives its value when its gate is open."""
    await _gates.setdefault(gate, asyncio.Event()).wait()
    return value


@a.operation
async def open_gate(gate: str) -> None:
    _gates.setdefault(gate, asyncio.Event()).set()


b.operation(gated)
b.operation(open_gate)


@a.operation
async def meet(name: str) -> bool:
    await _meetings.setdefault(name, asyncio.Barrier(2)).wait()
    return True


@a.operation
def meet_in_threads(name: str) -> bool:
    _thread_meetings.setdefault(name, threading.Barrier(2)).wait(60)
    return True


# values


class Parcel:
    """Something that can be counted while it lives."""


_parcels: weakref.WeakSet[Parcel] = weakref.WeakSet()


@a.operation
async def receive(parcel: Parcel) -> Parcel:
    _parcels.add(parcel)
    return parcel


@a.operation
async def parcels() -> int:
    """How many of those that have come are still there."""
    gc.collect()
    return len(_parcels)


b.operation(receive)
b.operation(parcels)


@a.operation
async def make() -> Any:
    """Return a value that cannot be sent."""
    return {"functions": [lambda: None]}


# errors


class Misfit(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"{number} does not fit")
        self.number = number


def _deep(number: int) -> None:
    raise Misfit(number)


@a.operation
async def misfit(number: int) -> None:
    _deep(number)


@b.operation
def no_such_thing(name: str) -> None:
    raise LookupError(name)
