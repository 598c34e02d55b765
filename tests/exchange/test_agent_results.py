"""Results of an agent whose site is played by hand: the rows of the table in 3.2 about results, rules 3.1.3 and 3.4."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import AgentClosed, CallStateError, ConversionError, EncodingError, ResultNotDelivered
from dfm_async.exchange import AgentOptions, Encoded, FlareAgent, PlainCodec, Task
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.agent import FAILED
from tests.exchange.agents import LARGE_RESULT as LARGE
from tests.exchange.agents import (
    accepting,
    agent_by_hand,
    delivered,
    next_task_works,
    offer,
    reason_of,
    report,
    stop,
    submitted,
    submitting,
    with_agent,
)
from tests.exchange.rig import CountingCodec, Hand, idle, now, on_virtual_time

# submit_result


@with_agent()
async def test_a_result_that_is_not_accepted_yet_is_not_submitted(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand)
    await hand.next(msg.ResultOffer)
    await idle()
    assert not answering.done()
    with pytest.raises(CallStateError, match="still being delivered"):
        await agent.get_task()
    with pytest.raises(CallStateError, match="there is no task"):
        await agent.submit_result(2)
    await accepting(hand)
    await answering


@with_agent()
async def test_without_a_task_there_is_nothing_to_submit(agent: FlareAgent, hand: Hand) -> None:
    with pytest.raises(CallStateError, match="there is no task: call get_task first"):
        await agent.submit_result(1)
    hand.say(offer())
    await agent.get_task()
    await delivered(agent, hand)
    with pytest.raises(CallStateError):
        await agent.submit_result(1)
    assert len(hand.all(msg.ResultOffer)) == 1


@with_agent()
async def test_a_result_that_the_site_refuses_is_not_delivered(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand)
    found = await hand.next(msg.ResultOffer)
    hand.say(msg.ResultAnswer("t1", found.result, False, "it has no metrics"))
    with pytest.raises(ResultNotDelivered) as caught:
        await answering
    assert (caught.value.task, caught.value.state, caught.value.reason) == ("t1", "rejected", "it has no metrics")
    await next_task_works(agent, hand)


def _convert(result: Any, task: Task) -> Any:
    if result == "bad":
        raise KeyError("weights")
    return result


@pytest.mark.parametrize(
    ("submit", "reported", "cause"),
    [
        ({"result": object()}, "EncodingError", EncodingError),
        ({"result": 1, "rc": ""}, "TypeError: rc must be a return code", TypeError),
        ({"result": 1, "rc": None}, "TypeError: rc must be a return code", TypeError),
        ({"result": "bad"}, "could not be converted: KeyError: 'weights'", KeyError),
    ],
)
@with_agent(convert_result=_convert)
async def test_an_unsendable_result_is_reported_and_clears_the_task(
    agent: FlareAgent, hand: Hand, submit: dict[str, Any], reported: str, cause: type[Exception]
) -> None:
    """Exactly one answer per task, whatever happens; the task is cleared on every path."""
    answering = await submitting(agent, hand, **submit)
    found = await accepting(hand)
    assert (found.task, found.rc) == ("t1", FAILED)
    assert reported in found.reason
    assert PlainCodec().decode(Encoded(found.data)) is None  # the site can read it, so the reason is what it sees
    with pytest.raises(ConversionError, match="the result of task train t1") as caught:
        await answering
    assert isinstance(caught.value.__cause__, cause)
    await next_task_works(agent, hand)
    assert len(hand.all(msg.ResultOffer)) == 2


@with_agent(
    convert_task=lambda task: Task(task.name, task.data * 2, id=task.id),
    convert_result=lambda result, task: [task.id, result],
)
async def test_tasks_and_results_are_converted(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1, 21))
    task = await agent.get_task()
    assert task is not None
    assert task.data == 42
    assert (await delivered(agent, hand)).data == PlainCodec().encode(["t1", 1]).data


@with_agent()
async def test_a_task_whose_data_are_no_value_is_refused(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1, data=b"\xc1"))
    answer = await hand.next(msg.TaskAnswer)
    assert not answer.accepted
    await next_task_works(agent, hand)


@pytest.mark.parametrize("reason", [ValueError("text"), None, "no text: \udc80", 3])
@with_agent()
async def test_any_reason_reaches_the_site(agent: FlareAgent, hand: Hand, reason: Any) -> None:
    answering = await submitting(agent, hand, None, "ERROR", reason=reason)
    found = await accepting(hand)
    assert found.reason == str(reason).replace("\udc80", "?")
    await answering


# resends (3.1.3)


@pytest.mark.parametrize("resends", [0, 1, 3])
@pytest.mark.usefixtures("lossy")
@on_virtual_time
async def test_a_result_is_sent_again_up_to_the_limit_and_encoded_once(resends: int) -> None:
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


@pytest.mark.usefixtures("lossy")
@with_agent(AgentOptions(max_resends=None))
async def test_without_a_limit_a_result_is_sent_again_until_its_timeout(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand)
    with pytest.raises(TimeoutError):
        await answering
    assert len(hand.all(msg.ResultOffer)) == 30


@with_agent(AgentOptions(max_resends=None))
async def test_without_a_limit_a_result_with_large_parts_is_refused(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand, LARGE)
    found = await accepting(hand)
    assert (found.rc, found.parts) == (FAILED, [])
    with pytest.raises(ConversionError, match="max_resends=None"):
        await answering
    await next_task_works(agent, hand)


@pytest.mark.usefixtures("lossy")
@with_agent()
async def test_an_answer_ends_the_resends(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand)
    await hand.next(msg.ResultOffer, 2)
    await accepting(hand)
    await answering
    await asyncio.sleep(100)
    assert len(hand.all(msg.ResultOffer)) == 3


# results that are large (3.4)


@with_agent()
async def test_a_large_result_is_settled_by_the_site(agent: FlareAgent, hand: Hand) -> None:
    answering, found = await submitted(agent, hand)
    hand.say(msg.Settled("another", "finished"))
    await idle()
    assert not answering.done()
    hand.say(msg.Settled(found.result, "finished"))
    await answering


@with_agent()
async def test_a_large_result_is_served_in_chunks_to_every_receiver(agent: FlareAgent, hand: Hand) -> None:
    answering, found = await submitted(agent, hand, receivers=["a", "b"])
    number, size = found.parts[0]
    for receiver in ("a", "b"):
        hand.say(
            msg.TransferReport(
                tx=found.result, transfer=number, receiver=receiver, sequence=0, bytes_done=0, limit=size
            )
        )
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


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda found: report(found, state="failed"), r"transfer \d+ to site failed"),
        (lambda found: msg.Settled(found.result, "failed", "the disk is full"), "the disk is full"),
    ],
    ids=["receiver", "site"],
)
@with_agent()
async def test_a_large_result_that_fails_at_the_site_is_not_delivered(
    agent: FlareAgent, hand: Hand, answer: Any, reason: str
) -> None:
    answering, found = await submitted(agent, hand)
    hand.say(answer(found))
    with pytest.raises(ResultNotDelivered, match=reason) as caught:
        await answering
    assert caught.value.state == "failed"
    await next_task_works(agent, hand)


@with_agent(AgentOptions(heartbeat_timeout=0))
async def test_a_large_result_that_nobody_pulls_did_not_start(agent: FlareAgent, hand: Hand) -> None:
    answering, _ = await submitted(agent, hand)
    begun = now()
    with pytest.raises(ResultNotDelivered, match="did not start within 600 s"):
        await answering
    assert now() - begun == pytest.approx(600, abs=0.1)
    assert len(hand.all(msg.Withdrawn)) == 1, "who comes later need not wait"


@with_agent(AgentOptions(streaming_idle_timeout=10))
async def test_a_large_result_that_stands_still_has_stalled(agent: FlareAgent, hand: Hand) -> None:
    answering, found = await submitted(agent, hand)
    await asyncio.sleep(9)
    hand.say(report(found, state="active"))
    await asyncio.sleep(9)
    assert not answering.done()
    with pytest.raises(ResultNotDelivered, match="stalled: no progress for 10 s"):
        await answering


@with_agent()
async def test_a_request_after_the_end_is_answered_with_withdrawn(agent: FlareAgent, hand: Hand) -> None:
    answering, found = await submitted(agent, hand)
    hand.say(msg.Settled(found.result, "finished"))
    await answering
    before = len(hand.all(msg.Withdrawn))
    hand.say(report(found, state="active", sequence=9))
    await idle()
    assert hand.all(msg.Withdrawn)[before:] == [msg.Withdrawn(found.result)]
    assert hand.all(msg.Chunk) == []


@with_agent()
async def test_the_memory_of_a_result_is_freed_at_its_end(agent: FlareAgent, hand: Hand) -> None:
    data = bytearray(LARGE.tobytes())
    answering, found = await submitted(agent, hand, np.frombuffer(data, np.int64))
    hand.say(report(found, state="aborted"))
    with pytest.raises(ResultNotDelivered):
        await answering
    del answering
    await idle()  # until then, the loop holds the error, and with it the frames that it came through
    gc.collect()
    data.extend(b"more")  # raises if somebody holds it


# a result in flight, and the end


@pytest.mark.parametrize(("how", "reason"), [("abort", "aborted"), ("vanish", "peer gone"), ("close", "closed here")])
@with_agent()
async def test_a_large_result_in_flight_is_abandoned_at_the_end(
    agent: FlareAgent, hand: Hand, how: str, reason: str
) -> None:
    answering, _ = await submitted(agent, hand)
    begun = now()
    await stop(how, agent, hand)
    with pytest.raises(ResultNotDelivered, match=f"it was abandoned: no more tasks: {reason}"):
        await answering
    assert now() - begun < 1, "after a short wait"
    assert (await reason_of(agent))[0] == reason


@pytest.mark.parametrize("how", ["close", "vanish"])
@with_agent()
async def test_a_result_is_delivered_if_only_its_confirmation_is_missing(
    agent: FlareAgent, hand: Hand, how: str
) -> None:
    answering, found = await submitted(agent, hand)
    hand.say(report(found))
    await idle()
    assert not answering.done()
    await stop(how, agent, hand)
    await answering


@pytest.mark.parametrize("last", ["word", "report"])
@with_agent()
async def test_what_arrives_in_the_short_wait_is_a_success(agent: FlareAgent, hand: Hand, last: str) -> None:
    answering, found = await submitted(agent, hand, [LARGE, LARGE + 1])
    closing = asyncio.ensure_future(agent.close())
    await asyncio.sleep(0.05)
    hand.say(report(found, 0))
    await asyncio.sleep(0.05)
    assert not answering.done()
    hand.say(msg.Settled(found.result, "finished") if last == "word" else report(found, 1))
    await answering
    await closing


@with_agent()
async def test_end_does_not_abandon_a_result_in_flight(agent: FlareAgent, hand: Hand) -> None:
    """3.1.4: END means finish what is queued, then stop."""
    answering, found = await submitted(agent, hand)
    hand.say(msg.EndOfTasks("the job is ending"))
    await asyncio.sleep(30)
    assert not answering.done()
    hand.say(msg.Settled(found.result, "finished"))
    await answering
    assert (await reason_of(agent))[0] == "ended"


@pytest.mark.parametrize(("how", "state"), [("abort", "aborted"), ("vanish", "failed"), ("close", "aborted")])
@with_agent()
async def test_a_result_that_is_not_accepted_before_the_end_is_not_delivered(
    agent: FlareAgent, hand: Hand, how: str, state: str
) -> None:
    answering = await submitting(agent, hand)
    await hand.next(msg.ResultOffer)
    await stop(how, agent, hand)
    with pytest.raises(ResultNotDelivered) as caught:
        await answering
    assert caught.value.state == state


@with_agent()
async def test_a_result_that_is_accepted_while_the_agent_closes_is_delivered(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand)
    await hand.next(msg.ResultOffer)
    closing = asyncio.ensure_future(agent.close())
    await asyncio.sleep(0.1)
    await accepting(hand)
    await answering
    await closing


@with_agent()
async def test_a_result_after_the_end_is_not_sent(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer())
    await agent.get_task()
    hand.say(msg.Abort("stop"))
    await idle()
    for _ in range(2):
        with pytest.raises(AgentClosed, match="aborted"):
            await agent.submit_result(1)
    assert hand.all(msg.ResultOffer) == []


@pytest.mark.parametrize("phase", ["offered", "large", "pulling"])
@with_agent()
async def test_a_cancelled_submit_clears_the_task_and_notifies_receivers(
    agent: FlareAgent, hand: Hand, phase: str
) -> None:
    if phase == "pulling":
        answering, found = await submitted(agent, hand)
        hand.say(report(found, state="active"))
        await idle()
    else:
        answering = await submitting(agent, hand, LARGE if phase == "large" else 1)
        found = await hand.next(msg.ResultOffer)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    await idle()
    assert hand.all(msg.Withdrawn) == ([] if phase == "offered" else [msg.Withdrawn(found.result)])
    await next_task_works(agent, hand)
