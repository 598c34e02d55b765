"""Real agents whose site is played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from dfm_async.errors import AgentClosed
from dfm_async.exchange import AgentOptions, FlareAgent, PlainCodec
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.memory_pipe import memory_pair
from tests.exchange.rig import Decorator, Hand, idle, supplied_with

LARGE_RESULT = np.arange(40_000, dtype=np.int64)
"""An array that does not travel in the message."""


def with_agent(*arguments: Any, **rest: Any) -> Decorator:
    """A test on virtual time with a real ``agent``, and a site that is played by ``hand``."""
    return supplied_with(lambda: agent_by_hand(*arguments, **rest), "agent", "hand")


def offer(number: int = 1, value: Any = None, **rest: Any) -> msg.TaskOffer:
    """A task without large parts, as a site sends it."""
    fields = {"name": "train", "data": PlainCodec().encode(value).data, "parts": [], "receivers": ["site"]}
    return msg.TaskOffer(task=f"t{number}", **{**fields, **rest})


@contextlib.asynccontextmanager
async def agent_by_hand(options: AgentOptions | None = None, **rest: Any) -> AsyncIterator[tuple[FlareAgent, Hand]]:
    """A real agent, and a site that is played by hand."""
    ours, theirs = memory_pair()
    agent = FlareAgent(options=options, pipe=lambda: ours, **rest)
    await agent.start()
    hand = Hand(theirs)
    try:
        yield agent, hand
    finally:
        await agent.close()
        await hand.close()


async def accepting(hand: Hand, number: int = 0) -> msg.ResultOffer:
    """Waits for a result, and accepts it."""
    found = await hand.next(msg.ResultOffer, number)
    hand.say(msg.ResultAnswer(found.task, found.result, True))
    return found


async def submitting(
    agent: FlareAgent, hand: Hand, result: Any = 1, *arguments: Any, **rest: Any
) -> asyncio.Future[None]:
    """Give the agent a task, and return the call that submits its result."""
    hand.say(offer())
    await agent.get_task()
    return asyncio.ensure_future(agent.submit_result(result, *arguments, **rest))


async def delivered(agent: FlareAgent, hand: Hand, result: Any = 1, number: int = 0) -> msg.ResultOffer:
    """Submit the result of the current task to a site that accepts it."""
    answering = asyncio.ensure_future(agent.submit_result(result))
    found = await accepting(hand, number)
    await answering
    return found


def report(found: msg.ResultOffer, part: int = 0, state: str = "completed", **rest: Any) -> msg.TransferReport:
    """What a receiver says about a large part."""
    number, size = found.parts[part]
    done = size if state == "completed" else 0
    return msg.TransferReport(
        tx=found.result,
        transfer=number,
        **{"receiver": "site", "sequence": 1, "bytes_done": done, "state": state, **rest},
    )


async def reason_of(agent: FlareAgent) -> tuple[str, str]:
    with pytest.raises(AgentClosed) as caught:
        await agent.get_task(0)
    return caught.value.reason, caught.value.detail


async def stop(how: str, agent: FlareAgent, hand: Hand) -> None:
    """Ends the connection of an agent in one of four ways."""
    match how:
        case "end":
            hand.say(msg.EndOfTasks("done"))
        case "abort":
            hand.say(msg.Abort("stop"))
        case "vanish":
            await hand.close()
        case "close":
            await agent.close()


async def next_task_works(agent: FlareAgent, hand: Hand) -> None:
    """The task that failed is cleared: another one passes."""
    results = len(hand.all(msg.ResultOffer))
    hand.say(offer(99))
    task = await agent.get_task()
    assert task is not None
    assert task.id == "t99"
    found = await delivered(agent, hand, "fine", results)
    assert (found.task, found.rc) == ("t99", "OK")


async def submitted(
    agent: FlareAgent, hand: Hand, result: Any = LARGE_RESULT, **rest: Any
) -> tuple[Any, msg.ResultOffer]:
    """A result with large parts that the site has accepted, and that nobody has pulled."""
    hand.say(offer(**rest))
    await agent.get_task()
    answering = asyncio.ensure_future(agent.submit_result(result))
    found = await accepting(hand)
    await idle()
    assert not answering.done(), "accepted never means transferred"
    return answering, found
