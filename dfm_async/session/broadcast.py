"""Calls of one operation at every site that offers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, Final, Generic, TypeVar

from dfm_async.base.containers import BoundedDict
from dfm_async.base.signals import Signal
from dfm_async.errors import DfmError, NotEnoughReplies, ParameterError, SessionClosed
from dfm_async.runtime.operation_errors import ENDS, ordinary
from dfm_async.session.mapping import ValueOrError
from dfm_async.session.stream import ClosableIterator

V = TypeVar("V")

_OPERATIONS: Final = 128
"""For how many operations late replies are kept."""

Ask = Callable[[], Coroutine[Any, Any, Any]]
"""Calls the operation at one site, and returns its value."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class SiteReply(ValueOrError[V]):
    """What one site has replied to a call of :meth:`~dfm_async.Session.each`.

    Attributes:
        site: the name of the site.
        error: why there is no value; None if there is one.
        late: whether it replies to a call of an earlier round, with ``late="keep"``.
    """

    __slots__ = ("late", "site")

    def __init__(self, site: str, value: V, error: Exception | None = None, *, late: bool = False) -> None:
        super().__init__(value, error)
        self.site: str = site
        self.late: bool = late

    def __repr__(self) -> str:
        text = self._described("site", self.site)
        return f"{text[:-1]}, late=True)" if self.late else text


class _PendingCall:
    """One call that has not been replied to. It belongs to the round that gets the reply."""

    __slots__ = ("round", "site", "task")

    def __init__(self, site: str, owner: Round) -> None:
        self.site = site
        self.round = owner
        self.task: asyncio.Task[None] | None = None

    async def run(self, ask: Ask) -> None:
        """Call the operation, and pass on the reply."""
        try:
            value = await ask()
        except (ParameterError, SessionClosed) as error:
            self.round.refuse(self, error)
        except BaseException as error:
            failure = ordinary(error, f"the call at site {self.site!r}")
            self.round.add(self, SiteReply(self.site, None, failure))
            if isinstance(error, ENDS):
                raise
        else:
            self.round.add(self, SiteReply(self.site, value))
        finally:
            self.round.changed.notify()

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancel the call."""
        if self.task is not None:
            self.task.cancel()
        return self.task


class Round:
    """The calls at all sites: those in flight, and the replies that have come."""

    def __init__(self) -> None:
        self.replies: deque[SiteReply[Any]] = deque()
        self.changed = Signal()
        self.refused: DfmError | None = None
        """Why the call is not possible at any site."""
        self.pending: dict[_PendingCall, bool] = {}
        """The calls in flight, and whether each is of an earlier round."""
        self.over = False
        """Whether nobody reads further replies."""

    def start(self, asked: Mapping[str, Ask], spawn: Spawn) -> None:
        """Call the operation at all sites, except those that have not replied to an earlier round."""
        busy = {pending.site for pending in self.pending}
        for site, ask in asked.items():
            if site not in busy:
                pending = _PendingCall(site, self)
                self.pending[pending] = False
                pending.task = spawn(pending.run(ask))

    def adopt(self, earlier: Round) -> None:
        """Take over the replies of an earlier round that nobody has read, and its calls in flight."""
        for reply in earlier.replies:
            reply.late = True
            self.replies.append(reply)
        for pending in earlier.pending:
            pending.round = self
            self.pending[pending] = True
        earlier.replies.clear()
        earlier.pending.clear()

    def add(self, pending: _PendingCall, reply: SiteReply[Any]) -> None:
        """Take the reply of a site, unless the round does not wait for it any longer."""
        late = self.pending.pop(pending, None)
        if late is not None:
            reply.late = late
            self.replies.append(reply)

    def refuse(self, pending: _PendingCall, error: DfmError) -> None:
        """Note that the call is not possible."""
        self.pending.pop(pending, None)
        self.refused = error

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the calls that have not been replied to, and return their tasks."""
        left = list(self.pending)
        self.pending.clear()
        return [task for pending in left if (task := pending.cancel()) is not None]


