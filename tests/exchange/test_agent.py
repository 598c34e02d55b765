"""The program's side against a site that is played by hand: every row of the table in 3.2, and rules 3.1.2 to 3.1.4."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import (
    AgentClosed,
    CallStateError,
    ConversionError,
    EncodingError,
    ExchangeError,
    HandshakeRefused,
    ResultNotDelivered,
)
from dfm_async.exchange import AgentOptions, Encoded, FlareAgent, PlainCodec, Task
from dfm_async.exchange import messages as msg
from dfm_async.exchange.agent import FAILED
from dfm_async.exchange.bootstrap import VARIABLE
from dfm_async.exchange.pipes.memory import MemoryPipe, memory_pair
from tests.exchange.rig import CountingCodec, Hand, agent_by_hand, offer, on_virtual_time
from tests.exchange.virtual import idle

LARGE = np.arange(40_000, dtype=np.int64)
"""An array that does not travel in the message."""


def now() -> float:
    return asyncio.get_running_loop().time()


async def accepting(hand: Hand, number: int = 0) -> msg.ResultOffer:
    """Waits for a result, and accepts it."""
    found = await hand.next(msg.ResultOffer, number)
    hand.say(msg.ResultAnswer(found.task, found.result, True))
    return found


def report(found: msg.ResultOffer, part: int = 0, state: str = "completed", **rest: Any) -> msg.Report:
    """What a receiver says about a large part."""
    number, size = found.parts[part]
    done = size if state == "completed" else 0
    return msg.Report(
        found.result, number, **{"receiver": "site", "sequence": 1, "bytes_done": done, "state": state, **rest}
    )


async def reason_of(agent: FlareAgent) -> tuple[str, str]:
    with pytest.raises(AgentClosed) as caught:
        await agent.get_task(0)
    return caught.value.reason, caught.value.detail


# get_task


@on_virtual_time
async def test_a_task_comes_with_everything_that_the_site_said() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1, {"x": [1, 2]}, round=3, total_rounds=9))
        task = await agent.get_task()
        assert task == Task("train", {"x": [1, 2]}, id="t1", round=3, total_rounds=9)
        assert await hand.next(msg.TaskAnswer) == msg.TaskAnswer("t1", True)


@on_virtual_time
async def test_get_task_returns_none_after_the_timeout() -> None:
    async with agent_by_hand() as (agent, _):
        begun = now()
        assert await agent.get_task(7) is None
        assert now() - begun == pytest.approx(7)
        assert await agent.get_task(0) is None


@on_virtual_time
async def test_a_queued_task_is_returned_even_with_timeout_0() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await hand.next(msg.TaskAnswer)
        task = await agent.get_task(0)
        assert task is not None


@on_virtual_time
async def test_closed_comes_before_a_task_that_is_pending() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        with pytest.raises(CallStateError, match="train t1 is not answered"):
            await agent.get_task(0)
        hand.say(msg.Abort("enough"))
        await idle()
        assert await reason_of(agent) == ("aborted", "enough")


@on_virtual_time
async def test_a_task_that_is_pending_comes_before_the_timeout() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        for timeout in (0, 5, None):
            with pytest.raises(CallStateError):
                await agent.get_task(timeout)


@on_virtual_time
async def test_the_four_reasons_for_which_there_are_no_more_tasks() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(msg.End("all rounds are done"))
        await idle()
        assert await reason_of(agent) == ("ended", "all rounds are done")
    async with agent_by_hand() as (agent, hand):
        hand.say(msg.Abort("wrong model"))
        await idle()
        assert await reason_of(agent) == ("aborted", "wrong model")
    async with agent_by_hand() as (agent, hand):
        await hand.close()
        await idle()
        assert await reason_of(agent) == ("peer gone", "the connection was closed")
    async with agent_by_hand() as (agent, _):
        await agent.close()
        assert (await reason_of(agent))[0] == "closed here"


@pytest.mark.parametrize("message", [msg.End("done"), msg.Abort("stop"), None])
@on_virtual_time
async def test_a_waiting_get_task_is_ended_by_the_end(message: msg.Message | None) -> None:
    async with agent_by_hand() as (agent, hand):
        waiting = asyncio.ensure_future(agent.get_task())
        await idle()
        if message is None:
            await hand.close()
        else:
            hand.say(message)
        with pytest.raises(AgentClosed):
            await waiting


@on_virtual_time
async def test_a_site_that_ends_and_closes_has_ended_and_is_not_gone() -> None:
    """Both may come before whoever waits for a task has been told of the first."""
    async with agent_by_hand() as (agent, hand):
        waiting = asyncio.ensure_future(agent.get_task())
        await idle()
        hand.say(msg.End("done"))
        hand.pipe.close()
        with pytest.raises(AgentClosed, match="ended"):
            await waiting


@on_virtual_time
async def test_a_site_that_ends_and_vanishes_before_the_result_is_gone() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(), msg.End("done"))
        await agent.get_task()
        await hand.close()
        await idle()
        with pytest.raises(AgentClosed, match="peer gone"):
            await agent.submit_result(1)
        assert (await reason_of(agent))[0] == "peer gone"


@on_virtual_time
async def test_a_get_task_that_was_cancelled_takes_nothing() -> None:
    async with agent_by_hand() as (agent, hand):
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
            answering = asyncio.ensure_future(agent.submit_result(1))
            await accepting(hand, turns)
            await answering


@on_virtual_time
async def test_of_two_that_wait_for_a_task_one_gets_it_and_the_other_is_told() -> None:
    async with agent_by_hand() as (agent, hand):
        waiting = [asyncio.ensure_future(agent.get_task()) for _ in range(2)]
        await idle()
        hand.say(offer())
        await asyncio.wait(waiting)
        found = [task.exception() or task.result() for task in waiting]
        assert sorted(type(one).__name__ for one in found) == ["CallStateError", "Task"]


@on_virtual_time
async def test_every_caller_gets_an_error_of_its_own() -> None:
    """One that is raised again and again keeps the frames of all who got it."""
    async with agent_by_hand() as (agent, hand):
        hand.say(msg.Abort("stop"))
        await idle()
        errors = []
        for _ in range(2):
            with pytest.raises(AgentClosed) as caught:
                await agent.get_task()
            errors.append(caught.value)
        assert errors[0] is not errors[1]


# async for


@on_virtual_time
async def test_iterating_ends_with_end() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1), offer(2), msg.End())
        seen = []

        async def serve() -> None:
            async for task in agent:
                seen.append(task.id)
                await agent.submit_result(None)

        serving = asyncio.ensure_future(serve())
        await accepting(hand)
        await accepting(hand, 1)
        await serving
        assert seen == ["t1", "t2"]


@pytest.mark.parametrize(("message", "reason"), [(msg.Abort("stop"), "aborted"), (None, "peer gone")])
@on_virtual_time
async def test_iterating_raises_on_abort_and_when_the_site_is_gone(message: msg.Message | None, reason: str) -> None:
    async with agent_by_hand() as (agent, hand):
        waiting = asyncio.ensure_future(agent.__anext__())
        await idle()
        if message is None:
            await hand.close()
        else:
            hand.say(message)
        with pytest.raises(AgentClosed) as caught:
            await waiting
        assert caught.value.reason == reason


@on_virtual_time
async def test_iterating_ends_when_the_agent_is_closed_here() -> None:
    async with agent_by_hand() as (agent, _):
        waiting = asyncio.ensure_future(agent.__anext__())
        await idle()
        await agent.close()
        with pytest.raises(StopAsyncIteration):
            await waiting


# what is queued, and the end (3.1.4)


@on_virtual_time
async def test_queued_tasks_are_delivered_before_end_takes_effect() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1), offer(2), msg.End("done"))
        for number in (1, 2):
            task = await agent.get_task(0) if number == 2 else await agent.get_task()
            assert task is not None
            assert task.id == f"t{number}"
            assert agent.closed is None
            answering = asyncio.ensure_future(agent.submit_result(number))
            await accepting(hand, number - 1)
            await answering
        assert agent.closed is not None
        assert await reason_of(agent) == ("ended", "done")


@on_virtual_time
async def test_a_task_whose_large_parts_are_still_coming_is_delivered_before_end_takes_effect() -> None:
    async with agent_by_hand() as (agent, hand):
        encoded = PlainCodec().encode(LARGE)
        ((number, part),) = encoded.parts.items()
        hand.say(offer(1, data=encoded.data, parts=[(number, len(part))]), msg.End("done"))
        asked = await hand.next(msg.Report)
        waiting = asyncio.ensure_future(agent.get_task())
        await idle()
        assert not waiting.done()
        assert agent.closed is None
        from dfm_async.exchange.transfers import _checksum

        hand.pipe.send(msg.Chunk("t1", number, asked.receiver, 0, _checksum(part)), part)
        task = await waiting
        assert task is not None
        assert np.array_equal(task.data, LARGE)
        answering = asyncio.ensure_future(agent.submit_result(1))
        await accepting(hand)
        await answering
        assert await reason_of(agent) == ("ended", "done")


@on_virtual_time
async def test_an_end_while_a_task_is_coming_that_never_comes_takes_effect_then() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1, parts=[(1, 100)]), msg.End("done"))
        await hand.next(msg.Report)
        assert agent.closed is None
        hand.say(msg.Withdrawn("t1", "it was a mistake"))
        with pytest.raises(AgentClosed, match="ended"):
            await agent.get_task()
        answer = await hand.next(msg.TaskAnswer)
        assert not answer.accepted
        assert "it was a mistake" in answer.reason


@on_virtual_time
async def test_abort_drops_what_is_queued() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1), offer(2), msg.Abort("stop"))
        await idle()
        assert await reason_of(agent) == ("aborted", "stop")


@on_virtual_time
async def test_a_task_that_comes_after_the_end_is_refused() -> None:
    async with agent_by_hand() as (_, hand):
        hand.say(msg.End(), offer())
        answer = await hand.next(msg.TaskAnswer)
        assert (answer.accepted, answer.reason) == (False, "the program takes no more tasks")


@on_virtual_time
async def test_a_task_more_than_the_queue_holds_is_refused() -> None:
    async with agent_by_hand() as (_, hand):
        hand.say(*(offer(number) for number in range(17)))
        last = await hand.next(msg.TaskAnswer, 16)
        assert (last.task, last.accepted) == ("t16", False)
        assert all(answer.accepted for answer in hand.all(msg.TaskAnswer)[:16])


# messages that come twice, or too late


@on_virtual_time
async def test_a_task_that_comes_twice_is_answered_twice_and_given_once() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1, 5), offer(1, 5))
        await agent.get_task()
        hand.say(offer(1, 5))
        assert [await hand.next(msg.TaskAnswer, number) for number in range(3)] == [msg.TaskAnswer("t1", True)] * 3
        answering = asyncio.ensure_future(agent.submit_result(1))
        await accepting(hand)
        await answering
        assert await agent.get_task(0) is None


@on_virtual_time
async def test_a_task_that_was_answered_may_be_given_again() -> None:
    """A site that did not like the result tries once more, with the same task."""
    async with agent_by_hand() as (agent, hand):
        for number in range(2):
            hand.say(offer())
            assert await agent.get_task() is not None
            answering = asyncio.ensure_future(agent.submit_result(number))
            await accepting(hand, number)
            await answering
        assert len({found.result for found in hand.all(msg.ResultOffer)}) == 2


@on_virtual_time
async def test_an_answer_that_comes_twice_is_not_taken_for_that_of_the_next_result() -> None:
    """Replies must match session, task and request."""
    async with agent_by_hand() as (agent, hand):
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


# submit_result


@on_virtual_time
async def test_a_result_carries_the_return_code_and_its_reason() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result([1], "BAD_DATA", reason="column 3"))
        found = await accepting(hand)
        assert (found.task, found.rc, found.reason, found.parts) == ("t1", "BAD_DATA", "column 3", [])
        await answering


@on_virtual_time
async def test_a_result_that_is_not_accepted_yet_is_not_submitted() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        await hand.next(msg.ResultOffer)
        await idle()
        assert not answering.done()
        with pytest.raises(CallStateError, match="still on its way"):
            await agent.get_task()
        with pytest.raises(CallStateError, match="there is no task"):
            await agent.submit_result(2)
        await accepting(hand)
        await answering


@on_virtual_time
async def test_without_a_task_there_is_nothing_to_submit() -> None:
    async with agent_by_hand() as (agent, hand):
        with pytest.raises(CallStateError, match="there is no task: call get_task first"):
            await agent.submit_result(1)
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        await accepting(hand)
        await answering
        with pytest.raises(CallStateError):
            await agent.submit_result(1)
        assert len(hand.all(msg.ResultOffer)) == 1


async def next_task_works(agent: FlareAgent, hand: Hand) -> None:
    """The task that failed is cleared: another one passes."""
    results = len(hand.all(msg.ResultOffer))
    hand.say(offer(99))
    task = await agent.get_task()
    assert task is not None
    assert task.id == "t99"
    answering = asyncio.ensure_future(agent.submit_result("fine"))
    found = await accepting(hand, results)
    assert (found.task, found.rc) == ("t99", "OK")
    await answering


@on_virtual_time
async def test_a_result_that_the_site_refuses_is_not_delivered() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        found = await hand.next(msg.ResultOffer)
        hand.say(msg.ResultAnswer("t1", found.result, False, "it has no metrics"))
        with pytest.raises(ResultNotDelivered) as caught:
            await answering
        assert (caught.value.task, caught.value.state, caught.value.reason) == ("t1", "rejected", "it has no metrics")
        await next_task_works(agent, hand)


@pytest.mark.parametrize(
    ("submit", "told"),
    [
        ({"result": object()}, "EncodingError"),
        ({"result": 1, "rc": ""}, "TypeError: rc must be a return code"),
        ({"result": 1, "rc": None}, "TypeError: rc must be a return code"),
    ],
)
@on_virtual_time
async def test_a_result_that_cannot_be_sent_is_told_to_the_site_and_clears_the_task(
    submit: dict[str, Any], told: str
) -> None:
    """Exactly one answer per task, whatever happens; the task is cleared on every path."""
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(**submit))
        found = await accepting(hand)
        assert (found.task, found.rc) == ("t1", FAILED)
        assert told in found.reason
        with pytest.raises(ConversionError, match="the result of task train t1") as caught:
            await answering
        assert caught.value.__cause__ is not None
        await next_task_works(agent, hand)
        assert len(hand.all(msg.ResultOffer)) == 2


@on_virtual_time
async def test_a_conversion_of_a_result_that_raises_is_told_to_the_site_and_clears_the_task() -> None:
    def convert(result: Any, task: Task) -> Any:
        if task.id == "t1":
            raise KeyError("weights")
        return result

    async with agent_by_hand(convert_result=convert) as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        found = await accepting(hand)
        assert found.rc == FAILED
        assert "could not be converted: KeyError: 'weights'" in found.reason
        assert PlainCodec().decode(Encoded(found.data)) is None  # the site can read it, so the reason is what it sees
        with pytest.raises(ConversionError) as caught:
            await answering
        assert isinstance(caught.value.__cause__, KeyError)
        await next_task_works(agent, hand)


@on_virtual_time
async def test_results_are_converted_with_their_task() -> None:
    async with agent_by_hand(convert_result=lambda result, task: [task.id, result]) as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        found = await accepting(hand)
        await answering
        assert found.data == PlainCodec().encode(["t1", 1]).data


@on_virtual_time
async def test_tasks_are_converted_before_they_are_given() -> None:
    def convert(task: Task) -> Task:
        return Task(task.name, task.data * 2, id=task.id)

    async with agent_by_hand(convert_task=convert) as (agent, hand):
        hand.say(offer(1, 21))
        task = await agent.get_task()
        assert task is not None
        assert task.data == 42


@on_virtual_time
async def test_a_task_whose_conversion_raises_is_refused_and_the_next_one_comes() -> None:
    """A conversion error leaves no current task and is told to the executor."""

    def convert(task: Task) -> Task:
        if task.data == "bad":
            raise ValueError("no such layer")
        return task

    async with agent_by_hand(convert_task=convert) as (agent, hand):
        hand.say(offer(1, "bad"))
        answer = await hand.next(msg.TaskAnswer)
        assert not answer.accepted
        assert "the task could not be converted: ValueError: no such layer" in answer.reason
        assert await agent.get_task(0) is None
        await next_task_works(agent, hand)


@on_virtual_time
async def test_a_task_whose_data_are_no_value_is_refused() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1, data=b"\xc1"))
        answer = await hand.next(msg.TaskAnswer)
        assert not answer.accepted
        await next_task_works(agent, hand)


@pytest.mark.parametrize("reason", [ValueError("text"), None, "no text: \udc80", 3])
@on_virtual_time
async def test_any_reason_reaches_the_site(reason: Any) -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(None, "ERROR", reason=reason))
        found = await accepting(hand)
        assert found.reason == str(reason).replace("\udc80", "?")
        await answering


# resends (3.1.3)


@pytest.mark.parametrize("resends", [0, 1, 3])
@on_virtual_time
async def test_a_result_is_sent_again_so_often_and_encoded_once(resends: int) -> None:
    codec = CountingCodec()
    async with agent_by_hand(AgentOptions(max_resends=resends), codec=codec) as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        begun = now()
        times = []

        async def watch() -> None:
            for number in range(resends + 1):
                await hand.next(msg.ResultOffer, number)
                times.append(round(now() - begun, 3))

        watching = asyncio.ensure_future(watch())
        with pytest.raises(TimeoutError, match=r"did not accept the result of task train t1.*60 s"):
            await agent.submit_result(1)
        assert now() - begun == pytest.approx(60)
        await watching
        assert times == [2.0 * number for number in range(resends + 1)]
        offers = hand.all(msg.ResultOffer)
        assert offers == [offers[0]] * (resends + 1), "all are the same"
        assert codec.encoded == 1
        await next_task_works(agent, hand)


@on_virtual_time
async def test_without_a_limit_a_result_is_sent_again_until_the_time_is_over() -> None:
    async with agent_by_hand(AgentOptions(max_resends=None)) as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        with pytest.raises(TimeoutError):
            await agent.submit_result(1)
        assert len(hand.all(msg.ResultOffer)) == 30


@on_virtual_time
async def test_without_a_limit_a_result_with_large_parts_is_refused() -> None:
    async with agent_by_hand(AgentOptions(max_resends=None)) as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(LARGE))
        found = await accepting(hand)
        assert (found.rc, found.parts) == (FAILED, [])
        with pytest.raises(ConversionError, match="max_resends=None"):
            await answering
        await next_task_works(agent, hand)


@on_virtual_time
async def test_an_answer_ends_the_resends() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        await hand.next(msg.ResultOffer, 2)
        await accepting(hand)
        await answering
        await asyncio.sleep(100)
        assert len(hand.all(msg.ResultOffer)) == 3


# results that are large (3.4)


async def submitted(agent: FlareAgent, hand: Hand, result: Any = LARGE, **rest: Any) -> tuple[Any, msg.ResultOffer]:
    """A result with large parts that the site has accepted, and that nobody has pulled."""
    hand.say(offer(**rest))
    await agent.get_task()
    answering = asyncio.ensure_future(agent.submit_result(result))
    found = await accepting(hand)
    await idle()
    assert not answering.done(), "accepted never means transferred"
    return answering, found


@on_virtual_time
async def test_a_large_result_is_settled_when_the_site_says_so() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(msg.Settled("another", "finished"))
        await idle()
        assert not answering.done()
        hand.say(msg.Settled(found.result, "finished"))
        await answering


@on_virtual_time
async def test_a_large_result_is_served_in_chunks_to_every_receiver() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand, receivers=["a", "b"])
        number, size = found.parts[0]
        for receiver in ("a", "b"):
            hand.say(msg.Report(found.result, number, receiver, 0, 0, limit=size))
        await idle()
        assert hand.bytes == {(number, receiver): LARGE.tobytes() for receiver in ("a", "b")}
        hand.say(report(found, receiver="a"))
        await asyncio.sleep(50)
        assert not answering.done(), "the other one has not got it"
        hand.say(report(found, receiver="b"))
        await asyncio.sleep(29)
        assert not answering.done(), "the site has 30 s to say so itself"
        begun = now()
        await answering
        assert now() - begun == pytest.approx(1, abs=0.01)


@on_virtual_time
async def test_a_large_result_that_a_receiver_gave_up_is_not_delivered() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(report(found, state="failed"))
        with pytest.raises(ResultNotDelivered, match=r"transfer \d+ to site failed") as caught:
            await answering
        assert caught.value.state == "failed"
        await next_task_works(agent, hand)


@on_virtual_time
async def test_the_reason_of_the_site_is_the_reason() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(msg.Settled(found.result, "failed", "the disk is full"))
        with pytest.raises(ResultNotDelivered, match="the disk is full"):
            await answering


@on_virtual_time
async def test_a_large_result_that_nobody_pulls_did_not_start() -> None:
    async with agent_by_hand(AgentOptions(heartbeat_timeout=0)) as (agent, hand):
        answering, _ = await submitted(agent, hand)
        begun = now()
        with pytest.raises(ResultNotDelivered, match="did not start within 600 s"):
            await answering
        assert now() - begun == pytest.approx(600, abs=0.1)
        assert len(hand.all(msg.Withdrawn)) == 1, "who comes later need not wait"


@on_virtual_time
async def test_a_large_result_that_stands_still_has_stalled() -> None:
    async with agent_by_hand(AgentOptions(streaming_idle_timeout=10)) as (agent, hand):
        answering, found = await submitted(agent, hand)
        await asyncio.sleep(9)
        hand.say(report(found, state="active"))
        await asyncio.sleep(9)
        assert not answering.done()
        with pytest.raises(ResultNotDelivered, match="stalled: no progress for 10 s"):
            await answering


@on_virtual_time
async def test_what_is_asked_for_after_the_end_is_not_there() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(msg.Settled(found.result, "finished"))
        await answering
        before = len(hand.all(msg.Withdrawn))
        hand.say(report(found, state="active", sequence=9))
        await idle()
        assert hand.all(msg.Withdrawn)[before:] == [msg.Withdrawn(found.result)]
        assert hand.all(msg.Chunk) == []


@on_virtual_time
async def test_the_memory_of_a_result_is_let_go_when_it_has_ended() -> None:
    async with agent_by_hand() as (agent, hand):
        data = bytearray(LARGE.tobytes())
        answering, found = await submitted(agent, hand, np.frombuffer(data, np.int64))
        hand.say(report(found, state="aborted"))
        with pytest.raises(ResultNotDelivered):
            await answering
        del answering
        await idle()  # until then, the loop holds the error, and with it the frames that it came through
        gc.collect()
        data.extend(b"more")  # raises if somebody holds it


# a result under way, and the end


@on_virtual_time
async def test_closing_while_a_large_result_is_under_way_gives_it_up_after_a_short_wait() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, _ = await submitted(agent, hand)
        begun = now()
        await agent.close()
        assert now() - begun < 1
        with pytest.raises(ResultNotDelivered, match="it was given up: no more tasks: closed here"):
            await answering


@on_virtual_time
async def test_closing_while_only_the_word_of_the_site_is_missing_is_a_success() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(report(found))
        await idle()
        assert not answering.done()
        await agent.close()
        await answering


@pytest.mark.parametrize("last", ["word", "report"])
@on_virtual_time
async def test_what_arrives_in_the_short_wait_is_a_success(last: str) -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand, [LARGE, LARGE + 1])
        closing = asyncio.ensure_future(agent.close())
        await asyncio.sleep(0.05)
        hand.say(report(found, 0))
        await asyncio.sleep(0.05)
        assert not answering.done()
        hand.say(msg.Settled(found.result, "finished") if last == "word" else report(found, 1))
        await answering
        await closing


@pytest.mark.parametrize("how", ["abort", "gone"])
@on_virtual_time
async def test_a_site_that_gives_up_or_vanishes_leaves_a_large_result_undelivered(how: str) -> None:
    async with agent_by_hand() as (agent, hand):
        answering, _ = await submitted(agent, hand)
        if how == "abort":
            hand.say(msg.Abort("stop"))
        else:
            await hand.close()
        with pytest.raises(ResultNotDelivered, match="given up"):
            await answering
        assert (await reason_of(agent))[0] == ("aborted" if how == "abort" else "peer gone")


@on_virtual_time
async def test_a_site_that_vanishes_when_it_has_everything_has_it() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(report(found))
        await idle()
        await hand.close()
        await answering


@on_virtual_time
async def test_end_does_not_give_up_a_result_that_is_under_way() -> None:
    """3.1.4: END means finish what is queued, then stop."""
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(msg.End("the job is ending"))
        await asyncio.sleep(30)
        assert not answering.done()
        hand.say(msg.Settled(found.result, "finished"))
        await answering
        assert (await reason_of(agent))[0] == "ended"


@pytest.mark.parametrize("how", ["abort", "gone", "close"])
@on_virtual_time
async def test_a_result_that_is_not_accepted_before_the_end_is_not_delivered(how: str) -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        await hand.next(msg.ResultOffer)
        if how == "abort":
            hand.say(msg.Abort("stop"))
        elif how == "gone":
            await hand.close()
        else:
            await agent.close()
        with pytest.raises(ResultNotDelivered) as caught:
            await answering
        assert caught.value.state == ("failed" if how == "gone" else "aborted")


@on_virtual_time
async def test_a_result_that_is_accepted_while_the_agent_closes_is_delivered() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        await hand.next(msg.ResultOffer)
        closing = asyncio.ensure_future(agent.close())
        await asyncio.sleep(0.1)
        await accepting(hand)
        await answering
        await closing


@on_virtual_time
async def test_a_result_after_the_end_is_not_even_sent() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(), msg.Abort("stop"))
        waiting = asyncio.ensure_future(agent.get_task())
        await asyncio.wait({waiting})
        assert waiting.exception() is not None
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        hand.say(msg.Abort("stop"))
        await idle()
        for error in (AgentClosed, AgentClosed):
            with pytest.raises(error, match="aborted"):
                await agent.submit_result(1)
        assert hand.all(msg.ResultOffer) == []


@pytest.mark.parametrize("large", [False, True])
@on_virtual_time
async def test_a_cancelled_submit_clears_the_task_and_tells_who_pulls(large: bool) -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(LARGE if large else 1))
        found = await hand.next(msg.ResultOffer)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await idle()
        assert hand.all(msg.Withdrawn) == ([msg.Withdrawn(found.result)] if large else [])
        await next_task_works(agent, hand)


@on_virtual_time
async def test_a_submit_that_is_cancelled_while_parts_are_pulled_tells_who_pulls() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        hand.say(report(found, state="active"))
        await idle()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await idle()
        assert hand.all(msg.Withdrawn) == [msg.Withdrawn(found.result)]
        await next_task_works(agent, hand)


# log and progress


@on_virtual_time
async def test_metrics_need_no_task_and_come_in_order() -> None:
    async with agent_by_hand() as (agent, hand):
        for step in range(5):
            await agent.log({"loss": 1 / (step + 1)}, step=step)
        await hand.next(msg.Metrics, 4)
        assert [(found.number, found.step) for found in hand.all(msg.Metrics)] == [(n + 1, n) for n in range(5)]
        hand.say(msg.MetricTaken(5))


@on_virtual_time
async def test_log_waits_only_while_the_queue_is_full() -> None:
    async with agent_by_hand(AgentOptions(metric_queue=2)) as (agent, hand):
        await agent.log({"a": 1})
        await agent.log({"a": 2})
        waiting = [asyncio.ensure_future(agent.log({"a": number})) for number in (3, 4, 5)]
        await idle()
        assert not any(one.done() for one in waiting)
        hand.say(msg.MetricTaken(1))
        await idle()
        assert sum(one.done() for one in waiting) == 1
        hand.say(msg.MetricTaken(3))
        await asyncio.gather(*waiting)
        assert [found.number for found in hand.all(msg.Metrics)] == [1, 2, 3, 4, 5]
        hand.say(msg.MetricTaken(5))


@pytest.mark.parametrize("taken", [7, -1])
@on_virtual_time
async def test_a_site_that_counts_wrongly_does_not_break_the_queue(taken: int) -> None:
    async with agent_by_hand(AgentOptions(metric_queue=1)) as (agent, hand):
        await agent.log({"a": 1})
        hand.say(msg.MetricTaken(taken), msg.MetricTaken(1))
        await idle()
        await agent.log({"a": 2})
        waiting = asyncio.ensure_future(agent.log({"a": 3}))
        await idle()
        assert not waiting.done()
        hand.say(msg.MetricTaken(2))
        await waiting
        hand.say(msg.MetricTaken(3))


@on_virtual_time
async def test_many_may_log_at_the_same_time() -> None:
    async with agent_by_hand(AgentOptions(metric_queue=3)) as (agent, hand):
        logging = asyncio.gather(*(agent.log({"a": number}) for number in range(20)))
        for number in range(1, 21):
            await hand.next(msg.Metrics, number - 1)
            hand.say(msg.MetricTaken(number))
        await logging
        assert [found.number for found in hand.all(msg.Metrics)] == list(range(1, 21))


@on_virtual_time
async def test_a_log_that_waits_is_ended_by_the_end() -> None:
    async with agent_by_hand(AgentOptions(metric_queue=1)) as (agent, hand):
        await agent.log({"a": 1})
        waiting = asyncio.ensure_future(agent.log({"a": 2}))
        await idle()
        hand.say(msg.Abort("stop"))
        with pytest.raises(AgentClosed, match="aborted"):
            await waiting
        with pytest.raises(AgentClosed):
            await agent.log({"a": 3})


@on_virtual_time
async def test_a_log_that_is_cancelled_while_it_waits_says_nothing() -> None:
    async with agent_by_hand(AgentOptions(metric_queue=1)) as (agent, hand):
        await agent.log({"a": 1})
        first, second = (asyncio.ensure_future(agent.log({"a": number})) for number in (2, 3))
        await idle()
        first.cancel()
        hand.say(msg.MetricTaken(1))
        await second
        assert [found.data for found in hand.all(msg.Metrics)] == [
            PlainCodec().encode({"a": number}).data for number in (1, 3)
        ]
        hand.say(msg.MetricTaken(2))


@pytest.mark.parametrize(
    ("record", "step", "error"),
    [
        ({"a": object()}, None, EncodingError),
        ({"a": LARGE}, None, ValueError),
        ([1], None, TypeError),
        ({"a": 1}, "3", TypeError),
        ({"a": 1}, 3.5, TypeError),
    ],
)
@on_virtual_time
async def test_metrics_that_cannot_be_sent_take_no_place_in_the_queue(
    record: Any, step: Any, error: type[Exception]
) -> None:
    async with agent_by_hand(AgentOptions(metric_queue=1)) as (agent, hand):
        with pytest.raises(error):
            await agent.log(record, step=step)
        await asyncio.wait_for(agent.log({"a": 1}, step=np.int64(7)), 1)
        assert (await hand.next(msg.Metrics)).step == 7
        hand.say(msg.MetricTaken(1))


@on_virtual_time
async def test_without_a_channel_for_metrics_there_is_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPipe, "has_metrics", False)
    async with agent_by_hand() as (agent, _):
        with pytest.raises(CallStateError, match="no channel for metrics"):
            await agent.log({"a": 1})


@on_virtual_time
async def test_progress_is_told_at_once() -> None:
    async with agent_by_hand() as (agent, hand):
        agent.progress(3, 10, "epochs")
        agent.progress(np.float32(0.5))
        assert await hand.next(msg.Progress, 1) == msg.Progress(0.5)
        assert hand.all(msg.Progress)[0] == msg.Progress(3.0, 10.0, "epochs")


# launch_once


@pytest.mark.parametrize("accepted", [True, False])
@on_virtual_time
async def test_with_launch_once_false_the_agent_ends_after_its_one_result(accepted: bool) -> None:
    async with agent_by_hand(AgentOptions(launch_once=False)) as (agent, hand):
        assert not agent.launch_once
        hand.say(offer())
        await agent.get_task()
        assert agent.closed is None
        answering = asyncio.ensure_future(agent.submit_result(1))
        found = await hand.next(msg.ResultOffer)
        hand.say(msg.ResultAnswer("t1", found.result, accepted))
        await asyncio.wait({answering})
        assert (answering.exception() is None) is accepted
        assert await reason_of(agent) == ("ended", "the program serves one task")
        hand.say(offer(2))
        assert not (await hand.next(msg.TaskAnswer, 1)).accepted


# signs of life (3.1.2)


@on_virtual_time
async def test_an_agent_that_has_nothing_to_say_gives_signs_of_life() -> None:
    async with agent_by_hand(AgentOptions(heartbeat_timeout=0)) as (agent, hand):
        await asyncio.sleep(21)
        assert len(hand.all(msg.Beat)) == 4
        agent.progress(1)
        await asyncio.sleep(4.5)
        assert len(hand.all(msg.Beat)) == 4, "any message is one"
        await asyncio.sleep(1)
        assert len(hand.all(msg.Beat)) == 5


@on_virtual_time
async def test_a_site_that_says_nothing_is_gone_after_the_timeout() -> None:
    async with agent_by_hand() as (agent, _):
        begun = now()
        with pytest.raises(AgentClosed, match=r"peer gone .*no sign of life for 60"):
            await agent.get_task()
        assert now() - begun == pytest.approx(60, abs=0.01)


@on_virtual_time
async def test_any_traffic_counts_as_a_sign_of_life() -> None:
    async with agent_by_hand() as (agent, hand):
        for message in (msg.Beat(), msg.MetricTaken(0), msg.Settled("x", "y"), msg.ResultAnswer("x", "y", True)):
            await asyncio.sleep(59)
            hand.say(message)
        await asyncio.sleep(59)
        assert agent.closed is None


@on_virtual_time
async def test_timeout_0_waits_for_ever() -> None:
    async with agent_by_hand(AgentOptions(heartbeat_timeout=0)) as (agent, _):
        await asyncio.sleep(10_000)
        assert agent.closed is None


@on_virtual_time
async def test_no_verdict_while_a_task_is_being_pulled() -> None:
    async with agent_by_hand(AgentOptions(max_resends=0)) as (agent, hand):
        hand.say(offer(1, parts=[(1, 100)]))
        await asyncio.sleep(590)
        assert agent.closed is None
        answer = await hand.next(msg.TaskAnswer)
        assert "nothing has come for 600 s" in answer.reason
        await asyncio.sleep(59)
        assert agent.closed is None, "the time counts from the end of the payload"
        await asyncio.sleep(2)
        assert agent.closed is not None


@on_virtual_time
async def test_no_verdict_while_the_site_may_be_decoding_a_result() -> None:
    async with agent_by_hand(AgentOptions(submit_result_timeout=500)) as (agent, hand):
        hand.say(offer())
        await agent.get_task()
        answering = asyncio.ensure_future(agent.submit_result(1))
        await asyncio.sleep(400)
        await accepting(hand)
        await answering


@on_virtual_time
async def test_no_verdict_while_a_large_result_is_being_settled() -> None:
    async with agent_by_hand() as (agent, hand):
        answering, found = await submitted(agent, hand)
        await asyncio.sleep(500)
        hand.say(msg.Settled(found.result, "finished"))
        await answering


# run


async def test_run_calls_the_handler_for_every_task_until_the_end() -> None:
    async with agent_by_hand() as (agent, hand):
        hand.say(offer(1, 20), offer(2, 30), msg.End())

        async def double(task: Task) -> Any:
            return 2 * task.data

        running = asyncio.ensure_future(agent.run(double))
        results = [await accepting(hand, number) for number in range(2)]
        await running
        assert [PlainCodec().decode(_encoded(found)) for found in results] == [40, 60]


def _encoded(found: msg.ResultOffer) -> Any:
    from dfm_async.exchange import Encoded

    return Encoded(found.data)


async def test_a_handler_that_is_not_async_runs_in_a_thread() -> None:
    import threading

    async with agent_by_hand() as (agent, hand):
        hand.say(offer(), msg.End())
        running = asyncio.ensure_future(agent.run(lambda task: threading.current_thread().name))
        found = await accepting(hand)
        await running
        assert PlainCodec().decode(_encoded(found)) != threading.current_thread().name


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
        hand.say(offer(1), offer(2), msg.End())
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
        hand.say(offer(1), offer(2), offer(3), msg.End())
        running = asyncio.ensure_future(agent.run(handler))
        assert (await accepting(hand)).rc == FAILED
        refused = await hand.next(msg.ResultOffer, 1)
        hand.say(msg.ResultAnswer("t2", refused.result, False, "it has no metrics"))
        assert (await accepting(hand, 2)).task == "t3"
        await running
    assert "it has no metrics" in caplog.text


async def test_run_raises_when_the_site_gives_up() -> None:
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


@on_virtual_time
async def test_closing_says_end_once() -> None:
    async with agent_by_hand() as (agent, hand):
        await asyncio.gather(agent.close(), agent.close())
        await agent.close()
        await hand.gone.wait()
        assert len(hand.all(msg.End)) == 1
        for call in (agent.submit_result(1), agent.get_task(), agent.log({})):
            with pytest.raises(AgentClosed, match="closed here"):
                await call
        agent.progress(1)


@on_virtual_time
async def test_an_agent_that_gives_up_says_why() -> None:
    async with agent_by_hand() as (agent, hand):
        await agent.abort("out of memory")
        assert await hand.next(msg.Abort) == msg.Abort("out of memory")
        assert await reason_of(agent) == ("closed here", "out of memory")
        await agent.close()
        assert hand.all(msg.End) == []


@on_virtual_time
async def test_an_error_that_leaves_the_block_is_told_to_the_site() -> None:
    ours, theirs = memory_pair()
    hand = Hand(theirs)
    with pytest.raises(ZeroDivisionError):
        async with FlareAgent(pipe=lambda: ours):
            _ = 1 / 0
    await hand.gone.wait()
    assert hand.all(msg.Abort) == [msg.Abort("ZeroDivisionError: division by zero")]
    await hand.close()


@on_virtual_time
async def test_the_end_of_the_tasks_that_leaves_the_block_is_no_reason_to_abort() -> None:
    ours, theirs = memory_pair()
    hand = Hand(theirs)
    with pytest.raises(AgentClosed):
        async with FlareAgent(pipe=lambda: ours) as agent:
            hand.say(msg.End())
            await agent.get_task()
    assert hand.all(msg.Abort) == []
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


def test_a_program_that_was_not_launched_has_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "CLIENT_API_TYPE", "NVFLARE_CLIENT_API_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HandshakeRefused, match=VARIABLE):
        FlareAgent.from_environment()


@on_virtual_time
async def test_an_agent_tells_what_it_does() -> None:
    async with agent_by_hand() as (agent, hand):
        assert repr(agent) == "<FlareAgent of a site: up>"
        hand.say(offer())
        await agent.get_task()
        assert "working on train t1" in repr(agent)
        hand.say(msg.Abort("stop"))
        await idle()
        assert "aborted (stop)" in repr(agent)


def test_all_errors_of_an_exchange_have_one_root() -> None:
    for error in (AgentClosed, CallStateError, ConversionError, ResultNotDelivered, HandshakeRefused):
        assert issubclass(error, ExchangeError)
