"""Slots, lanes and the queue of jobs, compared with a plain list."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async.engine.scheduler import Scheduler


def test_the_highest_priority_goes_first_and_equals_in_order() -> None:
    jobs: Scheduler[str] = Scheduler(1, 1, 10)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        jobs.put(name, priority)
    order = []
    while (found := jobs.take()) is not None:
        order.append(found[0])
        jobs.release(found[0])
    assert order == ["b", "d", "a", "c"]


def test_a_job_that_runs_again_is_the_next_of_its_priority() -> None:
    jobs: Scheduler[str] = Scheduler(1, 1, 10)
    jobs.put("first", 0)
    assert jobs.take() == ("first", 0)
    jobs.put("second", 0)
    jobs.put("urgent", 1)
    jobs.put_back("first", 0)
    taken = []
    while (found := jobs.take()) is not None:
        taken.append(found[0])
        jobs.release(found[0])
    assert taken == ["urgent", "first", "second"]


def test_jobs_go_to_the_lane_with_the_fewest() -> None:
    jobs: Scheduler[str] = Scheduler(2, 4, 10)
    for name in "abcd":
        jobs.put(name, 0)
    lanes = [found[1] for _ in range(4) if (found := jobs.take()) is not None]
    assert lanes == [0, 1, 0, 1]
    jobs.release("a")
    jobs.put("e", 0)
    assert jobs.take() == ("e", 0)
    assert jobs.lane(0) == ["c", "e"]


def test_submitters_beyond_the_limit_wait_in_order() -> None:
    jobs: Scheduler[str] = Scheduler(1, 1, 1)
    assert jobs.put("runs", 0)
    jobs.take()
    assert [jobs.put(name, 0) for name in ("waits", "third", "fourth")] == [True, False, False]
    assert jobs.take_accepted() == []
    jobs.release("runs")
    assert jobs.take() == ("waits", 0)
    assert jobs.take_accepted() == ["third"]
    jobs.release("fourth")  # it was cancelled while its submitter waited
    assert jobs.take_accepted() == ["fourth"]


def test_jobs_wait_for_their_time_then_for_a_slot() -> None:
    jobs: Scheduler[str] = Scheduler(1, 1, 10)
    assert jobs.start("runs") == 0
    for name, until, priority in (("late", 30.0, 9), ("b", 20.0, 0), ("a", 10.0, 0), ("first", 20.0, 5)):
        jobs.delay(name, priority, until)
    assert (jobs.delayed, jobs.waiting, jobs.due, jobs.ahead("a"), jobs.waits("a")) == (4, 0, 10.0, None, True)
    assert jobs.advance(9.9) == []
    assert jobs.advance(25.0) == ["a", "b", "first"]
    assert (jobs.delayed, jobs.waiting, jobs.due, jobs.ahead("b")) == (1, 3, 30.0, 2)
    taken = []
    jobs.release("runs")
    while (found := jobs.take()) is not None:
        taken.append(found[0])
        jobs.release(found[0])
    assert taken == ["first", "a", "b"]
    jobs.release("late")  # it was cancelled
    assert (jobs.delayed, jobs.due, jobs.advance(99.0)) == (0, None, [])


def test_delayed_jobs_do_not_count_in_the_queue_but_have_its_limit() -> None:
    jobs: Scheduler[str] = Scheduler(1, 1, 1)
    jobs.delay("later", 0, 5.0)
    assert (jobs.full_of_delayed, jobs.overflows, jobs.start("runs")) == (True, False, 0)
    assert jobs.put("waits", 0)
    assert jobs.advance(5.0) == ["later"]
    assert (jobs.full_of_delayed, jobs.overflows, jobs.waiting) == (False, True, 2)
    assert jobs.take_accepted() == []


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_jobs_are_taken_as_a_sorted_list_says(random: Random, lanes: int, slots: int, limit: int) -> None:
    jobs: Scheduler[int] = Scheduler(lanes, slots, limit)
    waiting: list[tuple[int, int, int]] = []
    running: set[int] = set()
    unaccepted: set[int] = set()
    later: list[tuple[float, int, int]] = []
    now, front = 0.0, 0
    order = 0
    for number in range(1, 60):
        match random.choice(["put", "put", "take", "release", "put_back", "delay", "advance"]):
            case "put":
                priority = random.randint(0, 2)
                excess = len(running) >= slots and len(waiting) >= limit
                assert jobs.overflows is excess
                if not jobs.put(number, priority):
                    assert excess
                    unaccepted.add(number)
                order += 1
                waiting.append((-priority, order, number))
            case "delay":
                order += 1
                later.append((now + random.randint(0, 9), order, number))
                jobs.delay(number, 0, later[-1][0])
            case "advance":
                now += random.randint(0, 5)
                come = sorted(entry for entry in later if entry[0] <= now)
                later = [entry for entry in later if entry[0] > now]
                assert jobs.advance(now) == [job for *_, job in come]
                for *_, job in come:
                    order += 1
                    waiting.append((0, order, job))
            case "take":
                found = jobs.take()
                expected = min(waiting) if waiting and len(running) < slots else None
                assert (None if found is None else found[0]) == (None if expected is None else expected[2])
                if expected is not None:
                    waiting.remove(expected)
                    running.add(expected[2])
            case "release" if running or waiting or later:
                job = random.choice([*running, *(entry[2] for entry in (*waiting, *later))])
                later = [entry for entry in later if entry[2] != job]
                jobs.release(job)
                running.discard(job)
                waiting = [entry for entry in waiting if entry[2] != job]
            case "put_back" if running:
                job = random.choice(sorted(running))
                running.discard(job)
                front -= 1
                jobs.put_back(job, 0)
                waiting.append((0, front, job))
        accepted = jobs.take_accepted()
        assert unaccepted.issuperset(accepted)
        unaccepted.difference_update(accepted)
        assert (jobs.running, jobs.waiting, jobs.delayed) == (len(running), len(waiting), len(later))
        assert jobs.due == min((until for until, *_ in later), default=None)
        assert sum(len(jobs.lane(lane)) for lane in range(lanes)) == len(running)
        assert not unaccepted or len(waiting) - len(unaccepted) >= limit


def test_jobs_that_wait_know_how_many_go_first() -> None:
    jobs: Scheduler[str] = Scheduler(1, 1, 10)
    assert jobs.start("runs") == 0
    for name, priority in (("a", 0), ("b", 5), ("c", 0)):
        jobs.put(name, priority)
    assert [jobs.ahead(name) for name in ("runs", "a", "b", "c", "unknown")] == [None, 1, 0, 2, None]
    jobs.release("a")  # it was cancelled
    assert jobs.ahead("c") == 1
    jobs.put_back("runs", 0)
    assert [jobs.ahead(name) for name in ("runs", "b", "c")] == [1, 0, 2]
    assert jobs.take() == ("b", 0)
    assert [jobs.ahead(name) for name in ("runs", "b", "c")] == [0, None, 1]
