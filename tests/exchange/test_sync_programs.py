"""Programs without an event loop, as processes: what they say, and how they end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dfm_async.errors import ProgramExited
from dfm_async.exchange import ExecutorOptions, LauncherExecutor, ProgramState, SubprocessLauncher, Task
from tests.exchange.processes import Heard, program
from tests.exchange.processes import nothing_remains as nothing_remains


class Site:
    """An executor with a plain script."""

    def __init__(self, scenario: str, options: ExecutorOptions | None, launch_once: bool) -> None:
        self.heard = Heard()
        self.metrics: list[tuple[dict[str, Any], int | None]] = []
        self.progress: list[tuple[float, float | None, str]] = []
        self.launcher = SubprocessLauncher(
            program("plain", scenario), on_output=self.heard, launch_once=launch_once, shutdown_timeout=20
        )
        self.executor = LauncherExecutor(
            self.launcher, options, on_metrics=self._measured, on_progress=lambda *news: self.progress.append(news)
        )

    def _measured(self, values: Mapping[str, Any], step: int | None) -> None:
        self.metrics.append((dict(values), step))

    async def run(self, data: Any = None, number: int = 1) -> Any:
        return (await self.executor.execute(Task("train", data, round=number, total_rounds=9))).data

    async def end(self) -> int | None:
        """Ends the job; tells the program's own exit code."""
        begun = time.monotonic()
        await self.executor.end()
        assert time.monotonic() - begun < 5  # it has no thread that keeps it
        assert self.heard.lines[-1] == "threads []"
        return self.launcher.status().exit_code


@asynccontextmanager
async def site(
    scenario: str, options: ExecutorOptions | None = None, *, launch_once: bool = True
) -> AsyncIterator[Site]:
    found = Site(scenario, options, launch_once)
    async with found.executor:
        yield found


async def test_a_script_takes_tasks_until_the_site_ends_it_and_its_exit_code_is_its_own() -> None:
    async with site("shuts down") as found:
        for number in (1, 2, 3):
            assert await found.run([number], number) == {"params": [number], "metrics": {"loss": 0.5}}
        assert found.metrics == [({"loss": 0.5}, 1), ({"loss": 0.5}, 2), ({"loss": 0.5}, 3)]
        assert found.progress == [(1, 2, "half")] * 3
        assert await found.end() == 7


@pytest.mark.parametrize(
    ("scenario", "code"),
    [("does not shut down", 0), ("exits with 7 after the end", 7), ("answers in a thread", 0)],
)
async def test_a_script_that_does_not_shut_down_ends_as_it_wants(scenario: str, code: int) -> None:
    async with site(scenario) as found:
        assert await found.run() == "done"
        assert await found.end() == code
        state = ProgramState.FAILED if code else ProgramState.SUCCESS
        assert found.launcher.status().state is state


async def test_a_script_that_raises_is_reported_with_its_traceback() -> None:
    async with site("raises") as found:
        with pytest.raises(ProgramExited, match="ValueError: no such data") as caught:
            await found.run()
        assert caught.value.exit_code == 1
        assert "Traceback (most recent call last):" in caught.value.lines
        assert "threads []" in caught.value.lines


async def test_a_script_that_exits_in_the_middle_is_reported_with_its_exit_code() -> None:
    async with site("exits with 7 in the middle") as found:
        with pytest.raises(ProgramExited) as caught:
            await found.run()
        assert caught.value.exit_code == 7


@pytest.mark.parametrize("launch_once", [True, False])
async def test_what_a_script_does_after_its_result_does_not_harm_it(launch_once: bool) -> None:
    async with site("raises after its result", launch_once=launch_once) as found:
        assert await found.run() == "done"
        assert (await found.launcher.ended()).exit_code == 1
        assert await found.run() == "done"
        assert (await found.launcher.ended()).exit_code == 1


async def test_signs_of_life_go_on_while_the_main_thread_computes() -> None:
    options = ExecutorOptions(heartbeat_interval=0.1, heartbeat_timeout=0.6)
    async with site("computes", options) as found:
        async with asyncio.timeout(20):
            begun = time.monotonic()
            assert await found.run() == "done"
            assert time.monotonic() - begun > 1.2


async def test_looking_whether_it_runs_takes_no_task() -> None:
    async with site("looks without taking") as found:
        assert await found.run() == "ready"
        for number in range(5):
            assert await found.run(number) == number
        assert await found.end() == 0


FORKS = """
import multiprocessing, os, sys
from dfm_async.exchange import sync
def in_the_child():
    print("child", sync.is_running())
    sync.progress(1)
    try:
        sync.log({"loss": 1})
    except Exception as error:
        print("child", type(error).__name__)
    sys.stdout.flush()
sync.init()
while sync.receive() is not None:
    child = os.fork()
    if not child:
        in_the_child()
        sys.exit(3)  # runs what is registered for the end of the interpreter
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with multiprocessing.get_context("fork").Pool(1) as pool:
        sync.send([code, pool.map(abs, [-1])])
"""


async def test_a_script_can_fork_and_its_forks_neither_hang_nor_speak_for_it() -> None:
    heard = Heard()
    launcher = SubprocessLauncher([sys.executable, "-c", FORKS], on_output=heard)
    async with LauncherExecutor(launcher, ExecutorOptions(other_tasks=("*",))) as executor, asyncio.timeout(20):
        for _ in range(2):
            assert (await executor.execute(Task("any"))).data == [3, [1]]
        await executor.end()
    said = [line for line in heard.lines if line.startswith("child")]  # newer Pythons warn of forks beside threads
    assert said == ["child False", "child CallStateError"] * 2
    assert launcher.status().exit_code == 0
