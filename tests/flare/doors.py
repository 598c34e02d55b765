"""Doors: operations at sites with networks of their own wait there, until the test lets them through."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dfm_async import Job

__all__ = ["Door", "knock"]


async def knock(door: str, who: str) -> None:
    """Tells the test who is there, and waits until it lets us through. For operations."""
    reader, writer = await asyncio.open_unix_connection(door)
    try:
        writer.write(f"{who}\n".encode())
        await reader.read()
    finally:
        writer.close()


async def _outcome(job: Job) -> None:
    await job


class Door:
    """The test's side of a door. Made by :meth:`hung`; at its end all go through.

    Attributes:
        path: its socket, a file: files are the same in all networks of a machine.
        visits: who has knocked, in that order.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.visits: list[str] = []
        self._waiting: dict[str, list[asyncio.StreamWriter]] = {}
        self._open = False
        self._knocked = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def hung(cls) -> AsyncIterator[Door]:
        """Hangs a door."""
        # The path of a socket has to be short: not that of the test.
        with tempfile.TemporaryDirectory(prefix="dfm-", dir="/tmp") as folder:
            door = cls(str(Path(folder) / "door"))
            server = await asyncio.start_unix_server(door._serve, door.path)
            try:
                yield door
            finally:
                door.open()
                server.close()
                await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = (await reader.readline()).decode().strip()
        self.visits.append(who)
        if self._open:
            writer.close()
        else:
            self._waiting.setdefault(who, []).append(writer)
        async with self._knocked:
            self._knocked.notify_all()

    async def knocked(self, who: str, times: int = 1, *, job: Job | None = None) -> None:
        """Waits until somebody has knocked so often; if the job ends before, its error is raised."""

        async def wait() -> None:
            async with self._knocked:
                await self._knocked.wait_for(lambda: self.visits.count(who) >= times)

        knocking = asyncio.ensure_future(wait())
        ending = asyncio.ensure_future(wait() if job is None else _outcome(job))
        try:
            await asyncio.wait({knocking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not knocking.done():
                ending.result()
                raise AssertionError(f"{who} has not knocked, and the job has ended")
        finally:
            knocking.cancel()
            ending.cancel()

    def let_in(self, who: str) -> None:
        """Lets those through who wait."""
        for writer in self._waiting.pop(who, ()):
            writer.close()

    def open(self) -> None:
        """Lets everybody through, from now on."""
        self._open = True
        for who in list(self._waiting):
            self.let_in(who)
