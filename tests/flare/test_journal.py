"""Jobs that outlive their host job and the server, in a real federation whose server keeps a journal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from dfm_async import Federation, Job, JobStatus, Pipeline, PlaceParam, Session, Yield
from dfm_async.deploy.local_flare import LocalFlare
from dfm_async.errors import JobInterrupted
from dfm_async.model.events import FrameCompleted, Result
from dfm_async.model.flare import FlareOptions
from dfm_async.targets.flare.admin import Admin
from tests.flare.doors import Door, knock
from tests.flare.shared import KITS, ROOT
from tests.flare.test_faults import host_job_of, part_of
from tests.support.waiting import until

fed = Federation("lasting", api_version="1.0.0")
archive, lab = fed.site("archive"), fed.site("lab")

BOUND = 3.0
"""For how many seconds messages are sent again."""
OWNER, OTHER = "owner@dfm.local", "other@dfm.local"
SETS = 12
LIMIT = 300
"""For how many seconds a test may take."""


@archive.operation
async def fetch(n: int) -> int:
    return n


@lab.operation
async def weigh(door: str, n: int) -> int:
    await knock(door, f"weigh {n}")
    return n * 10


with Pipeline("weighing") as weighing:
    Yield(weigh(PlaceParam("door"), fetch(PlaceParam("n"))))

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.shared_session,
    pytest.mark.timeout(LIMIT),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def flare(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFlare]:
    folder, environment = tmp_path_factory.mktemp("flare"), {"PYTHONPATH": str(ROOT)}
    async with LocalFlare.up(
        ["archive", "lab"],
        folder,
        users=(OWNER, OTHER),
        allow_code=True,
        kits=KITS,
        environment=environment,
        journal=True,
    ) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def door() -> AsyncIterator[Door]:
    async with Door.hung() as found:
        yield found


def connect(flare: LocalFlare, user: str = OWNER, **more: Any) -> Session:
    kit = flare.folder / user
    options = FlareOptions(startup_kit=kit, user=user, code="travels", delivery_timeout=BOUND, **more)
    return Session(fed, target="flare", options=options)


async def abort(flare: LocalFlare, host_job: str) -> None:
    """Ends a host job, as the administrator of the server can."""
    admin = Admin(flare.folder / OWNER, OWNER)
    await admin.open(LIMIT)
    try:
        await admin.abort(host_job)
    finally:
        await admin.close()


def rows(door: Door, count: int = SETS) -> list[dict[str, Any]]:
    return [{"door": door.path, "n": n} for n in range(count)]


_APPLICATION = """
import asyncio, sys
from tests.flare.test_journal import BOUND, FlareOptions, Session, fed, weighing

