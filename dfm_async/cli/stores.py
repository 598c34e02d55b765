"""``dfm-async store``: check, migrate, prune and vacuum stores of jobs."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from dfm_async.cli.command_runner import BadInput, Exit, Unreachable, safe_json
from dfm_async.cli.terminal import StandardOutput
from dfm_async.cli.view import counted
from dfm_async.federation.federation import Federation
from dfm_async.model.status import JobStatus
from dfm_async.session.session import Session
from dfm_async.store.base import Store
from dfm_async.store.rows import VERSION
from dfm_async.store.urls import open_store

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_INTERVAL: Final = 0.1
_CLEAR: Final = "\r\x1b[K"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


async def _existing(url: str) -> Store:
    """Return the store of a URL, which is not open.

    Raises:
        Unreachable: the file does not exist; opening it would create an empty one.
        StoreError: the URL is not that of a store.
    """
    store = open_store(url)
    if url.startswith("sqlite:") and not await anyio.Path(store.path).is_file():
        raise Unreachable(f"there is no store {store.path}")
    return store


@asynccontextmanager
async def store_session(url: str) -> AsyncIterator[Session]:
    """Open a session on a store. Nothing runs here, so a federation without sites is enough."""
    store = await _existing(url)
    async with Session(Federation("command line"), target="inline", store=store) as session:
        yield session


class _Progress:
    """Shows how far a check is, in one line of standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._next = 0.0 if sys.stderr.isatty() else math.inf

    def show(self, jobs: int, total: int | None) -> None:
        """Show the number of jobs that were checked, at most ten times per second."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _INTERVAL
            done = f"reading jobs: {jobs:,}" if total is None else f"decoding jobs: {jobs:,} of {total:,}"
            _write(_CLEAR + done)

    def clear(self) -> None:
        """Clear the line, until there is progress again."""
        if self._next < math.inf:
            self._next = 0.0
            _write(_CLEAR)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


async def check(url: str, *, as_json: bool) -> int:
    """Write everything in a store that is damaged, one line each."""
    output, count, progress = StandardOutput(), 0, _Progress()
    async with store_session(url) as session:
        async for error in session.check_store(progress.show):
            count += 1
            progress.clear()
            if as_json:
                line = {"problem": error.problem, "advice": error.advice}
                await output.line(safe_json(msgspec.json.encode(line)))
            else:
                await output.line(f"{error.problem}. {error.advice}")
    progress.clear()
    if not as_json:
        await output.line(f"{counted(count, 'problem')} found" if count else "no problems found")
    return Exit.FAILED if count else Exit.SUCCESS


async def prune(url: str, older_than: str, status: JobStatus | None) -> int:
    """Delete old jobs, and write their number."""
    seconds = _seconds(older_than)
    if status is not None and not status.terminal:
        raise BadInput(f"--status {status.value}: only jobs that have ended for good can be deleted")
    async with store_session(url) as session:
        count = await session.prune(seconds, status)
    await StandardOutput().line(f"deleted {counted(count, 'job')}")
    return Exit.SUCCESS


async def vacuum(url: str) -> int:
    """Give the space of deleted jobs back."""
    store = await _existing(url)
    await store.open()
    try:
        await store.vacuum()
    finally:
        await store.close()
    await StandardOutput().line("the space of deleted jobs was given back")
    return Exit.SUCCESS


async def migrate(url: str) -> int:
    """Bring a store to the version of the format that this program writes."""
    store = await _existing(url)
    await store.open()
    found = store.migrated_from
    await store.close()
    done = f"has version {VERSION} already" if found is None else f"was migrated from version {found} to {VERSION}"
    await StandardOutput().line(f"the store {done}")
    return Exit.SUCCESS


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise BadInput(f"--older-than {text}: give a number and a unit, such as 30d, 12h, 45m or 90s")
    return float(found[1]) * _UNITS[found[2]]
