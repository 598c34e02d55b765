"""The databases that stores are tested with, and what tests do to them behind the store's back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from dfm_async.store import Store, open_store
from dfm_async.store.postgres import PostgresStore
from tests.store.helpers import sql
from tests.support.postgres import PostgresServer

LEASE = 2.0
"""After how many seconds an owner in another process counts as dead, in PostgreSQL."""


class Backend(Protocol):
    """A database with one store."""

    url: str

    def make(self) -> Store:
        """Make a store that is not open."""

    async def execute(self, statement: str) -> list[Any]:
        """Execute a statement, which is the same in all databases. The loop goes on: it may hold a lock of a store."""

    def broken(self, table: str = "entries", event: str = "INSERT") -> AbstractAsyncContextManager[None]:
        """Let all transactions that write to a table fail."""


class SqliteBackend:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def make(self) -> Store:
        return open_store(self.url)

    async def execute(self, statement: str) -> list[Any]:
        return await asyncio.to_thread(sql, self.path, statement)

    @asynccontextmanager
    async def broken(self, table: str = "entries", event: str = "INSERT") -> AsyncIterator[None]:
        await self.execute(f"CREATE TRIGGER broken BEFORE {event} ON {table} BEGIN SELECT RAISE(ABORT, 'no luck'); END")
        yield
        await self.execute("DROP TRIGGER broken")


class PostgresBackend:
    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._database = server.new_database()
        self.url = server.url(self._database)

    def make(self, lease: float = 30.0) -> PostgresStore:
        return PostgresStore(self.url, lease=lease)

    async def execute(self, statement: str) -> list[Any]:
        return await asyncio.to_thread(self._server.execute, self._database, statement)

    @asynccontextmanager
    async def broken(self, table: str = "entries", event: str = "INSERT") -> AsyncIterator[None]:
        await self.execute(
            "CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'no luck'; END $$; "
            f"CREATE TRIGGER broken BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION fail()"
        )
        yield
        await self.execute(f"DROP TRIGGER broken ON {table}")
