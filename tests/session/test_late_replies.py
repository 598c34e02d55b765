"""Rounds of ``session.each`` whose late replies are kept, with sites that are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from dfm_async.session.broadcast import EachStream, LateReplies, SiteReply


class Sites:
    """Two sites that reply when they are asked to, and count the calls that run at the same time."""

    def __init__(self) -> None:
        self.late = LateReplies()
        self.tasks: set[asyncio.Task[None]] = set()
        self.replies: dict[str, asyncio.Future[str]] = {}
        self.calls: list[str] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    def each(self, **options: Any) -> EachStream[str]:
        def asking(site: str) -> Any:
            async def ask() -> str:
                self.calls.append(site)
                reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                self.replies[site] = reply
                return await reply

            return ask

        asked = {site: asking(site) for site in ("desk", "lab")}
        keep = options.pop("keep", lambda found: self.late.begin("train", found))
        return EachStream(asked, **{"at_least": None, "within": None, **options}, spawn=self.spawn, keep=keep)

    async def called(self, number: int) -> None:
        while len(self.calls) < number:  # noqa: ASYNC110 - in the next turns of the loop
            await asyncio.sleep(0)


async def interrupted(stream: EachStream[str]) -> BaseException:
    """Wait for a reply until the wait is cancelled; return the error with its traceback, which holds the stream."""
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.01):
            await anext(stream)
    return caught.value


async def test_round_whose_wait_was_cancelled_leaves_its_calls_to_the_next() -> None:
    sites = Sites()
    first = sites.each()
    kept = await interrupted(first)
    following = sites.each()
    reading = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    assert sites.calls == ["desk", "lab"], "no site is called twice at once"
    sites.replies["lab"].set_result("late")
    reply = await reading
    assert (reply.site, reply.value, reply.late) == ("lab", "late", True)
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    assert kept.__traceback__ is not None
    sites.replies["desk"].set_result("late as well")
    assert [(reply.site, reply.late) async for reply in following] == [("desk", True)]


async def test_round_whose_wait_was_cancelled_can_go_on() -> None:
    sites = Sites()
    stream = sites.each()
    await interrupted(stream)
    sites.replies["lab"].set_result("one")
    assert (await anext(stream)).value == "one"
    second = sites.each()
    reading = asyncio.ensure_future(anext(second))
    await sites.called(4)  # the first round goes on, and both have their own calls
    sites.replies["lab"].set_result("two")
    assert (await reading).value == "two"
    for task in sites.tasks:
        task.cancel()
    await asyncio.wait(sites.tasks)


@pytest.mark.parametrize(
    "error", [OSError("the file is gone"), asyncio.CancelledError(), BaseException("odd")], ids=repr
)
async def test_call_that_raises_anything_is_a_reply_with_an_error(error: BaseException) -> None:
    sites = Sites()
    stream = sites.each(keep=None)
    reading = asyncio.ensure_future(anext(stream))
    await sites.called(2)
    sites.replies["desk"].set_exception(error)
    sites.replies["lab"].set_result("fine")
    async with asyncio.timeout(10):
        found: list[SiteReply[str]] = [await reading, *[reply async for reply in stream]]
    assert {reply.site: reply.error is None for reply in found} == {"desk": False, "lab": True}
    await asyncio.gather(*sites.tasks, return_exceptions=True)
