"""The events and times that parameter sets wait for: step by step, and in random orders with interruptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.engine.waits import (
    EVENT_BYTES,
    EVENTS_KEPT,
    KEPT_BYTES,
    Begun,
    Effect,
    Over,
    WaitLedger,
    WaitReply,
    read_event,
)
from dfm_async.errors import ParameterError
from dfm_async.model.events import EventSent, WaitBegan, WaitEnded
from dfm_async.model.json_data import read_json

A, B = (0, 0), (0, 1)


def ledger() -> WaitLedger:
    return WaitLedger(keep=True)


def replies(effects: Sequence[Effect]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(effect.frame, effect.value) for effect in effects if isinstance(effect, WaitReply)]


def test_the_first_event_goes_to_the_first_wait_that_began() -> None:
    waits = ledger()
    assert waits.begin(0, "Wait#1", A, "go", None, 1.0) == [Begun(0, "Wait#1", A, "go", None)]
    waits.begin(0, "Wait#1", B, "go", None, 2.0)
    assert waits.send(0, "go", "1", 3.0) == (Over(0, "Wait#1", A, "go", "1"), WaitReply(0, "Wait#1", A, "1"))
    assert replies(waits.send(0, "go", "2", 4.0)) == [(B, "2")]


def test_an_event_is_kept_until_a_wait_of_its_set_takes_it() -> None:
    waits = ledger()
    assert waits.send(0, "go", "1", 1.0) == ()
    assert replies(waits.begin(0, "Wait#1", (1,), "go", None, 2.0)) == []
    assert replies(waits.begin(0, "Wait#1", (0,), "stop", None, 2.0)) == []
    assert replies(waits.begin(0, "Wait#1", A, "go", None, 2.0)) == [(A, "1")]


def test_a_wait_ends_when_its_time_is_over_and_later_events_are_kept() -> None:
    waits = ledger()
    waits.begin(0, "Wait#1", A, "go", 10.0, 100.0)
    assert waits.due() == 110.0
    assert waits.expire(109.0) == []
    assert replies(waits.expire(110.0)) == [(A, None)]
    assert waits.due() is None
    assert waits.send(0, "go", "1", 111.0) == ()
    assert replies(waits.begin(0, "Wait#2", A, "go", 10.0, 112.0)) == [(A, "1")]


def test_a_set_that_runs_again_gets_the_same_events_and_the_same_times() -> None:
    waits = ledger()
    waits.send(0, "go", "1", 1.0)
    waits.begin(0, "Wait#1", A, "go", None, 2.0)
    waits.begin(0, "Sleep#2", A, "", 10.0, 3.0)
    waits.restart()
    assert waits.due() is None
    assert waits.waiting(10) == ()
    assert waits.begin(0, "Wait#1", A, "go", None, 5.0) == [WaitReply(0, "Wait#1", A, "1")]
    assert waits.begin(0, "Sleep#2", A, "", 10.0, 6.0) == []
    assert waits.due() == 13.0
    waits.restart()
    assert replies(waits.begin(0, "Sleep#2", A, "", 10.0, 20.0)) == [(A, None)]


def test_an_event_that_was_sent_in_time_counts_although_the_wait_goes_on_later() -> None:
    waits = ledger()
    waits.begin(0, "Wait#1", A, "go", 10.0, 0.0)
    waits.restart()
    waits.send(0, "go", "1", 9.0)
    assert replies(waits.begin(0, "Wait#1", A, "go", 10.0, 30.0)) == [(A, "1")]


def test_an_event_that_was_sent_too_late_stays_for_the_next_wait() -> None:
    waits = ledger()
    waits.begin(0, "Wait#1", A, "go", 10.0, 0.0)
    waits.restart()
    waits.send(0, "go", "1", 11.0)
    assert replies(waits.begin(0, "Wait#1", A, "go", 10.0, 30.0)) == [(A, None)]
    assert replies(waits.begin(0, "Wait#2", A, "go", 10.0, 30.0)) == [(A, "1")]


def test_a_set_that_is_done_leaves_nothing() -> None:
    waits = ledger()
    waits.send(0, "go", "1", 1.0)
    waits.begin(0, "Wait#1", A, "stop", 5.0, 2.0)
    waits.done(0)
    assert not waits
    assert waits.due() is None
    assert waits.waiting(10) == ()


def test_without_a_second_run_what_is_over_is_dropped() -> None:
    waits = WaitLedger(keep=False)
    for number in range(3):
        waits.begin(0, "Sleep#1", (0, number), "", 1.0, float(number))
        waits.expire(number + 1.0)
        assert not waits


def test_a_set_has_a_limit_of_events() -> None:
    waits = ledger()
    for _ in range(EVENTS_KEPT):
        assert waits.limit(0, "go") is None
        waits.send(0, "go", "1", 1.0)
    assert waits.limit(0, "go") == "parameter set 0 has 1,000 events that were not taken, which is the limit"
    assert waits.limit(1, "go") is None
    waits.begin(0, "Wait#1", A, "go", None, 2.0)
    assert waits.limit(0, "go") is None


@pytest.mark.parametrize("keep", [False, True])
def test_a_job_has_a_limit_of_bytes_of_events(keep: bool) -> None:
    waits, value = WaitLedger(keep=keep), f'"{"x" * (EVENT_BYTES - 2)}"'
    sent = 0
    while (full := waits.limit(sent % 2, "go")) is None:
        waits.send(sent % 2, "go", value, 1.0)
        sent += 1
    assert full == "the events of all parameter sets take 64 MB, which is the limit"
    assert sent == KEPT_BYTES // EVENT_BYTES
    assert waits.limit(2, "go") == full
    waits.begin(0, "Wait#1", (2,), "go", None, 2.0)  # it waits: an event need not be kept
    assert waits.limit(2, "go") == (full if keep else None)
    waits.begin(0, "Wait#1", (0,), "go", None, 2.0)  # it takes one, which is kept if the set can run again
    assert waits.limit(3, "go") == (full if keep else None)
    waits.done(0)
    assert waits.limit(3, "go") is None
    while waits.limit(3, "go") is None:
        waits.send(3, "go", value, 1.0)
    waits.clear()
    assert waits.limit(3, "go") is None


def test_events_of_the_log_count_for_the_limit_of_bytes() -> None:
    waits, value = ledger(), "x" * (EVENT_BYTES - 2)
    for number in range(KEPT_BYTES // EVENT_BYTES):
        assert waits.limit(number, "go") is None
        waits.logged(EventSent(number, (number,), "go", value, 1.0))
    assert waits.limit(0, "go") is not None


@pytest.mark.parametrize(
    "value", ["", "{", "NaN", r'"\ud800"', "[" * 60_000, f'"{"x" * EVENT_BYTES}"', f'"{"é" * (EVENT_BYTES // 2)}"']
)
def test_values_that_are_too_large_or_not_json_are_refused(value: str) -> None:
    with pytest.raises(ParameterError, match=r"'go' is (larger than 64|not JSON)"):
        read_event("go", value)


class _Run:
    """A ledger with its log: what a job would show, and write to a store."""

    def __init__(self) -> None:
        self.waits = ledger()
        self.log: list[Any] = []
        self.got: dict[tuple[str, tuple[int, ...]], str | None] = {}
        self.asking: set[tuple[str, tuple[int, ...]]] = set()

    def note(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Begun(_, node, frame, event, until):
                    self.log.append(WaitBegan(len(self.log), frame, "", node, event, until))
                case Over(_, node, frame, event, value):
                    self.log.append(
                        WaitEnded(len(self.log), frame, "", node, event, "time" if value is None else "event")
                    )
                case WaitReply(_, node, frame, value):
                    assert (node, frame) in self.asking
                    self.asking.discard((node, frame))
                    assert self.got.setdefault((node, frame), value) == value  # what was decided stays

    def begin(self, node: str, frame: tuple[int, ...], event: str, seconds: float | None, now: float) -> None:
        if (node, frame) not in self.asking:
            self.asking.add((node, frame))
            self.note(self.waits.begin(0, node, frame, event, seconds, now))

    def send(self, index: int, event: str, value: int, now: float) -> None:
        self.log.append(EventSent(len(self.log), (index,), event, value, now))
        self.note(self.waits.send(index, event, str(value), now))


waits_of = {"Wait#1": ("go", None), "Wait#2": ("go", 4.0), "Wait#3": ("stop", 2.0), "Sleep#4": ("", 3.0)}
frames = st.sampled_from([(0,), (1, 0), (1, 1)])
steps = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(sorted(waits_of)), frames),
    st.tuples(st.just("send"), st.sampled_from(["go", "stop"]), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.just(""), st.integers(0, 3)),
    st.tuples(st.sampled_from(["restart", "resume"]), st.just(""), st.just(0)),
)


@given(st.lists(steps, max_size=40))
def test_every_event_is_taken_once_and_nothing_changes_by_interruptions(found: list[Any]) -> None:
    run, now, sent = _Run(), 0.0, 0
    for step, name, given_value in found:
        if step == "begin":
            run.begin(name, given_value, *waits_of[name], now)
        elif step == "send":
            sent += 1
            run.send(given_value, name, sent, now)
        elif step == "wait":
            now += given_value
            run.note(run.waits.expire(now))
            assert run.waits.due() is None or run.waits.due() > now
        else:
            if step == "restart":
                run.waits.restart()
            else:
                run.waits = ledger()
                for event in run.log:
                    run.waits.logged(event)
            again, run.asking = sorted(run.asking), set()
            for node, frame in again:
                run.begin(node, frame, *waits_of[node], now)
            for node, frame in sorted(run.got):  # a set that runs again asks for everything
                run.begin(node, frame, *waits_of[node], now)
    taken = [value for value in run.got.values() if value is not None]
    assert len(set(taken)) == len(taken)
    for node, frame, name, until in ((w.node, w.frame, w.name, w.until) for w in run.waits.waiting(100)):
        assert (node, frame) in run.asking
        kept = {e.value for e in run.log if isinstance(e, EventSent) and (e.frame[0], e.name) == (frame[0], name)}
        late = {e.value for e in run.log if isinstance(e, EventSent) and until is not None and e.sent > until}
        assert kept - late <= {read_json(value) for value in taken}  # nothing waits for an event that is there