class LateReplies:
    """The rounds of a session whose late replies are kept: at most one call of each site, for each operation."""

    def __init__(self) -> None:
        self._rounds: BoundedDict[Hashable, list[Round]] = BoundedDict(_OPERATIONS, _drop)

    def begin(self, key: Hashable, found: Round) -> None:
        """Begin a round with what the rounds of the same operation that are over have left."""
        going_on: list[Round] = []
        for earlier in self._rounds.get(key, ()):
            if earlier.over:
                found.adopt(earlier)
            else:
                going_on.append(earlier)
        self._rounds[key] = [*going_on, found]


def _drop(_key: Hashable, rounds: list[Round]) -> None:
    for found in rounds:
        if found.over:
            found.cancel()


class EachStream(ClosableIterator, Generic[V]):
    """The replies of :meth:`~dfm_async.Session.each`, as they come. The calls start with the first item.

    It has one reply of each site. Closing it, or leaving a loop over it, cancels the calls that are in flight. With
    ``late="keep"``, they go on, and the next round of the operation has their replies.
    """

    def __init__(
        self,
        asked: Mapping[str, Ask],
        *,
        at_least: int | None,
        within: float | None,
        spawn: Spawn,
        keep: Callable[[Round], None] | None = None,
    ) -> None:
        self._asked = asked
        self._round = Round()
        self._wanted = at_least or 0
        self._within = within
        self._spawn = spawn
        self._keep = keep
        self._until: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._kept = 0
        """The number of replies to come that had come before this round."""
        self._succeeded: set[str] = set()
        self._failures: list[str] = []

    def _start(self) -> None:
        loop, found = asyncio.get_running_loop(), self._round
        self._loop = loop
        self._until = None if self._within is None else loop.time() + self._within
        if self._keep is not None:
            self._keep(found)
            self._kept = len(found.replies)
        found.start(self._asked, self._spawn)

    async def __anext__(self) -> SiteReply[V]:
        if self._closed:
            raise StopAsyncIteration
        found = self._round
        found.over = False
        try:
            if self._loop is None:
                self._start()
            return await self._next(found)
        except BaseException:
            found.over = True  # until it is read again: the traceback may keep this iterator
            raise

    async def _next(self, found: Round) -> SiteReply[V]:
        while not found.replies:
            if found.refused is not None:
                await self.aclose()
                raise found.refused
            if not found.pending or (self._keep is not None and 0 < self._wanted <= len(self._succeeded)):
                self._finish()
            if not await found.changed.wait(self._until) and not found.replies:
                self._time_out()
        reply = found.replies.popleft()
        if self._kept:
            self._kept -= 1  # the site was called again in this round
        elif reply.error is None:
            self._succeeded.add(reply.site)
        else:
            self._failures.append(f"{reply.site}: {str(reply.error).partition(chr(10))[0]}")
        return reply

    def _time_out(self) -> None:
        found = self._round
        late = [(pending, f"no reply of site {pending.site!r} within {self._within:g} s") for pending in found.pending]
        if self._keep is not None:
            self._failures += [f"{pending.site}: {text}" for pending, text in late]
            self._finish()
        for pending, text in late:
            found.add(pending, SiteReply(pending.site, None, TimeoutError(text)))
            pending.cancel()

    def _finish(self) -> None:
        self._closed = self._round.over = True
        if len(self._succeeded) < self._wanted:
            raise NotEnoughReplies(len(self._succeeded), self._wanted, self._failures)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the calls that are in flight, and return when nothing of them runs. Safe to call more than once.

        With ``late="keep"``, they go on.
        """
        self._closed = self._round.over = True
        left = self._round.cancel() if self._keep is None else ()
        if left:
            await asyncio.wait(left)

    def __del__(self) -> None:
        loop, found = self._loop, self._round
        found.over = True
        if self._keep is None and loop is not None and not self._closed and found.pending and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(found.cancel)
