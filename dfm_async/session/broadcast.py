"""Calls of one operation at every site that offers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from dfm_async.base.signals import Signal
from dfm_async.errors import DfmError, NotEnoughReplies, ParameterError, SessionClosed
from dfm_async.session.mapping import ValueOrError
from dfm_async.session.stream import ClosableIterator

V = TypeVar("V")

Ask = Callable[[], Coroutine[Any, Any, Any]]
"""Calls the operation at one site, and returns its value."""


class SiteReply(ValueOrError[V]):
    """What one site has replied to a call of :meth:`~dfm_async.Session.each`.

    Attributes:
        site: the name of the site.
        error: why there is no value; None if there is one.
    """

    __slots__ = ("site",)

    def __init__(self, site: str, value: V, error: Exception | None = None) -> None:
        super().__init__(value, error)
        self.site = site

    def __repr__(self) -> str:
        return self._described("site", self.site)


class Round:
    """The calls at all sites: their tasks, and the replies that have come."""

    def __init__(self, asked: Mapping[str, Ask]) -> None:
        self.asked = asked
        self.replies: deque[SiteReply[Any]] = deque()
        self.changed = Signal()
        self.refused: DfmError | None = None
        """Why the call is not possible at any site."""
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Call the operation at all sites."""
        for site, ask in self.asked.items():
            self.tasks[site] = spawn(self._ask(site, ask))

    async def _ask(self, site: str, ask: Ask) -> None:
        try:
            reply: SiteReply[Any] = SiteReply(site, await ask())
        except (ParameterError, SessionClosed) as error:
            self.refused = error
        except DfmError as error:
            self.add(SiteReply(site, None, error))
        else:
            self.add(reply)
        finally:
            self.changed.notify()

    def add(self, reply: SiteReply[Any]) -> None:
        """Take the reply of a site, unless it has one already."""
        if self.tasks.pop(reply.site, None) is not None:
            self.replies.append(reply)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the calls that have not been replied to, and return their tasks."""
        left = list(self.tasks.values())
        self.tasks.clear()
        for task in left:
            task.cancel()
        return left


class EachStream(ClosableIterator, Generic[V]):
    """The replies of :meth:`~dfm_async.Session.each`, as they come. The calls start with the first item.

    It has one reply of each site. Closing it, or leaving a loop over it, cancels the calls that are in flight.
    """

    def __init__(
        self,
        asked: Mapping[str, Ask],
        *,
        at_least: int | None,
        within: float | None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._round = Round(asked)
        self._wanted = at_least or 0
        self._within = within
        self._spawn = spawn
        self._until: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._succeeded = 0
        self._failures: list[str] = []

    async def __anext__(self) -> SiteReply[V]:
        if self._closed:
            raise StopAsyncIteration
        found = self._round
        if self._loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._until = None if self._within is None else loop.time() + self._within
            found.start(self._spawn)
        while not found.replies:
            if found.refused is not None:
                self._closed = True
                found.cancel()
                raise found.refused
            if not found.tasks:
                self._finish()
            if not await found.changed.wait(self._until) and not found.replies:
                for site in list(found.tasks):
                    task = found.tasks[site]
                    found.add(
                        SiteReply(site, None, TimeoutError(f"no reply of site {site!r} within {self._within:g} s"))
                    )
                    task.cancel()
        reply = found.replies.popleft()
        if reply.error is None:
            self._succeeded += 1
        else:
            self._failures.append(f"{reply.site}: {str(reply.error).partition(chr(10))[0]}")
        return reply

    def _finish(self) -> None:
        self._closed = True
        if self._succeeded < self._wanted:
            raise NotEnoughReplies(self._succeeded, self._wanted, self._failures)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the calls that are in flight, and return when nothing of them runs. Safe to call more than once."""
        self._closed = True
        left = self._round.cancel()
        if left:
            await asyncio.wait(left)

    def __del__(self) -> None:
        loop, found = self._loop, self._round
        if loop is not None and not self._closed and found.tasks and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(found.cancel)
