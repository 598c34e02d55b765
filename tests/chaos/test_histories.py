"""The checker finds every kind of wrong history."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.histories import (
    RESULTS,
    Commit,
    Death,
    JobHistory,
    Outcome,
    Seen,
    SentEvent,
    problems,
    takeovers,
)


def log_of(*numbers: int, end: str = "finished") -> list[Seen]:
    texts: list[tuple[str, tuple[int, int] | None]] = [("running", None)]
    texts += [(f"{number} {index}", (number, index)) for number in numbers for index in range(RESULTS)]
    texts.append((end, None))
    return [Seen(offset, text, result) for offset, (text, result) in enumerate(texts)]


def right() -> JobHistory:
    """Two replicas, two readers, three sets: one was accepted, one refused and then accepted, one has no answer."""
    log = log_of(1, 2)
    return JobHistory(
        sent=[(1, Outcome.DONE), (2, Outcome.REFUSED), (2, Outcome.DONE), (3, Outcome.UNKNOWN)],
        stopped=[Outcome.UNKNOWN, Outcome.DONE],
        reads=[log, log[:4]],
        ends=["finished", "finished"],
        logs=[log, log_of(1, 2)],
    )


def cancelled() -> JobHistory:
    job = right()
    job.cancelled, job.ends = [Outcome.DONE], ["aborted"] * 2
    job.logs = [log_of(end="aborted")] * 2
    job.reads = [job.logs[0]]
    return job


def waited() -> JobHistory:
    """A job whose calls are recorded, and which has taken the first of two events that were accepted."""
    log = [replace(seen, drawn="a", event=7) if seen.result else seen for seen in log_of(1)]
    return JobHistory(
        recorded=True,
        sent=[(1, Outcome.DONE)],
        stopped=[Outcome.DONE],
        events=[
            SentEvent(7, 1.0, 2.0, Outcome.DONE),
            SentEvent(8, 3.0, 4.0, Outcome.DONE),
            SentEvent(9, 0.0, 0.5, Outcome.REFUSED),
        ],
        reads=[log],
        ends=["finished"],
        logs=[log],
    )


@pytest.mark.parametrize("history", [right, cancelled, waited])
def test_right_histories_have_no_problems(history: Callable[[], JobHistory]) -> None:
    assert problems(history()) == []


def not_submitted(job: JobHistory) -> None:
    job.submitted = Outcome.UNKNOWN
    job.ends = []


def test_a_job_that_was_not_accepted_owes_nothing() -> None:
    job = right()
    not_submitted(job)
    assert problems(job) == []


def lose_an_accepted_set(job: JobHistory) -> None:
    job.sent.append((4, Outcome.DONE))


def lose_a_result(job: JobHistory) -> None:
    job.logs = [[Seen(at, seen.text, seen.result) for at, seen in enumerate(job.logs[0][:3] + job.logs[0][4:])]] * 2
    job.reads = []


def repeat_a_result(job: JobHistory) -> None:
    job.logs = [[*log, Seen(len(log), "1 0", (1, 0))] for log in job.logs]


def run_a_refused_set(job: JobHistory) -> None:
    job.sent = [(1, Outcome.DONE), (2, Outcome.REFUSED)]


def run_a_set_of_nobody(job: JobHistory) -> None:
    job.sent = [(1, Outcome.DONE)]


def half_a_set_without_an_answer(job: JobHistory) -> None:
    job.logs = [[*log, Seen(len(log), "3 0", (3, 0))] for log in job.logs]


def leave_a_gap(job: JobHistory) -> None:
    job.logs = [[seen for seen in log if seen.offset != 2] for log in job.logs]
    job.reads = []


def give_a_reader_a_gap(job: JobHistory) -> None:
    del job.reads[1][1]


def repeat_an_event_to_a_reader(job: JobHistory) -> None:
    job.reads[1] = [*job.reads[1], job.reads[1][-1]]


def show_what_is_gone(job: JobHistory) -> None:
    job.reads[0] = [*job.reads[0], Seen(len(job.reads[0]), "more")]


def change_what_was_read(job: JobHistory) -> None:
    job.reads[1] = [*job.reads[1][:-1], Seen(3, "other", (1, 9))]


def disagree_about_the_end(job: JobHistory) -> None:
    job.ends = ["finished", "running"]


def disagree_about_the_log(job: JobHistory) -> None:
    job.logs[1] = log_of(1, 2, end="done")


def never_end(job: JobHistory) -> None:
    job.ends = ["interrupted", "interrupted"]


def abort_by_itself(job: JobHistory) -> None:
    job.ends = ["aborted", "aborted"]


def finish_by_itself(job: JobHistory) -> None:
    job.stopped = [Outcome.REFUSED]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_an_accepted_set, "set 4 was accepted"),
        (lose_a_result, "set 1 was accepted, but has the results"),
        (repeat_a_result, r"result \(1, 0\) is there 2 times"),
        (run_a_refused_set, "set 2, which was refused"),
        (run_a_set_of_nobody, "set 2, which nobody has sent"),
        (half_a_set_without_an_answer, r"set 3 has the results \[0\] only"),
        (leave_a_gap, "offsets have gaps"),
        (give_a_reader_a_gap, "reader 1: the offsets that it was given have gaps"),
        (repeat_an_event_to_a_reader, "reader 1: the offsets that it was given have gaps or repetitions"),
        (show_what_is_gone, "reader 0: it has read 9 events, but 8 are left"),
        (change_what_was_read, r"reader 1: events that it has read are others now: \[3\]"),
        (disagree_about_the_end, "disagree about its end"),
        (disagree_about_the_log, "different logs"),
        (never_end, "but is interrupted"),
        (abort_by_itself, "nobody has cancelled it"),
        (finish_by_itself, "nobody has closed its inputs"),
    ],
)
def test_the_checker_finds_what_is_wrong(change: Callable[[JobHistory], None], message: str) -> None:
    job = right()
    change(job)
    assert re.search(message, "\n".join(problems(job)))


def change_log(job: JobHistory, at: int, **changes: object) -> None:
    log = job.logs[0]
    log[at] = replace(log[at], **changes)  # type: ignore[arg-type]


def repeat_a_recorded_call(job: JobHistory) -> None:
    change_log(job, 2, drawn="b")


def take_two_events(job: JobHistory) -> None:
    change_log(job, 3, event=8)


def take_event(job: JobHistory, value: int) -> None:
    for at in range(1, 4):
        change_log(job, at, event=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repeat_a_recorded_call, r"a recorded call of set 1 was repeated: \['a', 'b'\]"),
        (take_two_events, r"several events: \[7, 8\]"),
        (lambda job: take_event(job, 8), r"the event 8, but \[7\] were accepted before"),
        (lambda job: take_event(job, 9), "the event 9, which was refused"),
        (lambda job: take_event(job, 5), "the event 5, which was never sent"),
    ],
)
def test_the_checker_finds_wrong_events_and_repeated_calls(change: Callable[[JobHistory], None], message: str) -> None:
    job = waited()
    change(job)
    assert re.search(message, "\n".join(problems(job)))


def test_a_takeover_is_the_first_commit_of_another_owner() -> None:
    deaths = [Death(10.0, 1, ["a", "b", "c", "d"])]
    commits = [
        Commit(9.0, 2, ["a"]),
        Commit(10.1, 1, ["a", "c"]),  # it was in flight
        Commit(11.0, 3, ["b"]),
        Commit(12.0, 3, ["a", "b"]),
    ]
    found = takeovers(deaths, commits, {"a": 3, "b": 3, "c": 1, "d": 4})
    assert found == {"a of 1": 2.0, "b of 1": 1.0, "d of 1": float("inf")}
