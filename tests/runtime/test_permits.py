"""Permits of calls: requested, granted, returned, and never lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from dfm_async.errors import DfmError
from dfm_async.federation.operation import Adapter
from dfm_async.model.call_limits import CallLimits, SiteCapacity
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.permits import Permit, Permits, SitePermits, check_capacity, own_permits
from dfm_async.runtime.threads import JobThreads, Threads
from tests.support.waiting import settled


def act(customer: str = "nobody", x: int = 1) -> int:
    return x


callee = Callee(Adapter(operation="act", code=act, provider="acme"))
ONE = CallLimits(limit=1)
EACH = CallLimits(limit=1, key="customer")


def new_site() -> tuple[SitePermits, Permits]:
    owner = SitePermits()
    owner.add_capacity(SiteCapacity(cpus=2, memory=100))
    return owner, own_permits(owner)


async def acquire(permits: Permits, limits: CallLimits = ONE, **args: Any) -> Permit:
    return await permits.acquire(callee, limits, args, "job", 0, elsewhere=False)


def used(owner: SitePermits) -> dict[str, tuple[float | None, int]]:
    return {found.limit: (found.used, found.waiting) for found in owner.stats()}


async def test_what_one_version_of_the_code_states_counts_more_than_the_machine() -> None:
    owner, permits = new_site()
    owner.add_capacity(SiteCapacity())  # another version leaves it open
    with pytest.raises(DfmError, match=r"needs memory=101B, and the site has 100B"):
        await acquire(permits, CallLimits(memory=101))


async def test_a_permit_is_returned_once() -> None:
    owner, permits = new_site()
    first = await acquire(permits)
    second = asyncio.ensure_future(acquire(permits))
    await settled()
    assert used(owner) == {"limit": (1, 1)}
    assert [found.operation for found in owner.stats()] == ["acme.act"]
    first.release()
    first.release()
    assert (await second).waited_for == "limit"
    third = asyncio.ensure_future(acquire(permits))
    await settled()
    assert not third.done(), "the second release has freed nothing"
    (await second).release()
    (await third).release()
    assert used(owner) == {}


async def test_a_cancelled_call_waits_no_longer() -> None:
    owner, permits = new_site()
    first = await acquire(permits)
    second = asyncio.ensure_future(acquire(permits))
    await settled()
    second.cancel()
    await settled()
    assert used(owner) == {"limit": (1, 0)}
    first.release()
    assert used(owner) == {}


async def test_a_call_that_is_cancelled_when_it_is_granted_holds_nothing() -> None:
    owner, permits = new_site()
    first = await acquire(permits)
    second = asyncio.ensure_future(acquire(permits))
    await settled()
    first.release()  # grants the second, which has not noticed yet
    second.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await second
    assert used(owner) == {}


async def test_a_process_that_has_ended_holds_nothing() -> None:
    owner, permits = new_site()
    other = own_permits(owner)
    await acquire(permits)
    waiting = asyncio.ensure_future(acquire(permits))
    next_one = asyncio.ensure_future(acquire(other))
    await settled()
    owner.gone(permits)
    (await next_one).release()
    assert used(owner) == {}
    waiting.cancel()
    await settled()


async def test_a_key_has_the_default_of_its_parameter() -> None:
    owner, permits = new_site()
    first = await acquire(permits, EACH)
    same = asyncio.ensure_future(acquire(permits, EACH, customer="nobody"))
    others = [await acquire(permits, EACH, customer=name) for name in ("somebody", ("no", "body"), "x" * 10_000)]
    await settled()
    assert not same.done()
    for permit in (first, *others):
        permit.release()
    (await same).release()
    with pytest.raises(TypeError, match="which must be text, a number, a date, a UUID or a tuple of these, not list"):
        await acquire(permits, EACH, customer=[1])
    assert used(owner) == {}


async def test_what_the_site_does_not_have_is_refused() -> None:
    owner, permits = new_site()
    with pytest.raises(DfmError, match=r"operation 'acme\.act' needs cpus=3, and the site has 2"):
        await acquire(permits, CallLimits(cpus=3))
    assert used(owner) == {}
    with pytest.raises(DfmError, match="operation 'act' of site 'lab' needs gpus=1, and the site has 0"):
        check_capacity("lab", SiteCapacity(), [Adapter(operation="act", code=act, limits=CallLimits(gpus=1))])


async def test_a_rate_lets_calls_start_later() -> None:
    owner, permits = new_site()
    often, loop = CallLimits(rate="20/s"), asyncio.get_running_loop()
    began = loop.time()
    for _ in range(23):
        (await acquire(permits, often)).release()
    assert loop.time() - began >= 0.14
    owner.close()


def finish(gate: threading.Event, threads: Threads) -> None:
    """Let code in a thread end while the loop does not run."""
    gate.set()
    while not threads._done:
        time.sleep(0.001)


@pytest.mark.parametrize("ends_first", [False, True])
async def test_code_that_nobody_waits_for_is_noted_when_it_ends(ends_first: bool) -> None:
    threads = Threads(1, "site")
    job = JobThreads(threads, "job", 0)
    gate, left = threading.Event(), asyncio.Event()
    task = asyncio.ensure_future(job.run("code", gate.wait, late=left.set))

    def cancel() -> None:
        task.cancel()

    await settled()
    if ends_first:
        finish(gate, threads)
        threads.post(cancel)  # in the same turn, after the outcome was passed on
    else:
        cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert left.is_set() == ends_first
    gate.set()
    await left.wait()
    threads.close()
