"""The executor with real programs: in which order it does what, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import BadTask, LaunchFailed, ProgramExited, TaskAborted
from dfm_async.exchange import (
    ExchangeState,
    ExecutorOptions,
    Invitation,
    LauncherExecutor,
    ProgramState,
    ProgramStatus,
    SubprocessLauncher,
    Task,
)
from dfm_async.exchange.launcher import Launcher
from tests.exchange.processes import Site, program, seen_by_witness, site, survivors, task
from tests.exchange.processes import nothing_remains as nothing_remains
from tests.support.waiting import PROMPT

# one process for many tasks, or one for each


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_one_process_serves_many_tasks_and_keeps_its_exit_code(transport: str) -> None:
    async with site("", 9, transport=transport) as found:
        pids = {await found.run() for _ in range(20)}
        assert len(pids) == 1
        assert found.executor.status().state is ProgramState.RUNNING
        await found.executor.end()
        assert found.executor.status() == ProgramStatus(ProgramState.FAILED, 9, ("ended",))
        with pytest.raises(BadTask, match="ending"):
            await found.run()


async def test_each_task_gets_a_process_that_ends_before_the_next_one_begins() -> None:
    async with site(launch_once=False) as found:
        pids = []
        for number in range(3):
            pids.append(await found.run())
            assert found.heard.lines.count("ended") <= number + 1
        assert len(set(pids)) == 3
        assert found.heard.lines.count("ended") >= 2
    assert found.heard.lines == ["ended"] * 3
    assert found.launcher.status().state is ProgramState.SUCCESS


async def test_a_program_that_does_not_end_after_its_task_is_stopped(gate: Path, nothing_remains: str) -> None:
    async with site("lingers", gate, launch_once=False, deferred_stop_timeout=0.3) as found:
        first = await found.run()
        begun = time.monotonic()
        second = await found.run()
        assert time.monotonic() - begun >= 0.3
        assert first != second
        begun = time.monotonic()
    assert 0.3 <= time.monotonic() - begun < PROMPT
    assert found.launcher.status().exit_code == -signal.SIGTERM
    assert found.heard.lines == ["ended", "lingering"] * 2


async def test_an_abort_ends_only_the_wait_for_the_previous_program(gate: Path) -> None:
    async with site("lingers", gate, launch_once=False) as found:
        await found.run()
        await found.heard.said("lingering")
        abort = asyncio.Event()
        waiting = asyncio.create_task(found.run(abort=abort))
        await asyncio.sleep(0)  # it waits
        begun = time.monotonic()
        abort.set()
        with pytest.raises(TaskAborted):
            await waiting
        assert time.monotonic() - begun < PROMPT
        assert found.executor.status().state is ProgramState.RUNNING
        gate.write_text("go on")
    assert found.launcher.status().state is ProgramState.SUCCESS


# launching


class SlowLauncher:
    """A launcher that never comes to an end."""

    launch_once = True
    needs_deferred_stop = False

    def __init__(self, launch: Callable[[], Any]) -> None:
        self.calls: list[str] = []
        self._launch = launch

    async def initialize(self) -> None:
        self.calls.append("initialize")

    async def launch(self, task: Task, invitation: Invitation) -> None:
        self.calls.append("launch")
        try:
            await self._launch()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise

    async def stop(self, *, asked: bool = True) -> None:
        self.calls.append("stop")

    async def finalize(self) -> None:
        self.calls.append("finalize")

    def status(self) -> ProgramStatus:
        return ProgramStatus(ProgramState.NOT_RUNNING)

    async def ended(self) -> ProgramStatus:
        return self.status()


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def _fail() -> None:
    raise PermissionError("not today")


async def test_a_launch_that_takes_too_long_is_cancelled_and_fails_the_task() -> None:
    launcher = SlowLauncher(_for_ever)
    async with LauncherExecutor(launcher, ExecutorOptions(launch_timeout=0.1)) as executor:
        with pytest.raises(LaunchFailed, match=r"longer than 0\.1 s"):
            await executor.execute(task())
        assert launcher.calls[-2:] == ["cancelled", "stop"]
    assert launcher.calls[-1] == "finalize"


@pytest.mark.parametrize(
    ("launcher", "problem"),
    [(SlowLauncher(_fail), "not today"), (SubprocessLauncher(["/does/not/exist"]), "No such file")],
    ids=["raises", "no such program"],
)
async def test_a_launch_that_raises_fails_the_task(launcher: Launcher, problem: str) -> None:
    async with LauncherExecutor(launcher) as executor:
        for _ in range(2):
            with pytest.raises(LaunchFailed, match=problem):
                await executor.execute(task())


async def test_a_program_that_does_not_connect_in_time_fails_the_task() -> None:
    argv = [sys.executable, "-S", "-c", "import signal; print('busy', flush=True); signal.pause()"]
    found = Site(argv, external_pre_init_timeout=0.5)
    async with found.executor:
        begun = time.monotonic()
        with pytest.raises(LaunchFailed, match=r"connect within 0\.5 s") as caught:
            await found.run()
        assert 0.5 <= time.monotonic() - begun < PROMPT
        assert caught.value.lines == ("busy",)
        assert caught.value.exit_code is None


async def test_a_program_that_never_connects_fails_the_task_with_advice() -> None:
    found = Site([sys.executable, "-S", "-c", "print('done')"])
    async with found.executor:
        with pytest.raises(LaunchFailed, match=r"with exit code 0 before it connected\. A program has to call init"):
            await found.run()


@pytest.mark.parametrize("manner", ["ends", "aborts"])
async def test_a_peer_that_ends_or_aborts_with_its_hello_is_not_up(manner: str) -> None:
    async with site(manner) as found:
        with pytest.raises(LaunchFailed, match="disconnected: I am not in the mood"):
            await found.run()


async def test_a_program_that_leaves_at_once_is_reported_with_its_exit_code() -> None:
    async with site("leaves", 4) as found:
        with pytest.raises((LaunchFailed, ProgramExited)) as caught:
            await found.run()
        assert getattr(caught.value, "exit_code", None) == 4


async def test_a_program_that_raises_aborts_its_task_with_the_reason() -> None:
    async with site() as found:
        with pytest.raises(TaskAborted, match="ValueError: no such data"):
            await found.run({"do": "raise"})
        assert await found.run({"answer": 1}) == 1


# the task and its result


async def test_a_program_that_does_not_take_its_task_in_time_is_ended() -> None:
    async with site("deaf", peer_read_timeout=0.3, resend_interval=0.1, max_resends=1) as found:
        with pytest.raises(TimeoutError, match="did not accept"):
            await found.run()
        assert found.heard.lines[0] == "not listening"
        # It hears of the abort and gets SIGTERM at the same moment; either may end it.
        assert found.launcher.status().exit_code in (-signal.SIGTERM, 1)


async def test_a_result_that_takes_too_long_ends_the_program() -> None:
    async with site(task_wait_timeout=0.3) as found:
        with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
            await found.run({"do": "wait"})
        assert found.executor.status().state is not ProgramState.RUNNING
        assert await found.run({"answer": 1}) == 1


async def test_a_program_for_one_task_that_cannot_be_given_it_is_asked_to_end() -> None:
    async with site(launch_once=False) as found:
        with pytest.raises(BadTask, match="cannot be encoded"):
            await found.run({"answer": object()})
        begun = time.monotonic()
        assert await found.run({"answer": 1}) == 1
        assert time.monotonic() - begun < PROMPT, "nobody waited for a program that waits for a task"


async def test_a_program_lives_until_every_receiver_has_its_result() -> None:
    array = np.arange(2 << 20, dtype=np.float32)
    async with site(launch_once=False) as found:
        offered = await found.executor.offer(task({"do": "double", "array": array}), ["one", "two"])
        assert offered.size == array.nbytes
        first = await offered.pull("one")
        assert offered.state.value == "transferring"
        assert found.executor.status().state is ProgramState.RUNNING
        following = asyncio.create_task(found.run({"answer": "next"}))
        second = await offered.pull("two")
        assert offered.state is ExchangeState.SETTLED
        np.testing.assert_array_equal(first.data, second.data)
        assert await following == "next"
        assert found.heard.lines[0] == "ended"


# exits and results that cross


@pytest.mark.parametrize("way", ["exit 0", "exit 3", "SIGKILL"])
async def test_a_result_that_was_sent_before_the_end_of_its_program_counts(way: str, tmp_path: Path) -> None:
    async with site("offering", way, tmp_path / "done", script="mortal") as found:
        assert await found.run(1) == 1
        await found.launcher.ended()
        assert await found.run(2) == 2


async def test_exit_code_0_leaves_time_for_the_result_while_connected() -> None:
    async with site(last_result_transfer_timeout=0.5) as found:
        begun = time.monotonic()
        with pytest.raises(ProgramExited) as caught:
            await found.run({"do": "leave the connection to a child", "code": 0})
        assert caught.value.exit_code == 0
        assert time.monotonic() - begun > 0.5


async def test_after_another_exit_code_nothing_is_waited_for() -> None:
    async with site() as found:
        with pytest.raises(ProgramExited) as caught:
            async with asyncio.timeout(PROMPT):
                await found.run({"do": "leave the connection to a child", "code": 3})
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("way", ["exit 3", "SIGKILL", "sys.exit 3"])
async def test_a_program_that_crashes_after_its_only_task_has_done_it(way: str, tmp_path: Path) -> None:
    async with site("settled", way, tmp_path / "done", script="mortal", launch_once=False) as found:
        assert await found.run(1) == 1
        assert await found.run(2) == 2


# programs that somebody else starts


async def test_a_program_that_was_started_elsewhere_can_attach(tmp_path: Path) -> None:
    async with LauncherExecutor(None) as executor:
        path = executor.bootstrap(tmp_path / "invitation")
        assert path.stat().st_mode & 0o777 == 0o600
        environment = {**os.environ, "DFM_ASYNC_BOOTSTRAP": str(path)}
        process = await asyncio.create_subprocess_exec(*program("server", "", "6"), env=environment)
        result = await executor.execute(task())
        assert result.data == process.pid
        assert not path.exists()
        assert (await executor.execute(task())).data == process.pid
        await executor.end()
        assert await process.wait() == 6


async def test_two_executors_do_not_disturb_each_other() -> None:
    async with site() as one, site(launch_once=False) as other:
        found = await asyncio.gather(
            *(one.run({"answer": number}) for number in range(3)),
            *(other.run({"answer": -number}) for number in range(2)),
        )
        assert found == [0, 1, 2, 0, -1]


# cancellation


@pytest.mark.parametrize(
    "moment", ["before hello", "after hello", "receiving", "computing", "offering", "transferring"]
)
async def test_cancelling_a_task_ends_its_program_at_once(moment: str, tmp_path: Path, nothing_remains: str) -> None:
    async with site(moment, "polite", tmp_path, script="witness") as found:
        running = asyncio.create_task(found.run(bytes(6 << 20)))
        await found.heard.said(f"at {moment}")
        begun = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - begun < PROMPT
        assert await survivors(nothing_remains) == []
        seen = seen_by_witness(tmp_path, moment)
        assert seen["SIGTERM"]
        assert seen.get("closed") == (None if moment == "before hello" else "aborted")


async def test_a_task_that_is_cancelled_while_it_is_launched_stops_the_launcher() -> None:
    launched = asyncio.Event()

    async def launch() -> None:
        launched.set()
        await _for_ever()

    launcher = SlowLauncher(launch)
    async with LauncherExecutor(launcher) as executor:
        running = asyncio.create_task(executor.execute(task()))
        await launched.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert launcher.calls[-2:] == ["cancelled", "stop"]


async def test_a_task_cancelled_during_its_clean_up_leaves_it_to_finalize(tmp_path: Path) -> None:
    async with site("computing", "stubborn", tmp_path, script="witness") as found:
        found.launcher._grace = 0.3
        running = asyncio.create_task(found.run())
        await found.heard.said("at computing")
        running.cancel()
        while not running.done():
            await asyncio.sleep(0)
            running.cancel()
        assert running.cancelled()
    assert found.launcher.status().exit_code == -signal.SIGKILL


async def test_finalizing_that_was_cancelled_goes_on_and_the_next_call_waits_for_it(tmp_path: Path) -> None:
    found = Site(program("witness", "settled", "stubborn", tmp_path))
    found.launcher._grace = 0.3
    await found.executor.initialize()
    await found.run()
    await found.heard.said("at settled")
    first, second = (asyncio.create_task(found.executor.finalize()) for _ in range(2))
    await asyncio.sleep(0)  # they have begun
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert found.launcher.status().exit_code == -signal.SIGKILL


async def test_after_an_abort_between_two_tasks_the_next_one_gets_another_program() -> None:
    async with site() as found:
        pids = set()
        for _ in range(3):
            pids.add(await found.run())
            found.executor.abort()
        assert len(pids) == 3
