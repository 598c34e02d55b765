"""Tasks of an agent whose site is played by hand: the rows of the table in 3.2 about tasks, and rule 3.1.4."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import AgentClosed, CallStateError
from dfm_async.exchange import Encoded, FlareAgent, PlainCodec, Task
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.agent import FAILED
from dfm_async.exchange.memory_pipe import memory_pair
from tests.exchange.agents import LARGE_RESULT as LARGE
from tests.exchange.agents import accepting, agent_by_hand, delivered, offer, reason_of, stop, with_agent
from tests.exchange.rig import Hand, idle, now, on_virtual_time

# get_task


@with_agent()
async def test_a_task_arrives_with_its_data_and_rounds(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1, {"x": [1, 2]}, round=3, total_rounds=9))
    task = await agent.get_task()
    assert task == Task("train", {"x": [1, 2]}, id="t1", round=3, total_rounds=9)
    assert await hand.next(msg.TaskAnswer) == msg.TaskAnswer("t1", True)


@with_agent()
async def test_get_task_returns_a_queued_task_or_none_after_the_timeout(agent: FlareAgent, hand: Hand) -> None:
    begun = now()
    assert await agent.get_task(7) is None
    assert now() - begun == pytest.approx(7)
    assert await agent.get_task(0) is None
    hand.say(offer())
    await hand.next(msg.TaskAnswer)
    assert await agent.get_task(0) is not None


@with_agent()
async def test_get_task_checks_closed_then_pending_then_the_timeout(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer())
    await agent.get_task()
    for timeout in (0, 5, None):
        with pytest.raises(CallStateError, match="train t1 is not answered"):
            await agent.get_task(timeout)
    hand.say(msg.Abort("enough"))
    await idle()
    assert await reason_of(agent) == ("aborted", "enough")


@pytest.mark.parametrize(
    ("how", "reason", "detail", "iterating"),
    [
        ("end", "ended", "done", StopAsyncIteration),
        ("abort", "aborted", "stop", AgentClosed),
        ("vanish", "peer gone", "the connection was closed", AgentClosed),
        ("close", "closed here", "", StopAsyncIteration),
    ],
)
@with_agent()
async def test_every_end_ends_the_waiting_calls_with_its_reason(
    agent: FlareAgent, hand: Hand, how: str, reason: str, detail: str, iterating: type[Exception]
) -> None:
    waiting, following = asyncio.ensure_future(agent.get_task()), asyncio.ensure_future(agent.__anext__())
    await idle()
    await stop(how, agent, hand)
    with pytest.raises(AgentClosed) as caught:
        await waiting
    assert (caught.value.reason, caught.value.detail) == (reason, detail)
    with pytest.raises(iterating):
        await following
    assert await reason_of(agent) == (reason, detail)


@with_agent()
async def test_a_site_that_ends_and_closes_has_ended_and_is_not_gone(agent: FlareAgent, hand: Hand) -> None:
    """Both may come before a waiting call was notified of the first."""
    waiting = asyncio.ensure_future(agent.get_task())
    await idle()
    hand.say(msg.EndOfTasks("done"))
    hand.pipe.close()
    with pytest.raises(AgentClosed, match="ended"):
        await waiting


@with_agent()
async def test_a_site_that_ends_and_vanishes_before_the_result_is_gone(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(), msg.EndOfTasks("done"))
    await agent.get_task()
    await hand.close()
    await idle()
    with pytest.raises(AgentClosed, match="peer gone"):
        await agent.submit_result(1)
    assert (await reason_of(agent))[0] == "peer gone"


@with_agent()
async def test_a_get_task_that_was_cancelled_takes_nothing(agent: FlareAgent, hand: Hand) -> None:
    for turns in range(8):
        waiting = asyncio.ensure_future(agent.get_task())
        await idle()
        hand.say(offer(turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await idle()
        task = await agent.get_task(0) if waiting.cancelled() else waiting.result()
        assert cancelled or not waiting.cancelled()
        assert task is not None
        assert task.id == f"t{turns}"
        await delivered(agent, hand, 1, turns)


@with_agent()
async def test_of_two_waiting_calls_one_gets_the_task(agent: FlareAgent, hand: Hand) -> None:
    waiting = [asyncio.ensure_future(agent.get_task()) for _ in range(2)]
    await idle()
    hand.say(offer())
    await asyncio.wait(waiting)
    found = [task.exception() or task.result() for task in waiting]
    assert sorted(type(one).__name__ for one in found) == ["CallStateError", "Task"]


@with_agent()
async def test_every_caller_gets_an_exception_of_its_own(agent: FlareAgent, hand: Hand) -> None:
    """One that is raised again and again keeps the frames of all who got it."""
    hand.say(msg.Abort("stop"))
    await idle()
    first, second = await asyncio.gather(agent.get_task(), agent.get_task(), return_exceptions=True)
    assert isinstance(first, AgentClosed)
    assert isinstance(second, AgentClosed)
    assert first is not second


# what is queued, and the end (3.1.4)


@with_agent()
async def test_queued_tasks_are_delivered_before_end_takes_effect(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1), offer(2), msg.EndOfTasks("done"))
    for number in (1, 2):
        task = await agent.get_task(0) if number == 2 else await agent.get_task()
        assert task is not None
        assert task.id == f"t{number}"
        assert agent.closed is None
        await delivered(agent, hand, number, number - 1)
    assert agent.closed is not None
    assert await reason_of(agent) == ("ended", "done")


@with_agent()
async def test_a_task_in_transfer_is_delivered_before_end_takes_effect(agent: FlareAgent, hand: Hand) -> None:
    encoded = PlainCodec().encode(LARGE)
    ((number, part),) = encoded.parts.items()
    hand.say(offer(1, data=encoded.data, parts=[(number, len(part))]), msg.EndOfTasks("done"))
    asked = await hand.next(msg.TransferReport)
    waiting = asyncio.ensure_future(agent.get_task())
    await idle()
    assert not waiting.done()
    assert agent.closed is None
    hand.pipe.send(msg.Chunk("t1", number, asked.receiver, 0), part)
    task = await waiting
    assert task is not None
    assert np.array_equal(task.data, LARGE)
    await delivered(agent, hand)
    assert await reason_of(agent) == ("ended", "done")


@with_agent()
async def test_an_end_while_a_task_is_coming_that_never_comes_takes_effect_then(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1, parts=[(1, 100)]), msg.EndOfTasks("done"))
    await hand.next(msg.TransferReport)
    assert agent.closed is None
    hand.say(msg.Withdrawn("t1", "it was a mistake"))
    with pytest.raises(AgentClosed, match="ended"):
        await agent.get_task()
    answer = await hand.next(msg.TaskAnswer)
    assert not answer.accepted
    assert "it was a mistake" in answer.reason


@with_agent()
async def test_abort_drops_what_is_queued(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1), offer(2), msg.Abort("stop"))
    await idle()
    assert await reason_of(agent) == ("aborted", "stop")


@with_agent()
async def test_a_task_that_comes_after_the_end_is_refused(hand: Hand) -> None:
    hand.say(msg.EndOfTasks(), offer())
    answer = await hand.next(msg.TaskAnswer)
    assert (answer.accepted, answer.reason) == (False, "the program takes no more tasks")


@with_agent()
async def test_a_task_more_than_the_queue_holds_is_refused(hand: Hand) -> None:
    hand.say(*(offer(number) for number in range(17)))
    last = await hand.next(msg.TaskAnswer, 16)
    assert (last.task, last.accepted) == ("t16", False)
    assert all(answer.accepted for answer in hand.all(msg.TaskAnswer)[:16])


# messages that come twice, or too late


@with_agent()
async def test_a_task_that_comes_twice_is_answered_twice_and_given_once(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1, 5), offer(1, 5))
    await agent.get_task()
    hand.say(offer(1, 5))
    assert [await hand.next(msg.TaskAnswer, number) for number in range(3)] == [msg.TaskAnswer("t1", True)] * 3
    await delivered(agent, hand)
    assert await agent.get_task(0) is None


@with_agent()
async def test_a_repeated_answer_does_not_count_for_the_next_result(agent: FlareAgent, hand: Hand) -> None:
    """Replies must match session, task and request."""
    hand.say(offer(1), offer(2))
    await agent.get_task()
    answering = asyncio.ensure_future(agent.submit_result(1))
    old = await accepting(hand)
    await answering
    await agent.get_task()
    answering = asyncio.ensure_future(agent.submit_result(2))
    await hand.next(msg.ResultOffer, 1)
    hand.say(msg.ResultAnswer(old.task, old.result, True), msg.ResultAnswer("t2", "another", True))
    await idle()
    assert not answering.done()
    await accepting(hand, 1)
    await answering


# run


async def test_a_handler_that_is_not_async_runs_in_a_thread() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(), msg.EndOfTasks())
        running = asyncio.ensure_future(agent.run(lambda task: threading.current_thread().name))
        found = await accepting(hand)
        await running
        assert PlainCodec().decode(Encoded(found.data)) != threading.current_thread().name


@pytest.mark.parametrize("error", [ValueError("bad data"), StopIteration(3), KeyError("x"), TimeoutError("slow")])
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_what_a_handler_raises_is_the_answer_and_the_next_task_is_taken(kind: str, error: Exception) -> None:
    def sync(task: Task) -> Any:
        if task.id == "t1":
            raise error
        return "fine"

    async def coroutine(task: Task) -> Any:
        return sync(task)

    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1), offer(2), msg.EndOfTasks())
        running = asyncio.ensure_future(agent.run(sync if kind == "thread" else coroutine))
        first = await accepting(hand)
        assert (first.task, first.rc) == ("t1", FAILED)
        assert type(error).__name__ in first.reason
        second = await accepting(hand, 1)
        assert (second.task, second.rc) == ("t2", "OK")
        await running


async def test_run_goes_on_after_a_result_that_could_not_be_sent_or_was_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results: dict[str, Any] = {"t1": object(), "t2": 2, "t3": 3}

    async def handler(task: Task) -> Any:
        return results[task.id]

    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1), offer(2), offer(3), msg.EndOfTasks())
        running = asyncio.ensure_future(agent.run(handler))
        assert (await accepting(hand)).rc == FAILED
        refused = await hand.next(msg.ResultOffer, 1)
        hand.say(msg.ResultAnswer("t2", refused.result, False, "it has no metrics"))
        assert (await accepting(hand, 2)).task == "t3"
        await running
    assert "it has no metrics" in caplog.text


async def test_run_raises_when_the_site_aborts() -> None:
    async with agent_by_hand() as (agent, hand):
        begun = asyncio.Event()

        async def forever(task: Task) -> None:
            begun.set()
            await finished.wait()

        finished = asyncio.Event()
        hand.say(offer())
        running = asyncio.ensure_future(agent.run(forever))
        await begun.wait()
        hand.say(msg.Abort("stop"))
        finished.set()
        with pytest.raises(AgentClosed, match="aborted"):
            await running


# the end


@with_agent()
async def test_closing_sends_end_once(agent: FlareAgent, hand: Hand) -> None:
    await asyncio.gather(agent.close(), agent.close())
    await agent.close()
    await hand.gone.wait()
    assert len(hand.all(msg.EndOfTasks)) == 1
    for call in (agent.submit_result(1), agent.get_task(), agent.log({})):
        with pytest.raises(AgentClosed, match="closed here"):
            await call
    agent.progress(1)


@with_agent()
async def test_an_agent_that_aborts_sends_the_reason(agent: FlareAgent, hand: Hand) -> None:
    await agent.abort("out of memory")
    assert await hand.next(msg.Abort) == msg.Abort("out of memory")
    assert await reason_of(agent) == ("closed here", "out of memory")
    await agent.close()
    assert hand.all(msg.EndOfTasks) == []


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ZeroDivisionError("by zero"), [msg.Abort("ZeroDivisionError: by zero")]),
        (AgentClosed("ended"), []),
    ],
)
@on_virtual_time
async def test_an_error_that_leaves_the_block_aborts_unless_it_is_the_end(
    error: Exception, reported: list[msg.Message]
) -> None:
    ours, theirs = memory_pair()
    hand = Hand(theirs)
    with pytest.raises(type(error)):
        async with FlareAgent(pipe=lambda: ours):
            raise error
    await hand.gone.wait()
    assert hand.all(msg.Abort) == reported
    await hand.close()


@on_virtual_time
async def test_before_the_start_and_twice_are_errors_of_the_caller() -> None:
    ours, theirs = memory_pair()
    agent = FlareAgent(pipe=lambda: ours)
    for call in (agent.get_task(), agent.submit_result(1), agent.log({})):
        with pytest.raises(CallStateError, match="use 'async with'"):
            await call
    with pytest.raises(CallStateError):
        agent.progress(1)
    async with agent:
        with pytest.raises(CallStateError, match="started already"):
            await agent.start()
    hand = Hand(theirs)
    await hand.close()


@on_virtual_time
async def test_an_agent_that_was_closed_before_its_start_does_not_start() -> None:
    agent = FlareAgent(pipe=lambda: memory_pair()[0])
    await agent.close()
    with pytest.raises(CallStateError):
        await agent.start()
    with pytest.raises(AgentClosed, match="closed here"):
        await agent.get_task()


def test_options_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="AgentOptions"):
        FlareAgent(options={"heartbeat_interval": 3})  # type: ignore[arg-type]


@with_agent()
async def test_the_repr_of_an_agent_names_its_state(agent: FlareAgent, hand: Hand) -> None:
    assert repr(agent) == "<FlareAgent of a site: up>"
    hand.say(offer())
    await agent.get_task()
    assert "working on train t1" in repr(agent)
    hand.say(msg.Abort("stop"))
    await idle()
    assert "aborted (stop)" in repr(agent)
