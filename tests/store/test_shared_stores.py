"""What several processes do with one store, in every database."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from dfm_async.errors import JobNotFound
from dfm_async.model.status import JobStatus
from dfm_async.store import Store
from tests.store.backends import Backend
from tests.store.conftest import AnyOpener, Starter
from tests.store.helpers import entry, everything, found, new_job, row
from tests.support.waiting import PROMPT


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


@pytest.fixture
def opened(any_opened: AnyOpener) -> AnyOpener:
    return any_opened


@pytest.fixture
def start(any_start: Starter) -> Starter:
    return any_start


# processes


@pytest.mark.parametrize("seed", range(3))
async def test_an_owner_that_is_killed_leaves_a_consistent_job(start: Starter, opened: AnyOpener, seed: int) -> None:
    child = await start("write")
    store = await opened()
    async with store.follow((await found(store)).owner.fence) as follower:
        for _ in range(random.Random(seed).randrange(1, 40)):
            assert await follower.changed()
        child.kill()
        while await follower.changed():
            pass
    job = await found(store)
    assert job.status is JobStatus.INTERRUPTED
    entries = await everything(store)
    assert entries
    position = 0
    for item in entries:
        assert item == entry(position, item.count)
        position += item.count
    assert position == job.end
    assert await store.params("j", range(job.frames + 10)) == {number: row(number) for number in range(job.frames)}
    assert (await store.take_over("j")).end == job.end
    store.append("j", entry(job.end))
    await store.flush()
    assert (await found(store)).end == job.end + 1


async def test_a_job_is_interrupted_when_its_owner_is_killed(start: Starter, store: Store) -> None:
    child = await start()
    assert await child.tell("create j") == "True"
    assert await child.tell("status j running") == "ok"
    job = await found(store)
    assert (job.status, job.owner.alive, job.owner.mine) == (JobStatus.RUNNING, True, False)
    assert job.owner.pid == int(await child.tell("pid"))
    await child.kill_owner(store)
    job = await found(store)
    assert (job.status, job.owner.alive) == (JobStatus.INTERRUPTED, False)
    assert [job.status for job in await store.jobs()] == [JobStatus.INTERRUPTED]


async def test_a_job_that_ended_stays_ended_when_its_owner_dies(start: Starter, store: Store) -> None:
    child = await start()
    await child.tell("create j")
    await child.tell("status j finished")
    await child.kill_owner(store)
    assert (await found(store)).status is JobStatus.FINISHED


async def test_only_one_takes_a_job_over(start: Starter, store: Store) -> None:
    owner = await start()
    await owner.tell("create j")
    await owner.tell("append j 5")
    others = [await start() for _ in range(3)]
    assert await others[0].tell("take j") == "JobOwned"
    assert await others[0].tell("delete j") == "JobOwned"
    await owner.kill_owner(store)
    outcomes = await asyncio.gather(*(other.tell("take j") for other in others))
    assert sorted(outcomes) == ["5", "JobOwned", "JobOwned"]


async def test_a_closed_owner_gives_its_jobs_up(start: Starter, store: Store) -> None:
    child = await start()
    await child.tell("create j")
    assert await child.tell("close") == "ok"
    assert (await found(store)).status is JobStatus.INTERRUPTED
    await store.delete("j")
    assert await store.find("j") is None


async def test_many_processes_create_one_store_at_the_same_time(start: Starter, opened: AnyOpener) -> None:
    children = await asyncio.gather(*(start() for _ in range(6)))
    await asyncio.gather(*(child.tell("create", f"j{number}") for number, child in enumerate(children)))
    await asyncio.gather(*(child.tell("append", f"j{number}", 100) for number, child in enumerate(children)))
    jobs = await (await opened()).jobs()
    assert {job.job_id: job.end for job in jobs} == {f"j{number}": 100 for number in range(6)}
    assert len({job.owner.fence for job in jobs}) == 6


async def test_follower_is_notified_of_every_commit_and_of_the_end(start: Starter, store: Store) -> None:
    child = await start()
    await child.tell("create j")
    async with store.follow((await found(store)).owner.fence) as follower:
        assert await follower.changed()
        for number in range(1, 6):
            await child.tell("append j 1")
            assert await follower.changed()
            assert (await found(store)).end == number
        waiting = asyncio.create_task(follower.changed())
        await child.tell("status j finished")
        assert await waiting
        await child.tell("close")
        assert not await follower.changed()
        assert not await follower.changed()
    assert (await found(store)).status is JobStatus.FINISHED


async def test_reading_behind_each_change_misses_nothing(start: Starter, store: Store) -> None:
    child = await start()
    await child.tell("create j")
    ends: list[int] = []

    async def read() -> None:
        async with store.follow((await found(store)).owner.fence) as follower:
            more = True
            while more:
                more = await follower.changed()
                while page := await store.read("j", ends[-1] + 1 if ends else 0):
                    ends.extend(item.first for item in page)

    reading = asyncio.create_task(read())
    for _ in range(20):
        await child.tell("append j 7")
    child.kill()
    await reading
    assert ends == list(range(140))


async def test_ended_owner_is_reported(start: Starter, store: Store) -> None:
    child = await start()
    await child.tell("create j")
    await child.kill_owner(store)
    async with store.follow((await found(store)).owner.fence) as follower:
        assert not await follower.changed()
    async with store.follow(4711) as follower:
        assert not await follower.changed()


# requests to owners


async def test_requests_reach_the_owner_in_order_and_are_answered_with_its_writes(
    store: Store, opened: AnyOpener
) -> None:
    other, notified = await opened(), asyncio.Event()
    await store.create(new_job("j"))
    await store.create(new_job("k"))
    store.on_request = notified.set
    numbers = [await other.request(job_id, data) for job_id, data in (("j", b"1"), ("k", b"2"), ("j", b"3"))]
    async with asyncio.timeout(PROMPT):
        await notified.wait()
    requests = await store.requests()
    assert [(request.job_id, request.data) for request in requests] == [("j", b"1"), ("k", b"2"), ("j", b"3")]
    assert [request.number for request in requests] == numbers
    assert await other.requests() == []
    async with other.follow(store.fence) as follower:
        await follower.changed()
        assert await store.take_request(requests[0])
        store.append("j", entry(0))
        store.answer(requests[0], b"done")
        while await follower.changed() and await other.answer_to(requests[0].number) is None:
            pass
        assert (await found(other)).end == 1
    assert await other.answer_to(requests[0].number) == b"done"
    assert await store.requests() == requests[1:]
    other.end_request("j", requests[0].number)
    await other.flush()
    assert await other.answer_to(requests[0].number) is None


async def test_a_job_has_a_limited_number_of_requests(store: Store, opened: AnyOpener) -> None:
    other = await opened()
    await store.create(new_job("j"))
    assert [await other.request("j", b"", 2) is not None for _ in range(3)] == [True, True, False]
    assert await other.request("j", b"", 3) is not None
    with pytest.raises(JobNotFound):
        await other.request("k", b"")
    store.update("j", status=JobStatus.FINISHED)
    await store.flush()
    assert await other.request("j", b"", 100) is None


async def test_answers_of_a_sender_that_died_make_room(start: Starter, store: Store) -> None:
    child = await start()
    await store.create(new_job("j"))
    await child.tell("request j")
    (request,) = await store.requests()
    store.answer(request, b"done")
    await store.flush()
    assert await store.request("j", b"", 1) is None
    await child.tell("create k")
    await child.kill_owner(store, "k")
    assert await store.request("j", b"", 1) is not None


async def test_request_of_a_sender_that_is_cancelled_at_any_moment_is_withdrawn(
    store: Store, opened: AnyOpener
) -> None:
    other = await opened()
    await store.create(new_job("j"))
    for turns in itertools.count(0, 7):
        sending = asyncio.create_task(other.request("j", b""))
        for _ in range(turns):
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        await other.flush()
        if not sending.cancelled():
            break
        assert await store.requests() == [], f"cancelled after {turns} turns of the loop"
    (request,) = await store.requests()
    assert request.number == sending.result()


async def test_a_request_is_withdrawn_unless_its_owner_has_taken_it(store: Store, opened: AnyOpener) -> None:
    other = await opened()
    await store.create(new_job("j"))
    for taken in False, True:
        number = await other.request("j", b"")
        assert number is not None
        (request,) = await store.requests()
        if taken:
            assert await store.take_request(request)
            assert not await other.withdraw_request("j", number)
            store.answer(request, b"done")
            await store.flush()
            assert not await other.withdraw_request("j", number)
        else:
            assert await other.withdraw_request("j", number)
            assert not await store.take_request(request)
        assert await store.requests() == []


async def test_requests_of_a_dead_owner_go_to_the_one_that_takes_over(
    start: Starter, store: Store, opened: AnyOpener
) -> None:
    child = await start()
    await child.tell("create j")
    number = await store.request("j", b"data")
    await child.kill_owner(store)
    assert await store.request("j", b"") is None
    other = await opened()
    await other.take_over("j")
    (request,) = await other.requests()
    assert (request.number, request.data) == (number, b"data")
    assert await other.take_request(request)


async def test_withdrawing_from_an_owner_that_seems_dead_keeps_it_from_writing(
    backend: Backend, store: Store, opened: AnyOpener
) -> None:
    other = await opened()
    fenced: list[str] = []
    store.on_fenced = fenced.append
    await store.create(new_job("j"))
    number = await other.request("j", b"data")
    (request,) = await store.requests()
    await store.take_request(request)
    store.update("j", status=JobStatus.INTERRUPTED)
    await store.flush()
    assert number is not None
    assert await other.withdraw_request("j", number)
    store.answer(request, b"done")
    store.append("j", entry(0))
    await store.flush()
    assert fenced == ["j"]
    assert (await found(other)).end == 0
    assert (await other.take_over("j")).owner.mine


async def test_requests_are_deleted_with_their_job(backend: Backend, store: Store) -> None:
    await store.create(new_job("j"))
    await store.request("j", b"data")
    await store.delete("j")
    assert await backend.execute("SELECT count(*) FROM requests") == [(0,)]


async def test_a_job_that_has_ended_can_be_deleted_by_every_store(store: Store, opened: AnyOpener) -> None:
    await store.create(new_job("j"))
    store.update("j", status=JobStatus.FINISHED)
    await store.flush()
    await (await opened()).delete("j")
    assert await store.find("j") is None
