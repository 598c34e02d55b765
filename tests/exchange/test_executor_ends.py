"""Heartbeats, aborts and the end of an executor, against real agents and against programs that are played by hand:
rules 3.1.1, 3.1.2, 3.1.4 and 3.3, without any process.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dfm_async.errors import (
    AgentClosed,
    BadTask,
    CallStateError,
    LaunchFailed,
    PeerGone,
    ResultNotDelivered,
    TaskAborted,
    TaskRejected,
    TransferFailed,
)
from dfm_async.exchange import (
    AgentOptions,
    ExecutorOptions,
    FlareAgent,
    LauncherExecutor,
    PlainCodec,
    ProgramState,
    SubprocessLauncher,
    Task,
    TaskResult,
)
from dfm_async.exchange import program_messages as msg
from tests.exchange.executors import (
    ANY,
    LARGE,
    Meddler,
    attach,
    attached,
    begin_task,
    echo,
    offer_result,
    program_by_hand,
    result_of,
    serving,
    with_executor,
    with_no_program,
    with_pair,
    with_program,
)
from tests.exchange.rig import Hand, block, idle, now, on_virtual_time

# heartbeats (3.1.2)


@with_pair(program=AgentOptions(heartbeat_timeout=120))
async def test_a_program_that_becomes_silent_is_gone_after_the_timeout(
    executor: LauncherExecutor, agent: FlareAgent, meddler: Meddler
) -> None:
    executing = asyncio.ensure_future(executor.execute(Task("any")))
    await agent.get_task()
    await asyncio.sleep(300)
    assert not executing.done(), "it sent heartbeats"
    meddler.stop()
    begun = now()
    with pytest.raises(PeerGone, match="no heartbeat for 60"):
        await executing
    assert 54 < now() - begun <= 60.1
    with pytest.raises(AgentClosed, match="peer gone"):
        await agent.get_task()


@with_executor()
async def test_a_program_that_vanishes_between_tasks_is_noticed_by_the_next_one(
    executor: LauncherExecutor, hand: Hand
) -> None:
    await asyncio.sleep(61)
    with pytest.raises(PeerGone, match="no heartbeat"):
        await executor.execute(Task("any"))
    await hand.gone.wait()


@with_executor(ExecutorOptions(other_tasks=("*",), peer_read_timeout=None))
async def test_without_a_limit_to_accept_a_task_heartbeats_are_required(executor: LauncherExecutor, hand: Hand) -> None:
    executing = asyncio.ensure_future(executor.execute(Task("any")))
    for _ in range(20):
        await asyncio.sleep(50)
        hand.say(msg.Beat())
    assert not executing.done()
    with pytest.raises(PeerGone, match="no heartbeat"):
        await executing


class Slow(PlainCodec):
    """Blocks the loop for a long time while it decodes."""

    def decode(self, encoded: Any) -> Any:
        block(100)
        return super().decode(encoded)


@pytest.mark.parametrize("data", [1, LARGE], ids=["small", "large"])
@with_program(codec=Slow())
async def test_no_verdict_while_a_payload_is_decoded(executor: LauncherExecutor, agent: FlareAgent, data: Any) -> None:
    for _ in range(2):
        begun = now()
        np.testing.assert_equal((await executor.execute(Task("any", data))).data, data)
        assert now() - begun > 199.9, "both sides were busy for longer than they may be silent"
    assert agent.closed is None


# metrics and progress


async def test_metrics_and_progress_come_in_order() -> None:
    seen: list[Any] = []

    async def work(agent: FlareAgent) -> None:
        async for _ in agent:
            for step in range(3):
                await agent.log({"loss": step / 2}, step=step)
                agent.progress(step, 3, "epochs")
            await agent.submit_result(None)

    async with serving(
        work=work,
        on_metrics=lambda values, step: seen.append((values, step)),
        on_progress=lambda done, total, note: seen.append((done, total, note)),
    ) as (executor, _, _):
        await executor.execute(Task("any"))
        assert seen == [
            item for step in range(3) for item in (({"loss": step / 2}, step), (float(step), 3.0, "epochs"))
        ]


class HalfCodec(PlainCodec):
    """A codec that cannot decode metrics."""

    def decode_metrics(self, data: bytes) -> Any:
        raise ValueError("no such class")


def _broken(*_: Any) -> None:
    raise RuntimeError("the dashboard is gone")


@pytest.mark.parametrize(
    ("broken", "reason", "count"),
    [
        pytest.param({"on_metrics": _broken, "on_progress": _broken}, "the dashboard is gone", 10, id="callbacks"),
        pytest.param({"codec": HalfCodec()}, "no such class", 5, id="codec"),
    ],
)
async def test_metrics_that_cannot_be_handled_do_not_end_the_exchange(
    broken: dict[str, Any], reason: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(agent: FlareAgent) -> None:
        async for _ in agent:
            for _ in range(5):
                await agent.log({"loss": 1})
                agent.progress(1)
            await agent.submit_result("fine")

    async with serving(work=work, program=AgentOptions(metric_queue=1), **broken) as (executor, _, _):
        assert (await executor.execute(Task("any"))).data == "fine"
    assert len(caplog.records) == count
    assert reason in caplog.text


# the end of the program


async def reach(phase: str, hand: Hand, task: msg.TaskOffer) -> None:
    """Does as a program until a phase of its task: offered, accepted or pulling."""
    if phase != "offered":
        hand.say(msg.TaskAnswer(task.task, True))
    if phase == "pulling":
        hand.say(result_of(task, (1, 100)))
        await hand.next(msg.TransferReport)


@with_pair()
async def test_a_program_that_aborts_fails_its_task(executor: LauncherExecutor, agent: FlareAgent) -> None:
    executing = asyncio.ensure_future(executor.execute(Task("any")))
    await agent.get_task()
    await agent.abort("out of memory")
    with pytest.raises(TaskAborted, match="out of memory"):
        await executing


@pytest.mark.parametrize("answer", [msg.EndOfTasks("tired"), None])
@pytest.mark.parametrize("phase", ["offered", "accepted", "pulling"])
@with_executor()
async def test_a_program_that_ends_or_vanishes_before_its_result_is_gone(
    executor: LauncherExecutor, hand: Hand, phase: str, answer: Any
) -> None:
    executing, task = await begin_task(executor, hand)
    await reach(phase, hand, task)
    if answer is not None:
        hand.say(answer)
    hand.pipe.close()
    with pytest.raises(TransferFailed if phase == "pulling" else PeerGone):
        await executing


@with_executor()
async def test_a_result_that_came_before_the_end_counts(executor: LauncherExecutor, hand: Hand) -> None:
    executing, task = await begin_task(executor, hand)
    hand.say(result_of(task), msg.EndOfTasks("done"))
    hand.pipe.close()
    assert (await executing).ok


# abort by the site


PHASES = ["attaching", "offered", "accepted", "pulling"]


async def in_phase(
    phase: str, executor: LauncherExecutor, **options: Any
) -> tuple[asyncio.Task[TaskResult], Hand | None]:
    """An execution that has come to a phase, and stays there."""
    hand = None if phase == "attaching" else await program_by_hand(executor)
    if hand is None:
        executor.bootstrap()
    executing = asyncio.ensure_future(executor.execute(Task("any"), **options))
    await idle()
    if hand is not None:
        await reach(phase, hand, await hand.next(msg.TaskOffer))
    await idle()
    assert not executing.done()
    return executing, hand


async def works_again(executor: LauncherExecutor) -> None:
    """A program that attaches anew is served."""
    agent, _ = await attach(executor)
    working = asyncio.ensure_future(echo(agent))
    assert (await executor.execute(Task("any", "again"))).data == "again"
    await agent.close()
    await working


@pytest.mark.parametrize("how", ["call", "event", "cancel"])
@pytest.mark.parametrize("phase", PHASES)
@with_no_program()
async def test_an_abort_ends_a_task_wherever_it_is(executor: LauncherExecutor, phase: str, how: str) -> None:
    event = asyncio.Event()
    executing, hand = await in_phase(phase, executor, abort=event)
    begun = now()
    if how == "call":
        executor.abort("enough")
    elif how == "event":
        event.set()
    else:
        executing.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancel" else TaskAborted) as caught:
        await executing
    assert now() - begun < 1
    if how == "call":
        assert isinstance(caught.value, TaskAborted)
        assert caught.value.reason == "enough"
    if hand is not None:
        await hand.gone.wait()
        reason = {"call": "enough", "event": "the site aborted it", "cancel": "the site stops"}[how]
        assert hand.all(msg.Abort) == [msg.Abort(reason)]
        with pytest.raises(LaunchFailed, match=r"executor.bootstrap\(\) writes the file"):
            await executor.execute(Task("any"))
        await hand.close()
    await works_again(executor)


@with_executor()
async def test_an_event_ends_a_task_that_waits_for_its_turn(executor: LauncherExecutor, hand: Hand) -> None:
    event = asyncio.Event()
    current, task = await begin_task(executor, hand)
    waiting = asyncio.ensure_future(executor.execute(Task("any"), abort=event))
    later = asyncio.ensure_future(executor.execute(Task("any", "later")))
    await idle()
    event.set()
    with pytest.raises(TaskAborted, match="the site aborted it"):
        await waiting
    assert not current.done()
    hand.say(result_of(task))
    await current
    task = await hand.next(msg.TaskOffer, 1)
    hand.say(result_of(task, result="r2"))
    await later


@with_executor()
async def test_a_task_that_is_cancelled_while_it_waits_for_its_turn_gives_it_up(
    executor: LauncherExecutor, hand: Hand
) -> None:
    current, task = await begin_task(executor, hand)
    for abort in (None, asyncio.Event()):
        waiting = asyncio.ensure_future(executor.execute(Task("any"), abort=abort))
        await idle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    hand.say(result_of(task))
    await current
    assert not executor._turn.locked()


@with_pair()
async def test_an_abort_between_tasks_stops_the_program(executor: LauncherExecutor, agent: FlareAgent) -> None:
    executor.abort("enough")
    with pytest.raises(AgentClosed, match=r"aborted \(enough\)"):
        await agent.get_task()
    with pytest.raises(PeerGone, match="enough"):
        await executor.execute(Task("any"))
    await agent.close()
    await works_again(executor)


@with_no_program()
async def test_an_abort_before_anything_was_attached_changes_nothing(executor: LauncherExecutor) -> None:
    executor.abort("nobody is there")
    await works_again(executor)


@pytest.mark.parametrize("data", [1, LARGE], ids=["small", "large"])
@with_no_program()
async def test_cancelling_execute_at_any_moment_leaves_both_ends_consistent(
    executor: LauncherExecutor, data: Any
) -> None:
    done = False
    turns = 0
    while not done:
        agent, _ = await attach(executor)
        working = asyncio.ensure_future(echo(agent))
        executing = asyncio.ensure_future(executor.execute(Task("any", data)))
        for _ in range(turns):
            await asyncio.sleep(0)
        done = not executing.cancel()
        begun = now()
        await asyncio.wait({executing})
        assert now() - begun < 1
        if turns == 0 or not executing.cancelled():
            assert (await executor.execute(Task("any", "next"))).data == "next", "nothing had begun, or all is done"
        else:
            await asyncio.wait({working})
            error = working.exception()
            assert isinstance(error, (AgentClosed, ResultNotDelivered)), "the program was asked to stop"
            if isinstance(error, AgentClosed):
                assert error.reason == "aborted"
        await agent.close()
        await asyncio.wait({working})
        turns += 1
    assert turns > 5
    await works_again(executor)


@pytest.mark.parametrize("data", [1, LARGE], ids=["small", "large"])
@with_no_program()
async def test_cancelling_submit_at_any_moment_leaves_both_ends_consistent(
    executor: LauncherExecutor, data: Any
) -> None:
    done = False
    turns = 0
    while not done:
        agent, _ = await attach(executor)
        executing = asyncio.ensure_future(executor.execute(Task("any")))
        await agent.get_task()
        submitting = asyncio.ensure_future(agent.submit_result(data))
        for _ in range(turns):
            await asyncio.sleep(0)
        done = not submitting.cancel()
        await asyncio.wait({submitting})
        if turns == 0:  # it had not begun: the task is still to be answered
            with pytest.raises(CallStateError):
                await agent.get_task()
            await agent.submit_result(data)
        begun = now()
        await asyncio.wait({executing})
        assert now() - begun < 1, "the site does not wait for what will never come"
        error = executing.exception()
        if error is None:
            np.testing.assert_equal(executing.result().data, data)
            following = asyncio.ensure_future(executor.execute(Task("any", "next")))
            task = await agent.get_task()
            assert task is not None
            assert task.data == "next"
            await agent.submit_result("fine")
            assert (await following).data == "fine"
        else:
            assert isinstance(error, TransferFailed)
            with pytest.raises(AgentClosed, match="aborted"):
                await agent.get_task()
        await agent.close()
        await idle()
        turns += 1
    assert turns > 3


# programs that attach (3.1.1)


@with_no_program()
async def test_a_program_that_does_not_attach_in_time_fails_the_task(executor: LauncherExecutor) -> None:
    executor.bootstrap()
    begun = now()
    with pytest.raises(LaunchFailed, match="no program has attached within 60 s"):
        await executor.execute(Task("any"))
    assert now() - begun == pytest.approx(60, abs=0.1)
    await works_again(executor)


@with_no_program()
async def test_a_task_may_wait_for_the_program_to_attach(executor: LauncherExecutor) -> None:
    executor.bootstrap()
    executing = asyncio.ensure_future(executor.execute(Task("any", 5)))
    await asyncio.sleep(30)
    agent, _ = await attach(executor)  # with a second file: the first one was lost
    working = asyncio.ensure_future(echo(agent))
    assert (await executing).data == 5
    await agent.close()
    await working


@with_no_program()
async def test_a_program_that_came_and_went_is_gone(executor: LauncherExecutor) -> None:
    agent, _ = await attach(executor)
    await agent.close()
    await idle()
    with pytest.raises(PeerGone, match="the program is done"):
        await executor.execute(Task("any"))
    with pytest.raises(LaunchFailed):
        await executor.execute(Task("any"))
    await works_again(executor)


@with_pair()
async def test_only_one_program_is_attached_at_a_time(executor: LauncherExecutor, agent: FlareAgent) -> None:
    with pytest.raises(RuntimeError, match="a program is attached"):
        executor.bootstrap()
    await agent.close()
    await idle()
    await works_again(executor)


async def test_a_program_that_replaces_another_leaves_nothing_of_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with LauncherExecutor(None, ANY) as executor:
        for _ in range(3):
            agent, _ = await attach(executor)
            await agent.close()
            end = executor._connection
            assert end is not None
            await end.until(lambda end=end: end.machine.end)  # type: ignore[misc]
        await works_again(executor)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_executor_that_is_not_open_cannot_invite() -> None:
    executor = LauncherExecutor(None, ANY)
    with pytest.raises(RuntimeError, match="open executor"):
        executor.bootstrap()
    await executor.finalize()
    with pytest.raises(BadTask, match="the executor is closed"):
        await executor.execute(Task("any"))


# the end of the executor


@pytest.mark.parametrize("transport", ["unix", "memory"])
async def test_the_end_of_the_executor_ends_the_program_quietly(transport: Literal["unix", "memory"]) -> None:
    async with attached(transport=transport) as (executor, agent, _):
        working = asyncio.ensure_future(echo(agent))
        await executor.execute(Task("any", 1))
        await executor.finalize()
        await executor.finalize()
        assert len(await working) == 1
        assert agent.closed is not None
        assert (agent.closed.reason, agent.closed.detail) == ("ended", "the job is ending")
        with pytest.raises(BadTask, match="the executor is closed"):
            await executor.execute(Task("any"))
        with pytest.raises(RuntimeError, match="make a new one"):
            await executor.initialize()


@with_pair()
async def test_end_finishes_the_current_task_and_takes_no_other(executor: LauncherExecutor, agent: FlareAgent) -> None:
    executing = asyncio.ensure_future(executor.execute(Task("any")))
    await agent.get_task()
    ending = asyncio.ensure_future(executor.end())
    await idle()
    with pytest.raises(BadTask, match="the executor is ending"):
        await executor.execute(Task("any"))
    await agent.submit_result("last")
    assert (await executing).data == "last"
    await ending
    with pytest.raises(AgentClosed, match="ended"):
        await agent.get_task()


@with_pair()
async def test_end_does_not_take_a_result_from_its_receivers(executor: LauncherExecutor, agent: FlareAgent) -> None:
    offered, submitting = await offer_result(executor, agent, ["server"], LARGE)
    await executor.end()
    await asyncio.sleep(10)
    assert np.array_equal((await offered.pull("server")).data, LARGE)
    await submitting


@with_pair()
async def test_closing_aborts_the_current_task_and_those_that_wait(
    executor: LauncherExecutor, agent: FlareAgent
) -> None:
    executing = [asyncio.ensure_future(executor.execute(Task("any"))) for _ in range(3)]
    await agent.get_task()
    await executor.finalize()
    found = [await asyncio.gather(one, return_exceptions=True) for one in executing]
    assert [type(error) for (error,) in found] == [TaskAborted, BadTask, BadTask]
    with pytest.raises(AgentClosed, match="aborted"):
        await agent.get_task()


@on_virtual_time
async def test_an_error_that_leaves_the_block_aborts_the_program() -> None:
    agents: list[FlareAgent] = []
    with pytest.raises(ZeroDivisionError):
        async with LauncherExecutor(None, ANY, transport="memory") as executor:
            agent, _ = await attach(executor)
            agents.append(agent)
            _ = 1 / 0
    with pytest.raises(AgentClosed, match=r"aborted.*division by zero"):
        await agents[0].get_task()
    await agents[0].close()


def test_options_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="ExecutorOptions"):
        LauncherExecutor(None, AgentOptions())  # type: ignore[arg-type]


@with_pair()
async def test_the_repr_of_an_executor_names_its_state(executor: LauncherExecutor, agent: FlareAgent) -> None:
    assert "exchange" not in repr(executor)
    assert executor.status().state is ProgramState.NOT_RUNNING
    executing = asyncio.ensure_future(executor.execute(Task("any")))
    await agent.get_task()
    await idle()
    assert repr(executor) == "<LauncherExecutor open, program not running, exchange accepted>"
    await agent.submit_result(None)
    await executing
    assert repr(executor) == "<LauncherExecutor open, program not running, exchange settled>"


# programs that serve one task (3.2)


@with_pair(program=AgentOptions(launch_once=False))
async def test_an_agent_that_serves_one_task_ends_after_its_result_has_settled(
    executor: LauncherExecutor, agent: FlareAgent
) -> None:
    executing = asyncio.ensure_future(executor.execute(Task("any")))
    await agent.get_task()
    submitting = asyncio.ensure_future(agent.submit_result(LARGE))
    result = await executing
    await submitting
    assert np.array_equal(result.data, LARGE)
    with pytest.raises(AgentClosed, match="ended"):
        await agent.get_task()
    with pytest.raises(TaskRejected, match="takes no more tasks"):
        await executor.execute(Task("any"))


# heartbeats


@on_virtual_time
async def test_both_sides_send_heartbeats_as_often_as_the_other_needs() -> None:
    async with LauncherExecutor(
        None, ExecutorOptions(other_tasks=("*",), heartbeat_interval=0.1, heartbeat_timeout=1), transport="memory"
    ) as executor:
        agent = FlareAgent(executor.bootstrap(), AgentOptions(heartbeat_interval=5, heartbeat_timeout=60))
        async with agent:
            running = asyncio.create_task(executor.execute(Task("any", 1)))
            assert await agent.get_task() is not None
            await asyncio.sleep(30)  # the site would have given up after 1 s
            await agent.submit_result(2)
            assert (await running).data == 2


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_launcher_that_cannot_be_initialized_leaves_nothing(transport: Literal["unix", "tcp"]) -> None:
    class Broken(SubprocessLauncher):
        async def initialize(self) -> None:
            raise OSError("no launcher today")

    before = len(os.listdir("/proc/self/fd"))
    executor = LauncherExecutor(Broken(["true"]), transport=transport)
    with pytest.raises(OSError, match="no launcher today"):
        async with executor:
            pass
    assert len(os.listdir("/proc/self/fd")) == before
    await executor.finalize()
    assert repr(executor) == "<LauncherExecutor closed, program not running>"


async def test_a_bootstrap_file_that_cannot_be_written_fails_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    async with LauncherExecutor(SubprocessLauncher(["true"]), ANY) as executor:
        monkeypatch.setattr("dfm_async.exchange.handshake.write_bootstrap", full)
        with pytest.raises(LaunchFailed, match="No space left"):
            await executor.execute(Task("any"))
