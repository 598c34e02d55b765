"""Stores that are closed, and processes that are ended, behind every test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dfm_async.store import Store
from dfm_async.store.sqlite import SqliteStore
from tests.store.backends import Backend, PostgresBackend, SqliteBackend
from tests.store.helpers import Child

Opener = Callable[..., Awaitable[SqliteStore]]
AnyOpener = Callable[[], Awaitable[Store]]
Starter = Callable[..., Awaitable[Child]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
async def opened(path: Path) -> AsyncIterator[Opener]:
    stores: list[SqliteStore] = []

    async def opened(busy_timeout: float = 10.0) -> SqliteStore:
        store = SqliteStore(path, busy_timeout=busy_timeout)
        stores.append(store)
        await store.open()
        return store

    yield opened
    for store in stores:
        await store.close()


@pytest.fixture
async def store(opened: Opener) -> SqliteStore:
    return await opened()


@pytest.fixture
async def start(path: Path) -> AsyncIterator[Starter]:
    async for starter in _starter(f"sqlite:///{path}"):
        yield starter


async def _starter(url: str) -> AsyncIterator[Starter]:
    children: list[Child] = []

    async def start(*words: str) -> Child:
        child = await Child.start(url, *words)
        children.append(child)
        return child

    yield start
    for child in children:
        await child.end()


# stores in every database


@pytest.fixture(params=["sqlite", "postgres"])
def backend(request: pytest.FixtureRequest, path: Path) -> Backend:
    return SqliteBackend(path) if request.param == "sqlite" else PostgresBackend(request.getfixturevalue("postgres"))


@pytest.fixture
async def any_opened(backend: Backend) -> AsyncIterator[AnyOpener]:
    stores: list[Store] = []

    async def opened() -> Store:
        store = backend.make()
        stores.append(store)
        await store.open()
        return store

    yield opened
    for store in stores:
        await store.close()


@pytest.fixture
async def any_store(any_opened: AnyOpener) -> Store:
    return await any_opened()


@pytest.fixture
async def any_start(backend: Backend) -> AsyncIterator[Starter]:
    async for starter in _starter(backend.url):
        yield starter
