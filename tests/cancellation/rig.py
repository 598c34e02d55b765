"""The session whose calls are cancelled, and what must hold after each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from dfm_async import Federation, JobAborted, Pipeline, PlaceParam, Session, Yield
from dfm_async.errors import JobInterrupted
from tests.cancellation.steps import LIMIT, Cuts, Outcome, cancelled_at, every_cut
from tests.support.sessions import all_values

MOST = 60
"""The maximum number of suspensions of a call that are tried; those that wait for a stream have more, all alike."""

fed = Federation("cancelled calls")
site = fed.site("site")


@site.operation
async def square(x: int) -> int:
    return x * x


@site.operation
def cube(x: int) -> int:
    return x * x * x


with Pipeline("powers") as powers:
    Yield(square(PlaceParam("x")), place="square")
    Yield(cube(3), place="cube")


async def works(session: Session) -> None:
    """The session runs jobs as if nothing had happened."""
    async with asyncio.timeout(LIMIT):
        assert sorted(await all_values(session, powers, {"x": 2})) == [4, 27]


async def settles(session: Session) -> None:
    """Every job that is known ends, or can be resumed."""
    for job in session.jobs():
        async with asyncio.timeout(LIMIT):
            if not job.status.ended:
                await job.cancel("the test is over")
            with suppress(JobAborted, JobInterrupted):
                await job
        assert job.status.ended


async def tries(session: Session, times: int, call: Callable[[int], Coroutine[Any, Any, Any]]) -> int:
    """Cancels a call at every suspension, in one session, and ends its jobs. Returns how many calls were cancelled."""
    count = await cancels(session, times, call)
    await settles(session)
    return count


async def cancels(session: Session, times: int, call: Callable[[int], Coroutine[Any, Any, Any]]) -> int:
    """Does the same, and leaves the jobs alone."""
    count = 0
    for number, cuts in enumerate(every_cut(times)):
        outcome = await cancelled_at(call(number), cuts)
        expected(outcome, cuts)
        await works(session)
        if not outcome.delivered or number == MOST:
            break
        count += 1
    return count


async def ends(session: Session) -> None:
    """Every job that is known ends by itself."""
    for job in session.jobs():
        async with asyncio.timeout(LIMIT):
            await job.wait_until_finished()


def expected(outcome: Outcome, cuts: Cuts) -> None:
    """A cancelled call was cancelled, or had just come to its end; it never swallows or replaces the cancellation."""
    if outcome.error is not None:
        raise AssertionError(f"cancelled at {cuts}: {outcome.error!r}") from outcome.error
    if len(outcome.delivered) > 1:
        assert outcome.cancelled, f"went on after it was cancelled at {cuts}"
