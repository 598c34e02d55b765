"""Who dies when: every way in which a program can misbehave, at every moment of an exchange."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from dfm_async.errors import ExchangeError, LaunchFailed, PeerGone, ProgramExited, TaskAborted, TransferFailed
from dfm_async.exchange import ExecutorOptions, LauncherExecutor, SubprocessLauncher, Task
from tests.exchange.processes import Heard, program
from tests.exchange.processes import nothing_remains as nothing_remains
from tests.support.waiting import PROMPT

TABLE = """
                             | before hello | after hello | receiving | computing | offering | transferring | settled
SIGTERM                      | launch -15   | exited -15  | exited -15| exited -15| exited -15| exited -15  | fine
SIGKILL                      | launch -9    | exited -9   | exited -9 | exited -9 | exited -9| exited -9    | fine
SIGSTOP                      | launch       | unread      | unread    | gone      | transfer | transfer     | fine
exit 0                       | launch 0     | exited 0    | exited 0  | exited 0  | exited 0 | exited 0     | fine
exit 3                       | launch 3     | exited 3    | exited 3  | exited 3  | exited 3 | exited 3     | fine
sys.exit 0                   | launch 0     | exited 0    | -         | exited 0  | -        | -            | fine
sys.exit 3                   | launch 3     | exited 3    | -         | exited 3  | -        | -            | fine
closes its output            | fine         | fine        | fine      | fine      | fine     | fine         | fine
leaves a child with the pipe | launch 3     | exited 3    | exited 3  | exited 3  | exited 3 | exited 3     | fine
ignores SIGTERM              | aborted      | aborted     | aborted   | aborted   | aborted  | aborted      | fine
invalid UTF-8                | fine         | fine        | fine      | fine      | fine     | fine         | fine
100 MB without newline       | fine         | fine        | fine      | fine      | fine     | fine         | fine
"""
"""How the task ends: *offering* is a result that was offered and not accepted, all tasks and results are large.

There is no orderly exit (sys.exit) in the middle of the agent's own work: no code of a program runs there.
"""

ERRORS: dict[str, type[Exception]] = {
    "launch": LaunchFailed,
    "unread": TimeoutError,
    "exited": ProgramExited,
    "gone": PeerGone,
    "transfer": TransferFailed,
    "aborted": TaskAborted,
}
DATA = bytes(range(256)) * (6 * 4096)
"""More than a transfer may be ahead of its receiver, so that none is complete before it is answered."""
SILENCE = 1.0
"""How long a program may be silent before it counts as gone, where that is what a cell is about, in seconds."""
HELLO = 3.0
"""How long it may take to say hello there, in seconds; the next one, which is well, must also make it."""
GRACE = 0.2


def _cells() -> list[Any]:
    head, *rows = TABLE.strip().splitlines()
    moments = [word.strip() for word in head.split("|")[1:]]
    found = []
    for row in rows:
        way, *outcomes = (word.strip() for word in row.split("|"))
        for moment, outcome in zip(moments, outcomes, strict=True):
            if outcome != "-":
                found.append(pytest.param(moment, way, outcome, id=f"{moment}, {way}: {outcome}"))
    return found


class Cell:
    """One executor with a program that misbehaves once."""

    def __init__(self, moment: str, way: str, tmp_path: Path) -> None:
        self.heard = Heard()
        self.launcher = SubprocessLauncher(
            program("mortal", moment, way, tmp_path / "done"), shutdown_timeout=GRACE, on_output=self.heard
        )
        impatient = way == "SIGSTOP"
        options = ExecutorOptions(
            heartbeat_interval=0.2,
            heartbeat_timeout=SILENCE if impatient else 60,
            streaming_idle_timeout=SILENCE if impatient else 600,
            external_pre_init_timeout=HELLO if impatient else 60,
            peer_read_timeout=SILENCE if impatient else 60,
        )
        self.executor = LauncherExecutor(self.launcher, options)
        self.abort = asyncio.Event()
        self._line = f"at {moment} "

    async def first_task(self) -> tuple[Exception | None, float]:
        """Runs the task; tells how it ended, and how long after the deed."""
        try:
            found = await self.executor.execute(_task(), abort=self.abort)
        except (ExchangeError, TimeoutError) as error:
            return error, time.monotonic() - await self.time_of_deed()
        assert found.data == DATA
        return None, time.monotonic() - await self.time_of_deed()

    async def time_of_deed(self) -> float:
        return float((await self.heard.said(self._line)).removeprefix(self._line))


def _task() -> Task:
    return Task("train", DATA, round=1, total_rounds=2)


@pytest.mark.parametrize(("moment", "way", "outcome"), _cells())
async def test_a_program_that_misbehaves_costs_its_task_at_most(
    moment: str, way: str, outcome: str, tmp_path: Path
) -> None:
    cell = Cell(moment, way, tmp_path)
    async with cell.executor, asyncio.TaskGroup() as tasks:
        if way == "ignores SIGTERM" and moment != "settled":
            tasks.create_task(_abort_when_ignoring(cell))
        error, took = await cell.first_task()
        print(f"{moment}, {way}: the task ended {took * 1000:.1f} ms later")
        _check(error, outcome, f"at {moment} ")
        if moment == "settled":
            await _after_settling(cell, way)
        elif error is not None:
            assert took < _bound(moment, way)
        assert (await cell.executor.execute(_task())).data == DATA
    if way == "invalid UTF-8":
        assert "caf\ufffd \ufffd\ufffd" in cell.heard.lines
    if way == "100 MB without newline":
        assert any(line.startswith("xxx") and "cut" in line for line in cell.heard.lines)


def _bound(moment: str, way: str) -> float:
    if way == "SIGSTOP":
        return (HELLO if moment == "before hello" else SILENCE) + GRACE + PROMPT
    return PROMPT + (GRACE if way == "ignores SIGTERM" else 0)


async def _abort_when_ignoring(cell: Cell) -> None:
    await cell.heard.said("ignoring SIGTERM")
    cell.abort.set()


def _check(error: Exception | None, outcome: str, line: str) -> None:
    kind, _, code = outcome.partition(" ")
    if kind == "fine":
        assert error is None, repr(error)
        return
    assert type(error) is ERRORS[kind], repr(error)
    if isinstance(error, (LaunchFailed, ProgramExited, PeerGone)):
        assert line in "\n".join(error.lines)
    if isinstance(error, (LaunchFailed, ProgramExited)):
        assert error.exit_code == (int(code) if code else None)


async def _after_settling(cell: Cell, way: str) -> None:
    """The task was done. What the program does then must not harm the next one, once it is known."""
    await cell.time_of_deed()
    if way == "SIGSTOP":
        with pytest.raises(TimeoutError, match="did not accept task"):
            await cell.executor.execute(_task())
    elif way == "ignores SIGTERM":
        cell.abort.set()
        with pytest.raises(TaskAborted):
            await cell.executor.execute(_task(), abort=cell.abort)
    elif "SIG" in way or "exit" in way or "leaves" in way:
        await cell.launcher.ended()
