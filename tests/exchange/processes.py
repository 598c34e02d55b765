"""What tests with real processes share: programs to run, what they said, and what they left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dfm_async.exchange import ExecutorOptions, LauncherExecutor, SubprocessLauncher, Task
from dfm_async.exchange.process import orphan_reaper
from dfm_async.wire.worker_output import LogRecord

PROGRAMS = Path(__file__).parent / "programs"
MARK = "DFM_ASYNC_TEST_FAMILY"
"""A variable that every process inherits from the test that it belongs to, wherever it was moved to."""


def program(name: str, *arguments: object) -> list[str]:
    """The command of one of the scripts beside the tests."""
    return [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments)]


class Heard:
    """Takes the output of a program; tests wait for lines instead of for time."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, record: LogRecord) -> None:
        self.records.append(record)
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    @property
    def lines(self) -> list[str]:
        return [record.message for record in self.records]

    async def said(self, text: str, times: int = 1) -> str:
        """Waits until that many lines with this text have come; gives the last of them."""
        async with asyncio.timeout(20):
            while True:
                found = [line for line in self.lines if text in line]
                if len(found) >= times:
                    return found[times - 1]
                await asyncio.shield(self._changed)


class Site:
    """An executor with a program, and everything that it has received."""

    def __init__(self, argv: list[str], *, launch_once: bool = True, transport: Any = "unix", **options: Any) -> None:
        self.heard = Heard()
        self.metrics: list[tuple[dict[str, Any], int | None]] = []
        self.progress: list[tuple[float, float | None, str]] = []
        self.launcher = SubprocessLauncher(argv, launch_once=launch_once, on_output=self.heard)
        self.executor = LauncherExecutor(
            self.launcher,
            ExecutorOptions(**options),
            transport=transport,
            on_metrics=lambda values, step: self.metrics.append((dict(values), step)),
            on_progress=lambda *news: self.progress.append(news),
        )

    async def run(
        self, data: Any = None, name: str = "train", *, number: int = 1, abort: asyncio.Event | None = None
    ) -> Any:
        return (await self.executor.execute(task(data, name, number), abort=abort)).data


def task(data: Any = None, name: str = "train", number: int = 1) -> Task:
    return Task(name, data, round=number, total_rounds=9)


@asynccontextmanager
async def site(*arguments: object, script: str = "server", **options: Any) -> AsyncIterator[Site]:
    """An open executor with one of the scripts beside the tests."""
    found = Site(program(script, *arguments), **options)
    async with found.executor:
        yield found


def seen_by_witness(folder: Path, moment: str) -> dict[str, Any]:
    """What the program ``witness`` has written down."""
    found: dict[str, Any] = {}
    for line in (folder / f"{moment}.seen").read_text().splitlines():
        found |= json.loads(line)
    return found


async def gone(pid: int, limit: float = 10.0) -> None:
    """Waits for the end of any process; it need not be a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(limit):
            await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def family(mark: str) -> list[psutil.Process]:
    """All processes that were started on behalf of a test, by whatever way."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def survivors(mark: str) -> list[psutil.Process]:
    """Those of them that are not about to end: a process that was killed takes a moment to vanish."""
    for process in _without_reaper(mark):
        with suppress(TimeoutError):
            await gone(process.pid, 1.0)
    return _without_reaper(mark)


def _without_reaper(mark: str) -> list[psutil.Process]:
    kept = orphan_reaper._process.pid if orphan_reaper._process is not None else None
    return [process for process in family(mark) if process.pid != kept]


def _files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the one that lists them
            continue
    return sorted(found)


@pytest.fixture(autouse=True)
async def nothing_remains(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """No process, no zombie and no open file outlives a test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # hundreds of programs start here
    children, files = set(psutil.Process().children()), _files()
    yield mark
    left = await survivors(mark)
    zombies = [child for child in psutil.Process().children() if child not in children]
    for process in left:
        process.kill()  # the next test must not suffer from this one
    assert not left, f"processes left behind: {left}"
    assert not zombies, f"children left behind: {zombies}"
    assert orphan_reaper._process is None
    assert _files() == files
