"""A socket in front of a database server: connections through it can be held, as by a network that loses packets."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

NAME = ".s.PGSQL.5432"
"""The name of the socket of a server in its folder."""


class Relay:
    """Forwards the connections of one client of a database.

    Args:
        server: the folder of the socket of the server.
        listener: where the client connects; by default, a socket in ``folder``.
    """

    def __init__(self, server: Path, listener: socket.socket | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dfm-relay-", dir="/tmp"))  # the path of a socket must be short
        self._server = server / NAME
        self._listener = listener
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept connections."""
        try:
            if self._listener is None:
                server: asyncio.Server = await asyncio.start_unix_server(self._accept, self.folder / NAME)
            else:
                server = await asyncio.start_server(self._accept, sock=self._listener)
            async with server:
                yield
                await self._drop()
        finally:
            shutil.rmtree(self.folder)

    def hold(self) -> None:
        """Forward nothing from now on, not even the end of a connection."""
        self._open.clear()

    async def release(self, *, drop: bool) -> None:
        """Forward what was held, and go on; ``drop``: end the connections that were held instead."""
        if drop:
            await self._drop()
        self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                await self._open.wait()
                from_server, to_server = await asyncio.open_unix_connection(self._server)
                try:
                    both = [self._copy(reader, to_server), self._copy(from_server, writer)]
                    tasks = [asyncio.ensure_future(each) for each in both]
                    try:
                        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for task in tasks:
                            task.cancel()
                        await asyncio.gather(*tasks, return_exceptions=True)
                finally:
                    to_server.close()
            finally:
                writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await reader.read(1 << 16)
            await self._open.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    async def _drop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
