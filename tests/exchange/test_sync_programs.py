"""Programs without an event loop, as processes: what they say, and how they end."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from dfm_async.errors import ProgramExited
from dfm_async.exchange import ProgramState
from tests.exchange.processes import Site, site
from tests.exchange.processes import nothing_remains as nothing_remains
from tests.support.waiting import PROMPT


async def end(found: Site) -> int | None:
    """End the job; return the program's own exit code."""
    begun = time.monotonic()
    await found.executor.end()
    assert time.monotonic() - begun < PROMPT  # it has no thread that keeps it
    assert found.heard.lines[-1] == "threads []"
    return found.launcher.status().exit_code


async def test_a_script_serves_tasks_until_the_end_and_keeps_its_exit_code() -> None:
    async with site("shuts down", script="plain") as found:
        for number in (1, 2, 3):
            assert await found.run([number], number=number) == {"params": [number], "metrics": {"loss": 0.5}}
        assert found.metrics == [({"loss": 0.5}, 1), ({"loss": 0.5}, 2), ({"loss": 0.5}, 3)]
        assert found.progress == [(1, 2, "half")] * 3
        assert await end(found) == 7


@pytest.mark.parametrize(
    ("scenario", "code"),
    [("does not shut down", 0), ("exits with 7 after the end", 7), ("answers in a thread", 0)],
)
async def test_a_script_that_does_not_shut_down_ends_as_it_wants(scenario: str, code: int) -> None:
    async with site(scenario, script="plain") as found:
        assert await found.run() == "done"
        assert await end(found) == code
        state = ProgramState.FAILED if code else ProgramState.SUCCESS
        assert found.launcher.status().state is state


@pytest.mark.parametrize(
    ("scenario", "code", "lines"),
    [
        ("raises", 1, {"Traceback (most recent call last):", "ValueError: no such data", "threads []"}),
        ("exits with 7 in the middle", 7, {"threads []"}),
    ],
)
async def test_a_script_that_ends_too_early_is_reported_with_its_output(
    scenario: str, code: int, lines: set[str]
) -> None:
    async with site(scenario, script="plain") as found:
        with pytest.raises(ProgramExited) as caught:
            await found.run()
        assert caught.value.exit_code == code
        assert lines <= set(caught.value.lines)


async def test_heartbeats_go_on_while_the_main_thread_computes() -> None:
    async with site("computes", script="plain", heartbeat_interval=0.1, heartbeat_timeout=0.6) as found:
        async with asyncio.timeout(20):
            begun = time.monotonic()
            assert await found.run() == "done"
            assert time.monotonic() - begun > 1.2


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
    found = Site([sys.executable, "-c", FORKS])
    async with found.executor, asyncio.timeout(20):
        for _ in range(2):
            assert await found.run() == [3, [1]]
        await found.executor.end()
    said = [
        line for line in found.heard.lines if line.startswith("child")
    ]  # newer Pythons warn of forks beside threads
    assert said == ["child False", "child CallStateError"] * 2
    assert found.launcher.status().exit_code == 0
