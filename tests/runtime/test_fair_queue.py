"""Calls that wait for a thread: jobs take turns, and priorities count."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from dfm_async import Federation, LocalOptions
from dfm_async.runtime.fair_queue import FairQueue, JobCalls
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of


def taken(queue: FairQueue[str], count: int) -> str:
    return "".join(queue.take() or "-" for _ in range(count))


def test_jobs_of_equal_priority_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    batch, small = JobCalls[str](), JobCalls[str]()
    for _ in range(5):
        queue.put(batch, "b")
    queue.put(small, "s")
    assert taken(queue, 7) == "bsbbbb-"
    queue.put(small, "s")
    queue.put(batch, "b")
    assert taken(queue, 3) == "sb-"


def test_a_higher_priority_comes_first_and_starves_nobody() -> None:
    queue: FairQueue[str] = FairQueue()
    low, middle, high = JobCalls[str](-1), JobCalls[str](0), JobCalls[str](7)
    for _ in range(40):
        queue.put(low, "l")
        queue.put(middle, "m")
        queue.put(high, "h")
    found = Counter(taken(queue, 40))
    assert found["h"] == 30
    assert found["l"] == found["m"] == 5


def test_calls_of_one_job_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    job, other = JobCalls[str](), JobCalls[str](3)
    for call in "abc":
        queue.put(job, call)
    queue.put(other, "!")
    assert taken(queue, 5) == "!abc-"


def test_calls_that_are_withdrawn_are_not_taken() -> None:
    queue: FairQueue[str] = FairQueue()
    job, other = JobCalls[str](), JobCalls[str]()
    for call in "abc":
        queue.put(job, call)
        queue.put(other, call.upper())
    assert queue.withdraw(job) == ["a", "b", "c"]
    assert taken(queue, 2) == "AB"
    queue.put(job, "d")
    assert sorted(taken(queue, 3)) == sorted("Cd-")
    queue.put(job, "e")
    queue.put(other, "E")
    assert sorted(queue.clear()) == ["E", "e"]
    assert queue.take() is None
    queue.put(job, "f")
    assert queue.take() == "f"


def test_no_call_is_lost_or_taken_twice_by_many_threads() -> None:
    queue: FairQueue[int] = FairQueue()
    jobs = [JobCalls[int](number % 3) for number in range(5)]
    found: list[int] = []
    ended = threading.Event()

    def take() -> None:
        while True:
            last = ended.is_set()
            call = queue.take()
            if call is not None:
                found.append(call)
            elif last:
                return

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(2000):
        queue.put(jobs[number % 5], number)
    ended.set()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(2000))


fed = Federation("fair")
lab = fed.site("lab", threads=1)


@lab.operation
def note(path: str, gate: str, text: str) -> None:
    os.close(os.open(gate, os.O_RDONLY))
    with Path(path).open("a") as file:
        file.write(text)


notes = pipeline_of(note, "path", "gate", "text")


@lab.operation
async def answer() -> None:
    """Need no thread: the site has received everything that was sent before."""


@pytest.mark.parametrize("priority", [0, 5])
async def test_a_small_job_is_served_beside_a_batch(connect: Connect, tmp_path: Path, priority: int) -> None:
    path, gate = tmp_path / "notes", tmp_path / "gate"
    os.mkfifo(gate)
    given = {"path": str(path), "gate": str(gate)}
    async with connect(fed, options=LocalOptions(lanes=1)) as session:
        batch = await session.execute(notes, [{**given, "text": "b"} for _ in range(50)])
        small = await session.execute(notes, [{**given, "text": "s"} for _ in range(3)], priority=priority)
        await (await session.execute(pipeline_of(answer)))  # now the calls of both wait for the one thread
        opened = os.open(gate, os.O_RDWR)  # unlike O_WRONLY, it does not block if no call reads
        await small
        await batch
        os.close(opened)
    text = path.read_text()
    assert text.count("b") == 50
    assert text.rindex("s") < 20


def test_wanted_calls_are_taken_whatever_their_job() -> None:
    queue: FairQueue[str] = FairQueue()
    one, two = JobCalls[str](), JobCalls[str](priority=1)
    for job, calls in ((one, "aXb"), (two, "XcX")):
        for call in calls:
            queue.put(job, call)
    assert queue.take_all("X".__eq__) == ["X"] * 3
    assert "".join(iter(queue.take, None)) == "cab"
    queue.put(two, "d")
    assert queue.take() == "d"
