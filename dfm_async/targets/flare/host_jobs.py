"""The connections of a session to the host jobs of its user: one for new jobs, and those that have jobs of ours."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import completed
from dfm_async.errors import DfmError, FlareError, SessionClosed
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.hub_connection import HubConnection

_log = logging.getLogger(__name__)

_NONE: Final[Mapping[str, float]] = {}
_CACHE_SECONDS: Final = 5.0
"""The number of seconds for which the list of a user's host jobs is cached."""


class HostJobs:
    """Connects to host jobs when that is needed, asks them, and leaves those that nobody needs any longer.

    A user has several when a site was lost and is back: a host job that runs cannot have it again.

    Args:
        make: makes a connection, which is not open yet.
        in_use: the connections that jobs need.
    """

    def __init__(self, make: Callable[[], HubConnection], in_use: Callable[[], Iterator[HubConnection]]) -> None:
        self.current: HubConnection | None = None
        """The one for new jobs."""
        self._make = make
        self._in_use = in_use
        self._sites: Collection[str] = ()
        self._homesite = ""
        self._older: list[HubConnection] = []
        """Those to other host jobs, which have jobs of ours, or are asked for some."""
        self._connecting: Outcome[HubConnection] | None = None
        self._requests: dict[int, tuple[HubConnection, Outcome[Any]]] = {}
        self._last_request = 0
        self._kept: list[HubConnection] = []
        """Those with requests, whether jobs need them or not."""
        self._discovering = asyncio.Lock()
        self._found: tuple[float, list[str]] = (-math.inf, [])
        """Until when the list of host jobs is cached, and the list."""
        self._group: asyncio.TaskGroup | None = None
        self._supervisions: set[asyncio.Task[None]] = set()

    # lifecycle

    @asynccontextmanager
    async def running(self, sites: Collection[str], homesite: str) -> AsyncIterator[None]:
        """Stay connected to the host job of this user's jobs; start one if there is none.

        Raises:
            FlareError: the federation cannot be reached, or its sites do not start.
        """
        self._sites, self._homesite = sites, homesite
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: completed(self._close()))
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.push_async_callback(self._end_supervision)
            await self.connected()
            yield

    async def _end_supervision(self) -> None:
        self._group = None
        for task in self._supervisions:
            task.cancel()

    async def _close(self) -> None:
        for _, answer in self._requests.values():
            answer.fail(SessionClosed("the session was closed"))
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
        """Return the connection for new jobs. If it was lost, all callers share the opening of a new one.

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
        """Make a new connection, to a host job that has all sites; ``needed``: as in :meth:`HubConnection.open`."""
        if self._group is None:
            raise SessionClosed("the session was closed")
        if self._connecting is None:
            self._connecting = Outcome()
            self._group.create_task(self._connect_for(self._connecting, needed), name="connection to the federation")
        return await self._connecting.wait()

    async def _connect_for(self, waiting: Outcome[HubConnection], needed: Mapping[str, float]) -> None:
        """Connect for the waiters: a failure is raised in them, and does not end the session."""
        try:
            waiting.settle(await self._connect(needed))
        except (DfmError, OSError) as error:
            waiting.fail(error)
        finally:
            self._connecting = None
            waiting.cancel()

    async def _connect(self, needed: Mapping[str, float]) -> HubConnection:
        connection = self._make()
        async with _closed_if_it_fails(connection):
            await connection.open(self._sites, self._homesite, needed)
        former = self.current
        if former is not None and former.lost is None and former.host_job == connection.host_job:
            await completed(connection.close())
            return former
        self.current = connection
        if former is not None:
            self._older.append(former)
            self.tidy()
        self._supervise(connection)
        return connection

    def _supervise(self, connection: HubConnection) -> None:
        self.spawn(connection.supervise(), "connection to the hub")
        self.expect()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ends with the connections.

        Raises:
            SessionClosed: it is too late.
        """
        if self._group is None:
            work.close()
            raise SessionClosed("the session was closed")
        task = self._group.create_task(work, name=name)
        self._supervisions.add(task)
        task.add_done_callback(self._supervisions.discard)

    def tidy(self) -> None:
        """Close connections that no job needs any longer, except those that serve a request."""
        if self._discovering.locked() or self._group is None:
            return
        needed = [*self._in_use(), *(asked for asked, _ in self._requests.values()), *self._kept]
        for connection in [older for older in self._older if older not in needed]:
            self._older.remove(connection)
            self._group.create_task(connection.close(), name="end of a connection")

    def expect(self) -> None:
        """Notify the connections whether messages of the hubs are expected."""
        busy = [*self._in_use(), *(asked for asked, _ in self._requests.values())]
        for connection in self.all:
            connection.expect(busy=connection in busy)

    # other host jobs

    async def discover(self) -> None:
        """Connect to the host jobs of this user that are not known yet: they can have jobs of an earlier session.

        Raises:
            FlareError: the federation cannot be reached.
            SessionClosed: it is too late.
        """
        try:
            async with self._discovering:
                if asyncio.get_running_loop().time() > self._found[0]:
                    host_jobs = await (await self.connected()).host_jobs()
                    self._found = (asyncio.get_running_loop().time() + _CACHE_SECONDS, host_jobs)
                for host_job in self._found[1]:
                    await self._join(host_job)
        except BaseException:
            self.tidy()
            raise

    async def at(self, host_job: str) -> HubConnection | None:
        """Connect to a host job; None if it cannot be reached."""
        async with self._discovering:
            return await self._join(host_job)

    async def _join(self, host_job: str) -> HubConnection | None:
        for known in self.reachable:
            if known.host_job == host_job:
                return known
        connection = self._make()
        async with _closed_if_it_fails(connection):
            try:
                await connection.open_at(host_job)
            except FlareError as error:
                _log.warning("a host job of this user cannot be reached: %s", error)
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
        """Send a request to a hub; ``make`` builds it with its number.

        Returns:
            the answer; None if the host job is not the one for new jobs, and has ended meanwhile.

        Raises:
            FlareError: the hub of new jobs cannot be reached any longer.
            SessionClosed: it is too late.
        """
        try:
            return await self._ask(connection, make)
        except FlareError:
            if connection is self.current:
                raise
            return None

    async def _ask(self, connection: HubConnection, make: Callable[[int], Any]) -> Any:
        if connection.lost is not None:
            raise connection.lost
        if self._group is None:
            raise SessionClosed("the session was closed")
        self._last_request += 1
        number = self._last_request
        answer: Outcome[Any] = Outcome()
        self._requests[number] = (connection, answer)
        connection.send(make(number))
        self.expect()
        try:
            return await answer
        finally:
            del self._requests[number]
            self.expect()

    def answer(self, message: fm.FoundJob | fm.Listed | fm.Asked) -> None:
        """Note that a hub has answered."""
        if message.request in self._requests:
            self._requests[message.request][1].settle(message)

    def lost(self, connection: HubConnection, error: FlareError) -> None:
        """Note that a hub cannot be reached any longer: it will not answer."""
        for asked, answer in self._requests.values():
            if asked is connection:
                answer.fail(error)


@asynccontextmanager
async def _closed_if_it_fails(connection: HubConnection) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await completed(connection.close())
        raise
