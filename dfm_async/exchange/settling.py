"""Waits until a result with large parts has arrived everywhere: the shell around the progress tracker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from dfm_async.exchange.link import Link
from dfm_async.exchange.messages import Settled
from dfm_async.exchange.progress import Decision, Verdict

__all__ = ["LAST_WORD", "Settling"]

LAST_WORD: Final = 0.2
"""When a wait is given up, how long the receiver's word is still waited for, in seconds."""


class Settling:
    """Offers the large parts of one result, and waits until all receivers have them.

    Args:
        link: the connection.
        tx: the id of the result.
        parts: its large parts, by number.
        receivers: who will pull them.
    """

    def __init__(self, link: Link, tx: str, parts: Mapping[int, memoryview], receivers: Sequence[str]) -> None:
        self._link = link
        self._tx = tx
        self._word: Settled | None = None
        self._abandoned: str | None = None
        self._changed = asyncio.Event()
        self.over = asyncio.Event()
        """Set when it is known how it ended."""
        self._source = link.offer(tx, parts, receivers, self._changed.set)

    def settled(self, word: Settled) -> None:
        """The site says how it ended."""
        if word.tx == self._tx and self._word is None:
            self._word = word
            self._changed.set()

    def abandon(self, why: str) -> None:
        """The agent or its connection is ending: look once more, then give up."""
        if self._abandoned is None:
            self._abandoned = why
            self._changed.set()

    async def wait(self) -> str:
        """Waits for the end.

        Returns:
            "" if everything has arrived, else why not. A wait that merely expired is never a success.
        """
        loop = asyncio.get_running_loop()
        while True:
            decision = self._decide()
            if decision.verdict is Verdict.SUCCESS:
                return ""
            if decision.verdict is Verdict.FAILURE:
                word = self._word
                return word.reason or decision.reason if word is not None else decision.reason
            if self._abandoned is not None:
                return await self._give_up(self._abandoned)
            self._changed.clear()
            await _wait(self._changed, None if decision.until is None else decision.until - loop.time())

    def _decide(self) -> Decision:
        word = self._word
        return self._source.tracker.decide(word is not None, word.status if word is not None else None)

    async def _give_up(self, why: str) -> str:
        tracker = self._source.tracker
        if tracker.complete or tracker.grace_running:
            return ""
        loop = asyncio.get_running_loop()
        due = loop.time() + LAST_WORD
        while loop.time() < due and self._decide().verdict is Verdict.WAIT and not tracker.grace_running:
            self._changed.clear()
            await _wait(self._changed, due - loop.time())
        if self._decide().verdict is Verdict.SUCCESS or tracker.abandon():
            return ""
        return f"it was given up: {why}"

    def free(self) -> None:
        """Lets go of the parts."""
        self._link.withdraw(self._tx)
        self.over.set()


async def _wait(event: asyncio.Event, limit: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await event.wait()
