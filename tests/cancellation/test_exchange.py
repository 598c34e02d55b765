"""External programs: every call of an executor and an agent, cancelled at each suspension, leaves no process behind."""

from __future__ import annotations

import asyncio

import pytest

from dfm_async.exchange import ExecutorOptions, LauncherExecutor, SubprocessLauncher, Task
from dfm_async.exchange import program_messages as msg
from tests.cancellation.steps import LIMIT, cancelled_at, every_cut
from tests.exchange.agents import agent_by_hand, offer
from tests.exchange.processes import nothing_remains as nothing_remains
from tests.exchange.processes import program

pytestmark = pytest.mark.timeout(100)

MOST = 40
"""At most this many suspensions of a call are tried."""


def new_executor() -> LauncherExecutor:
    launcher = SubprocessLauncher(program("server"), shutdown_timeout=0.5, on_output=lambda record: None)
    return LauncherExecutor(launcher, ExecutorOptions(other_tasks=("*",)))


async def ends(executor: LauncherExecutor) -> None:
    async with asyncio.timeout(LIMIT):
        await executor.finalize()


@pytest.mark.usefixtures("nothing_remains")
async def test_execute_cancelled_leaves_the_executor_usable(times: int) -> None:
    executor = new_executor()
    await executor.initialize()
    try:
        for number, cuts in enumerate(every_cut(times)):
            outcome = await cancelled_at(executor.execute(Task("work", number)), cuts)
            assert outcome.error is None, cuts
            if not outcome.delivered or number == MOST:
                break
        assert number
        async with asyncio.timeout(LIMIT):
            await executor.execute(Task("work", 1))
    finally:
        await ends(executor)


@pytest.mark.usefixtures("nothing_remains")
async def test_initialize_and_finalize_cancelled_leave_nothing(times: int) -> None:
    async def call(executor: LauncherExecutor, launch: bool) -> None:
        await executor.initialize()
        if launch:
            await executor.execute(Task("work", 1))
        await executor.finalize()

    for launch in (False, True):
        for number, cuts in enumerate(every_cut(times)):
            executor = new_executor()
            outcome = await cancelled_at(call(executor, launch), cuts)
            await ends(executor)
            assert outcome.error is None, cuts
            if not outcome.delivered or number == MOST:
                break


async def test_get_task_cancelled_loses_no_task(times: int) -> None:
    async with agent_by_hand() as (agent, hand):
        for number, cuts in enumerate(every_cut(times)):
            call = asyncio.ensure_future(cancelled_at(agent.get_task(), cuts))
            await asyncio.sleep(0)
            hand.say(offer(number + 1, number))
            outcome = await call
            assert outcome.error is None, cuts
            async with asyncio.timeout(LIMIT):
                task = await agent.get_task() if outcome.cancelled else outcome.value
                assert task is not None
                assert task.data == number
                answered = asyncio.ensure_future(agent.submit_result(number))
                found = await hand.next(msg.ResultOffer, number)
                hand.say(msg.ResultAnswer(found.task, found.result, accepted=True))
                await answered
            if not outcome.delivered or number == MOST:
                break
        assert number