async def main():
    kit, user, door = sys.argv[1:]
    options = FlareOptions(startup_kit=kit, user=user, code="travels", delivery_timeout=BOUND)
    session = Session(fed, target="flare", options=options)
    await session.connect()
    job = await session.execute(weighing, [{"door": door, "n": n} for n in range(4)], job_id="left-behind")
    first = await anext(job.results())
    print(first.offset, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def reading(job: Job) -> AsyncIterator[list[Result]]:
    """Reads the results of a job while something happens to it; at the end, all of them have come, each once."""
    found: list[Result] = []

    async def read() -> None:
        async for result in job:
            found.append(result)

    reader = asyncio.create_task(read())
    try:
        yield found
        await reader
    finally:
        reader.cancel()
    offsets = [result.offset for result in found]
    assert offsets == sorted(set(offsets))


async def some_done(job: Job, door: Door) -> None:
    """Waits until all parameter sets have begun, and lets half of them end."""
    for n in range(SETS):
        await door.knocked(f"weigh {n}")
    for n in range(SETS // 2):
        door.let_in(f"weigh {n}")
    done = 0
    async with job.events() as events:
        while done < SETS // 2:  # from then on, they do not run again
            done += isinstance(await anext(events), FrameCompleted)


def check(found: list[Result], door: Door) -> None:
    assert sorted(result.value for result in found) == [10 * n for n in range(SETS)]
    assert [door.visits.count(f"weigh {n}") for n in range(SETS // 2)] == [1] * (SETS // 2)  # these were recorded


async def test_jobs_of_an_aborted_host_job_go_on_in_another_one(flare: LocalFlare, door: Door) -> None:
    async with connect(flare) as session, asyncio.timeout(LIMIT):
        job = await session.execute(weighing, rows(door), job_id="aborted")
        async with reading(job) as found:
            await some_done(job, door)
            host_job = host_job_of(session)
            await abort(flare, host_job)
            door.open()
        check(found, door)
        assert await job is JobStatus.FINISHED
        assert host_job_of(session) != host_job


@pytest.mark.long
async def test_jobs_of_a_killed_hub_go_on_and_take_further_parameter_sets(flare: LocalFlare, door: Door) -> None:
    async with connect(flare) as session, asyncio.timeout(LIMIT):
        job = await session.execute(weighing, rows(door, 1), job_id="open", autostop=False)
        async with reading(job) as found:
            await door.knocked("weigh 0")
            part_of(flare, "server", host_job_of(session)).kill()
            for row in rows(door)[1:]:  # while nobody may be there to take them
                await job.send_input_params(row)
            await job.send_stop_frame()
            door.open()
        assert sorted(result.value for result in found) == [10 * n for n in range(SETS)]
        assert await job is JobStatus.FINISHED


@pytest.mark.long
async def test_a_killed_server_costs_its_jobs_nothing_that_was_recorded(flare: LocalFlare, door: Door) -> None:
    async with connect(flare) as session, asyncio.timeout(LIMIT):
        job = await session.execute(weighing, rows(door), job_id="survives")
        async with reading(job) as found:
            await some_done(job, door)
            await flare.kill_server()
            await until(lambda: job.info().waits_for == "the federation, which cannot be reached")
            assert job.status is JobStatus.RUNNING
            await flare.start_server()
            door.open()
        check(found, door)
        assert await job is JobStatus.FINISHED


@pytest.mark.long
async def test_jobs_without_application_and_server_go_on_with_the_next_session(flare: LocalFlare, door: Door) -> None:
    application = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _APPLICATION, str(flare.folder / OWNER), OWNER, door.path),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    async with asyncio.timeout(LIMIT):
        try:
            for n in range(4):
                await door.knocked(f"weigh {n}")
            door.let_in("weigh 2")
            assert application.stdout is not None
            offset = int(await application.stdout.readline())
        finally:
            application.kill()
            await application.wait()
        await flare.kill_server()
        await flare.start_server()
        async with connect(flare, OTHER) as session:  # another user sees nothing of it
            assert (await session.reattach("left-behind")).status is JobStatus.UNKNOWN
            assert await session.refresh_jobs() == []
        async with connect(flare) as session:
            assert "left-behind" in [found.job_id for found in await session.refresh_jobs()]
            job = await session.reattach("left-behind", after=offset)
            async with reading(job) as found:
                for n in (0, 1, 3):
                    await door.knocked(f"weigh {n}", times=2)
                door.open()
            assert sorted(result.value for result in found) == [0, 10, 30]
            assert await job is JobStatus.FINISHED
        async with connect(flare) as session:  # an ended job is found as well
            again = await session.reattach("left-behind")
            assert sorted([result.value async for result in again]) == [0, 10, 20, 30]
        assert door.visits.count("weigh 2") == 1


@pytest.mark.long
async def test_a_job_whose_federation_does_not_come_back_is_interrupted(flare: LocalFlare, door: Door) -> None:
    try:
        async with connect(flare, start_timeout=15.0) as session, asyncio.timeout(LIMIT):
            job = await session.execute(weighing, rows(door, 2), job_id="waits")
            await door.knocked("weigh 1")
            await flare.kill_server()
            with pytest.raises(JobInterrupted, match=r"session\.reattach"):
                await job
            assert job.status is JobStatus.INTERRUPTED
    finally:
        await flare.start_server()
    door.open()
    async with connect(flare) as session, asyncio.timeout(LIMIT):
        job = await session.reattach("waits")
        assert sorted([result.value async for result in job]) == [0, 10]
