"""Stores that are closed, and processes that are ended, behind every test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dfm_async.store.sqlite import SqliteStore
from tests.store.helpers import Child

Opener = Callable[..., Awaitable[SqliteStore]]
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
    children: list[Child] = []

    async def start(*words: str) -> Child:
        child = await Child.start(path, *words)
        children.append(child)
        return child

    yield start
    for child in children:
        await child.end()
