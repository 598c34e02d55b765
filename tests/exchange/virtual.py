"""A loop whose time jumps to the next timer when nothing else is left to do: waits take no time, and are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise AssertionError("nothing is left that could ever happen")
            # A little more: a timer may not be early, and sums of floating-point numbers are.
            self.loop.now += timeout + 1e-9 if timeout else 0
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """For what happens within one thread, and without sockets."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def virtual(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on such a loop. No task and no timer outlives it."""

    async def checked() -> T:
        found = await work
        await idle()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        timers = [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        assert not timers, f"timers left behind: {timers}"
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        problems: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        found = runner.run(checked())
    assert not problems, problems
    return found


async def idle() -> None:
    """Returns when everything that can happen now has happened."""
    await asyncio.sleep(1e-6)
