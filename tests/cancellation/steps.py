"""Cancels a coroutine at a chosen suspension, once or several times in a row."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

LIMIT = 30.0
"""How many seconds a cancelled call may take to end; reached only by one that hangs."""


@dataclass(frozen=True)
class Cuts:
    """The suspensions of a call, counted from 0, at which its task is cancelled."""

    at: tuple[int, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.at))


@dataclass
class Outcome:
    """How a call ended."""

    suspensions: int = 0
    cancelled: bool = False
    value: Any = None
    error: BaseException | None = None
    delivered: list[int] = field(default_factory=list)


@types.coroutine
def _stepped(work: Coroutine[Any, Any, Any], suspended: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Awaits a coroutine, and calls back at each of its suspensions."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            waits_for = work.send(value) if error is None else work.throw(error)
        except StopIteration as stop:
            return stop.value
        value = error = None
        suspended()
        try:
            value = yield waits_for
        except BaseException as raised:
            error = raised


async def cancelled_at(work: Coroutine[Any, Any, Any], cuts: Cuts) -> Outcome:
    """Runs a coroutine in a task of its own, and cancels that at the given suspensions."""
    outcome = Outcome()
    loop = asyncio.get_running_loop()

    def suspended() -> None:
        if outcome.suspensions in cuts.at:
            outcome.delivered.append(outcome.suspensions)
            loop.call_soon(task.cancel)
        outcome.suspensions += 1

    async def run() -> Any:
        return await _stepped(work, suspended)

    task = asyncio.ensure_future(run())
    done, _ = await asyncio.wait([task], timeout=LIMIT)
    assert done, f"the call did not end within {LIMIT:g} s after it was cancelled at {cuts}"
    outcome.cancelled = task.cancelled()
    if not outcome.cancelled:
        outcome.error = task.exception()
        outcome.value = None if outcome.error else task.result()
    return outcome


def every_cut(times: int) -> Iterator[Cuts]:
    """All suspensions in turn, each followed by further cancellations at the next ones; ends where the caller does."""
    step = 0
    while True:
        yield Cuts(tuple(range(step, step + times)))
        step += 1
