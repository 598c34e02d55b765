"""A session's connections to the carriers of its user: one for new jobs, and those to others that have jobs of ours."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

from dfm_async.base.completion import completed
from dfm_async.errors import DfmError, FlareError, SessionClosed
from dfm_async.targets.flare.connection import HubConnection

__all__ = ["Carriers"]

_log = logging.getLogger(__name__)

_NONE: Final[Mapping[str, float]] = {}
_LOOK_AGAIN: Final = 5.0
"""For how many seconds it is believed that a user has the carriers that were found."""


class Carriers:
    """Connects to carriers when that is needed, asks them, and leaves those that nobody needs any more.

    A user has several when a site was lost and is back: a carrier that runs cannot have it again.

    Args:
        make: makes a connection, which is not open yet.
        in_use: the connections that jobs need.
    """

    def __init__(self, make: Callable[[], HubConnection], in_use: Callable[[], Iterator[HubConnection]]) -> None:
        self.current: HubConnection | None = None
        """That which new jobs take."""
        self._make = make
        self._in_use = in_use
        self._sites: Collection[str] = ()
        self._homesite = ""
        self._older: list[HubConnection] = []
        """Those to other carriers, which have jobs of ours, or are asked for some."""
        self._connecting: asyncio.Future[HubConnection] | None = None
        self._requests: dict[int, tuple[HubConnection, asyncio.Future[Any]]] = {}
        self._last_request = 0
        self._kept: list[HubConnection] = []
        """Those that are asked, whether jobs need them or not."""
        self._looking = asyncio.Lock()
        self._found: tuple[float, list[str]] = (-math.inf, [])
        """Until when it is believed which carriers this user has, and which these are."""
        self._group: asyncio.TaskGroup | None = None
        self._supervisions: set[asyncio.Task[None]] = set()

    # life

    @asynccontextmanager
    async def running(self, sites: Collection[str], homesite: str) -> AsyncIterator[None]:
        """Connects to the carrier of this user's jobs, or starts one, and stays connected.

        Raises:
            FlareError: the federation cannot be reached, or its sites do not start.
        """
        self._sites, self._homesite = sites, homesite
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: completed(self._close()))
            stack.enter_context(_one_error())
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.push_async_callback(self._end_supervision)
            await self.connected()
            yield

    async def _end_supervision(self) -> None:
        self._group = None
        for task in self._supervisions:
            task.cancel()

    async def _close(self) -> None:
        for _, future in self._requests.values():
            if not future.done():
                future.set_exception(SessionClosed("the session was closed"))
        connections, self.current, self._older = self.all, None, []
        for connection in connections:
            await connection.close()

    @property
    def all(self) -> list[HubConnection]:
        """All connections, that for new jobs first."""
        return [found for found in (self.current, *self._older) if found is not None]

    @property
    def reachable(self) -> list[HubConnection]:
        """Those whose hubs can be reached."""
        return [found for found in self.all if found.lost is None]

    # connecting

    async def connected(self, needed: Mapping[str, float] = _NONE) -> HubConnection:
        """The connection for new jobs; a new one if the former was lost, for the first who needs it and all others.

        Args:
            needed: as in :meth:`HubConnection.open`.

        Raises:
            FlareError: the federation cannot be reached.
            SessionClosed: it is too late.
        """
        connection = self.current
        if connection is not None and connection.lost is None:
            return connection
        return await self.another(needed)

    async def another(self, needed: Mapping[str, float] = _NONE) -> HubConnection:
        """Connects anew, to a carrier that has all sites; ``needed``: as in :meth:`HubConnection.open`."""
        if self._group is None:
            raise SessionClosed("the session was closed")
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_future()
            self._group.create_task(self._connect_for(self._connecting, needed), name="connection to the federation")
        return await asyncio.shield(self._connecting)

    async def _connect_for(self, waiting: asyncio.Future[HubConnection], needed: Mapping[str, float]) -> None:
        """Connects for those who wait: a failure is theirs, and does not end the session."""
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # they may have gone
        try:
            waiting.set_result(await self._connect(needed))
        except (DfmError, OSError) as error:
            waiting.set_exception(error)
        finally:
            self._connecting = None
            waiting.cancel()

    async def _connect(self, needed: Mapping[str, float]) -> HubConnection:
        connection = self._make()
        async with _closed_if_it_fails(connection):
            await connection.open(self._sites, self._homesite, needed)
        former = self.current
        if former is not None and former.lost is None and former.carrier == connection.carrier:
            await completed(connection.close())
            return former
        self.current = connection
        if former is not None:
            self._older.append(former)
            self.tidy()
        self._supervise(connection)
        return connection

    def _supervise(self, connection: HubConnection) -> None:
        assert self._group is not None  # noqa: S101 - who connects has looked
        task = self._group.create_task(connection.supervise(), name="ways to the hub")
        self._supervisions.add(task)
        task.add_done_callback(self._supervisions.discard)
        self.expect()

    def tidy(self) -> None:
        """Closes connections that no job needs any more, and nobody has just opened to ask."""
        if self._looking.locked() or self._group is None:
            return
        needed = [*self._in_use(), *(asked for asked, _ in self._requests.values()), *self._kept]
        for connection in [older for older in self._older if older not in needed]:
            self._older.remove(connection)
            self._group.create_task(connection.close(), name="end of a connection")

    def expect(self) -> None:
        """Tells the connections whether the hubs will have something to say."""
        busy = [*self._in_use(), *(asked for asked, _ in self._requests.values())]
        for connection in self.all:
            connection.expect(busy=connection in busy)

    # other carriers

    async def look(self) -> None:
        """Connects to the carriers of this user that are not known yet: they can have jobs of an earlier session.

        Raises:
            FlareError: the federation cannot be reached.
            SessionClosed: it is too late.
        """
        try:
            async with self._looking:
                if asyncio.get_running_loop().time() > self._found[0]:
                    carriers = await (await self.connected()).carriers()
                    self._found = (asyncio.get_running_loop().time() + _LOOK_AGAIN, carriers)
                for carrier in self._found[1]:
                    await self._join(carrier)
        except BaseException:
            self.tidy()
            raise

    async def at(self, carrier: str) -> HubConnection | None:
        """Connects to a carrier; None if it cannot be reached."""
        async with self._looking:
            return await self._join(carrier)

    async def _join(self, carrier: str) -> HubConnection | None:
        for known in self.reachable:
            if known.carrier == carrier:
                return known
        connection = self._make()
        async with _closed_if_it_fails(connection):
            try:
                await connection.open_at(carrier)
            except FlareError as error:
                _log.warning("a carrier of this user cannot be reached: %s", error)
                await completed(connection.close())
                return None
            if self._group is None:
                raise SessionClosed("the session was closed")
        self._older.append(connection)
        self._supervise(connection)
        return connection

    @contextmanager
    def kept(self, connections: list[HubConnection]) -> Iterator[list[HubConnection]]:
        """Connections are kept while they are asked, also if no job needs them."""
        self._kept += connections
        try:
            yield connections
        finally:
            for connection in connections:
                self._kept.remove(connection)
            self.tidy()

    # questions

    async def ask(self, connection: HubConnection, make: Callable[[int], Any]) -> Any:
        """Asks a hub something; ``make`` makes the question, with a number.

        Raises:
            FlareError: it cannot be reached any more.
            SessionClosed: it is too late.
        """
        if connection.lost is not None:
            raise connection.lost
        if self._group is None:
            raise SessionClosed("the session was closed")
        self._last_request += 1
        number = self._last_request
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[number] = (connection, future)
        connection.send(make(number))
        self.expect()
        try:
            return await future
        finally:
            del self._requests[number]
            self.expect()

    async def ask_other(self, connection: HubConnection, make: Callable[[int], Any]) -> Any:
        """The same; None if this is another carrier than that for new jobs, and has ended meanwhile."""
        try:
            return await self.ask(connection, make)
        except FlareError:
            if connection is self.current:
                raise
            return None

    def answer(self, message: Any) -> None:
        """A hub has answered."""
        _, future = self._requests.get(message.request, (None, None))
        if future is not None and not future.done():
            future.set_result(message)

    def lost(self, connection: HubConnection, error: FlareError) -> None:
        """A hub cannot be reached any more: it will not answer."""
        for asked, future in self._requests.values():
            if asked is connection and not future.done():
                future.set_exception(error)


@asynccontextmanager
async def _closed_if_it_fails(connection: HubConnection) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await completed(connection.close())
        raise


@contextmanager
def _one_error() -> Iterator[None]:
    """An error of a single task is told as it is."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None
