"""Metrics, heartbeats and ``launch_once`` of an agent whose site is played by hand: rules 3.1.2 and 3.2."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import AgentClosed, CallStateError, EncodingError
from dfm_async.exchange import AgentOptions, FlareAgent, PlainCodec
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.endpoint import PipeTraits
from dfm_async.exchange.memory_pipe import MemoryPipe
from tests.exchange.agents import LARGE_RESULT as LARGE
from tests.exchange.agents import accepting, agent_by_hand, offer, reason_of, submitted, submitting, with_agent
from tests.exchange.rig import Hand, idle, now, on_virtual_time

# log and progress


@with_agent(AgentOptions(metric_queue=2))
async def test_log_waits_only_while_the_queue_is_full(agent: FlareAgent, hand: Hand) -> None:
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
    assert [found.number for found in hand.all(msg.ProgramMetrics)] == [1, 2, 3, 4, 5]
    hand.say(msg.MetricTaken(5))


@pytest.mark.parametrize("taken", [7, -1])
@with_agent(AgentOptions(metric_queue=1))
async def test_a_site_that_counts_wrongly_does_not_break_the_queue(agent: FlareAgent, hand: Hand, taken: int) -> None:
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


@with_agent(AgentOptions(metric_queue=1))
async def test_a_log_that_waits_is_ended_by_the_end(agent: FlareAgent, hand: Hand) -> None:
    await agent.log({"a": 1})
    waiting = asyncio.ensure_future(agent.log({"a": 2}))
    await idle()
    hand.say(msg.Abort("stop"))
    with pytest.raises(AgentClosed, match="aborted"):
        await waiting
    with pytest.raises(AgentClosed):
        await agent.log({"a": 3})


@with_agent(AgentOptions(metric_queue=1))
async def test_a_log_that_is_cancelled_while_it_waits_sends_nothing(agent: FlareAgent, hand: Hand) -> None:
    await agent.log({"a": 1})
    first, second = (asyncio.ensure_future(agent.log({"a": number})) for number in (2, 3))
    await idle()
    first.cancel()
    hand.say(msg.MetricTaken(1))
    await second
    assert [found.data for found in hand.all(msg.ProgramMetrics)] == [
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
@with_agent(AgentOptions(metric_queue=1))
async def test_metrics_that_cannot_be_sent_take_no_place_in_the_queue(
    agent: FlareAgent, hand: Hand, record: Any, step: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await agent.log(record, step=step)
    await asyncio.wait_for(agent.log({"a": 1}, step=np.int64(7)), 1)
    assert (await hand.next(msg.ProgramMetrics)).step == 7
    hand.say(msg.MetricTaken(1))


@on_virtual_time
async def test_without_a_channel_for_metrics_there_is_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPipe, "traits", PipeTraits(has_metrics=False))
    async with agent_by_hand() as (agent, _):
        with pytest.raises(CallStateError, match="no channel for metrics"):
            await agent.log({"a": 1})


@with_agent()
async def test_progress_is_sent_at_once(agent: FlareAgent, hand: Hand) -> None:
    agent.progress(3, 10, "epochs")
    agent.progress(np.float32(0.5))
    assert await hand.next(msg.ProgramProgress, 1) == msg.ProgramProgress(0.5)
    assert hand.all(msg.ProgramProgress)[0] == msg.ProgramProgress(3.0, 10.0, "epochs")


# launch_once


@pytest.mark.parametrize("accepted", [True, False])
@with_agent(AgentOptions(launch_once=False))
async def test_with_launch_once_false_the_agent_ends_after_its_one_result(
    agent: FlareAgent, hand: Hand, accepted: bool
) -> None:
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


# heartbeats (3.1.2)


@with_agent(AgentOptions(heartbeat_timeout=0))
async def test_an_idle_agent_sends_heartbeats(agent: FlareAgent, hand: Hand) -> None:
    await asyncio.sleep(21)
    assert len(hand.all(msg.Beat)) == 4
    agent.progress(1)
    await asyncio.sleep(4.5)
    assert len(hand.all(msg.Beat)) == 4, "any message is one"
    await asyncio.sleep(1)
    assert len(hand.all(msg.Beat)) == 5


@with_agent()
async def test_a_silent_site_is_gone_after_the_timeout(agent: FlareAgent) -> None:
    begun = now()
    with pytest.raises(AgentClosed, match=r"peer gone .*no heartbeat for 60"):
        await agent.get_task()
    assert now() - begun == pytest.approx(60, abs=0.01)


@with_agent()
async def test_any_message_counts_as_a_heartbeat(agent: FlareAgent, hand: Hand) -> None:
    for message in (msg.Beat(), msg.MetricTaken(0), msg.Settled("x", "y"), msg.ResultAnswer("x", "y", True)):
        await asyncio.sleep(59)
        hand.say(message)
    await asyncio.sleep(59)
    assert agent.closed is None


@with_agent(AgentOptions(heartbeat_timeout=0))
async def test_timeout_0_waits_for_ever(agent: FlareAgent) -> None:
    await asyncio.sleep(10_000)
    assert agent.closed is None


@with_agent(AgentOptions(max_resends=0))
async def test_no_verdict_while_a_task_is_being_pulled(agent: FlareAgent, hand: Hand) -> None:
    hand.say(offer(1, parts=[(1, 100)]))
    await asyncio.sleep(590)
    assert agent.closed is None
    answer = await hand.next(msg.TaskAnswer)
    assert "nothing has come for 600 s" in answer.reason
    await asyncio.sleep(59)
    assert agent.closed is None, "the time counts from the end of the payload"
    await asyncio.sleep(2)
    assert agent.closed is not None


@with_agent(AgentOptions(submit_result_timeout=500))
async def test_no_verdict_while_the_site_may_be_decoding_a_result(agent: FlareAgent, hand: Hand) -> None:
    answering = await submitting(agent, hand)
    await asyncio.sleep(400)
    await accepting(hand)
    await answering


@with_agent()
async def test_no_verdict_while_a_large_result_is_being_settled(agent: FlareAgent, hand: Hand) -> None:
    answering, found = await submitted(agent, hand)
    await asyncio.sleep(500)
    hand.say(msg.Settled(found.result, "finished"))
    await answering
