"""Faults of the network between the participants of a real federation: each of them has a network of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dfm_async import DfmError, Federation, Job, JobAborted, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.model.flare import FlareOptions
from tests.flare.doors import Door, knock
from tests.flare.namespaces import Parted
from tests.support.waiting import PROMPT

fed = Federation("parted", api_version="1.0.0")
archive = fed.site("archive")
lab = fed.site("lab")
server = fed.site("server")
home = fed.site("home")

LONG = 20.0
"""A delivery timeout that no cut of these tests reaches, in seconds."""

BOUND = 3.0
"""One that those cuts reach which stay."""


@archive.operation
async def fetch(n: int) -> int:
    return n


@archive.operation
async def bring(door: str, n: int) -> int:
    await knock(door, f"bring {n}")
    return n


@archive.operation
async def bring_more(door: str, n: int) -> int:
    await knock(door, f"bring more {n}")
    return n + 1


@lab.operation
async def double(n: int) -> int:
    return n * 2


@lab.operation
async def weigh(door: str, n: int) -> int:
    await knock(door, f"weigh {n}")
    return n * 10


@lab.operation
async def weigh_again(door: str, n: int) -> int:
    await knock(door, f"weigh again {n}")
    return n * 10


@server.operation
async def increase(n: int) -> int:
    return n + 1


@home.operation
async def show(n: int) -> str:
    return f"<{n}>"


with Pipeline("everywhere") as everywhere:
    Yield(show(increase(double(fetch(PlaceParam("n"))))))

with Pipeline("weighing") as weighing:
    weight = weigh(PlaceParam("door", multiuse=True), fetch(PlaceParam("n")))
    Yield(weight, place="weight")
    Yield(weigh_again(PlaceParam("door", multiuse=True), weight), place="again")

with Pipeline("bringing") as bringing:
    brought = bring(PlaceParam("door", multiuse=True), PlaceParam("n"))
    Yield(double(brought), place="first")
    Yield(double(bring_more(PlaceParam("door", multiuse=True), brought)), place="more")


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session, pytest.mark.long]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def parted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parted]:
    # One federation for all of them: it takes seconds to start. The timeout of a host job is that of its user.
    users = ("patient@dfm.local", "hasty@dfm.local")
    async with Parted.up(["archive", "lab", "server"], tmp_path_factory.mktemp("parted"), users=users) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def door() -> AsyncIterator[Door]:
    async with Door.hung() as found:
        yield found


def connect(parted: Parted, delivery_timeout: float) -> Session:
    user = parted.flare.users[delivery_timeout == BOUND]
    options = FlareOptions(
        startup_kit=parted.flare.folder / user, user=user, code="travels", delivery_timeout=delivery_timeout
    )
    return Session(fed, homesite="home", target="flare", options=options)


async def back(session: Session, site: str) -> None:
    """Waits until the session has heard that a site is there."""
    connection = session._target._host_jobs.current  # type: ignore[attr-defined] # that of FLARE
    assert await connection._welcomed(lambda welcome: True if site in welcome.sites else None)


async def found(job: Job) -> list[tuple[str, int]]:
    return sorted([(result.place, result.value) async for result in job])


async def test_all_works_when_every_participant_has_a_network_of_its_own(parted: Parted) -> None:
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in parted.flare.pids.values()}
    assert len(networks) == len(parted.flare.pids) == 4
    async with connect(parted, LONG) as session:
        job = await session.execute(everywhere, [{"n": n} for n in range(100)])
        assert sorted([result.value async for result in job]) == sorted(f"<{n * 2 + 1}>" for n in range(100))
        # FLARE has every message pass the server: whether two sites reach each other is no matter.
        await parted.network.cut("archive", "lab")
        job = await session.execute(everywhere, {"n": 4})
        assert (await job.first()).value == "<9>"
        await parted.network.heal("archive", "lab")


async def test_what_is_in_flight_during_short_cuts_comes_exactly_once(parted: Parted, door: Door) -> None:
    # One federation for all of it: each takes seconds.
    async with connect(parted, LONG) as session:
        for cut_off in ("lab", "server", "home"):
            door.visits.clear()
            job = await session.execute(weighing, [{"door": door.path, "n": n} for n in range(3)])
            for n in range(3):
                await door.knocked(f"weigh {n}", job=job)
            await parted.network.cut(cut_off)
            for n in range(3):
                door.let_in(f"weigh {n}")
                await door.knocked(f"weigh again {n * 10}", job=job)  # so the first result is on its way
            await parted.network.heal(cut_off)
            for n in range(3):
                door.let_in(f"weigh again {n * 10}")
            assert await found(job) == [
                (place, n * times) for place, times in (("again", 100), ("weight", 10)) for n in range(3)
            ]
            assert len(door.visits) == 6

        door.visits.clear()
        job = await session.execute(bringing, [{"door": door.path, "n": n} for n in range(3)])
        for n in range(3):
            await door.knocked(f"bring {n}", job=job)
        await parted.network.cut("lab")
        for n in range(3):
            door.let_in(f"bring {n}")
            await door.knocked(f"bring more {n}", job=job)  # so the first token is on its way to the lab
        await parted.network.heal("lab")
        door.open()
        assert await found(job) == [("first", 0), ("first", 2), ("first", 4), ("more", 2), ("more", 4), ("more", 6)]
        assert len(door.visits) == 6


async def test_a_site_that_is_cut_off_while_it_works_ends_its_jobs_and_those_that_may_run_again_when_it_is_back(
    parted: Parted, door: Door
) -> None:
    async with connect(parted, BOUND) as session:
        patient = await session.execute(weighing, {"door": door.path, "n": 1}, retry=RetryPolicy(on_worker_lost=1))
        other = await session.execute(weighing, {"door": door.path, "n": 2})
        await door.knocked("weigh 1", job=patient)
        await door.knocked("weigh 2", job=other)
        await parted.network.cut("lab")  # nobody has anything to say to it, nor it to them
        async with asyncio.timeout(4 * BOUND + PROMPT):
            with pytest.raises(JobAborted, match="'lab'"):
                await other
        await parted.network.heal("lab")
        async with asyncio.timeout(4 * BOUND + PROMPT):
            await door.knocked("weigh 1", times=2, job=patient)
            door.open()
            assert await found(patient) == [("again", 100), ("weight", 10)]
            assert door.visits.count("weigh again 10") == 1
            last = await session.execute(everywhere, {"n": 4})
            assert (await last.first()).value == "<9>"


async def test_tokens_for_a_site_that_is_cut_off_end_their_job_with_an_error_that_names_it(
    parted: Parted, door: Door
) -> None:
    async with connect(parted, BOUND) as session:
        job = await session.execute(bringing, {"door": door.path, "n": 1})
        await door.knocked("bring 1", job=job)
        await parted.network.cut("lab")
        door.open()
        async with asyncio.timeout(4 * BOUND + PROMPT):
            with pytest.raises(JobAborted, match="'lab'"):
                await job
        await parted.network.heal("lab")
        async with asyncio.timeout(4 * BOUND + PROMPT):
            await back(session, "lab")


async def test_an_application_whose_server_is_cut_off_is_notified(parted: Parted, door: Door) -> None:
    async with connect(parted, BOUND) as session:
        # A site that was cut off before may start again only now.
        job = await session.execute(weighing, {"door": door.path, "n": 1}, retry=RetryPolicy(on_worker_lost=1))
        await door.knocked("weigh 1", job=job)
        await parted.network.cut("server")
        async with asyncio.timeout(4 * BOUND + PROMPT):
            with pytest.raises(DfmError, match="reached"):
                await job
        await parted.network.heal("server")
