"""Ended jobs keep what was not read, and drop what was when it is too much."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from dfm_async.errors import ResultsExpired
from dfm_async.model.events import Result
from dfm_async.model.options import ResultLimits
from dfm_async.results.log import ResultLog
from dfm_async.results.retention import Retention

MIB = 1 << 20


class Value:
    """Can be watched."""


def filled(count: int, value: Any = None, read: bool = True) -> ResultLog:
    log = ResultLog("job", ResultLimits())
    for offset in range(count):
        log.append(Result(offset, "p", value, (0,), "s", "n"), MIB)
    log.close()
    if read:
        reader = log.reader(None)
        while reader.next_nowait() is not None:
            pass
        reader.close()
    return log


def test_the_oldest_drop_what_was_read() -> None:
    retention = Retention(10 * MIB)
    logs = [filled(4) for _ in range(4)]
    for log in logs:
        retention.ended(log)
    assert [log.size // MIB for log in logs] == [0, 0, 4, 4]
    with pytest.raises(ResultsExpired):
        logs[0].reader(None)
    assert logs[3].reader(None).next_nowait() is not None


def test_what_nobody_has_read_stays() -> None:
    retention = Retention(MIB)
    unread, read = filled(5, read=False), filled(5)
    retention.ended(unread)
    retention.ended(read)
    assert (unread.held, read.held) == (5, 0)


def test_what_was_read_later_goes_later() -> None:
    retention = Retention(MIB)
    log = filled(5, read=False)
    retention.ended(log)
    reader = log.reader(None)
    while reader.next_nowait() is not None:
        retention.tidy()
    assert log.held == 1, "as many as fit"


def test_the_oldest_logs_are_dropped_unread_when_all_take_too_much() -> None:
    retention = Retention(unread_limit=10 * MIB)
    logs = [filled(4, read=False) for _ in range(5)]
    for log in logs:
        retention.ended(log)
    assert [log.held for log in logs] == [0, 0, 0, 4, 4]
    with pytest.raises(ResultsExpired, match="keep_finished_bytes"):
        logs[0].reader(None)


def test_many_small_logs_are_bounded_together() -> None:
    retention = Retention(unread_limit=MIB)
    logs = []
    for _ in range(100):
        log = ResultLog("job", ResultLimits())
        for offset in range(200):
            log.append(Result(offset, "p", None, (0,), "s", "n"), 1)
        log.close()
        logs.append(log)
        retention.ended(log)
    assert sum(log.weight for log in logs) <= MIB
    assert [log.held for log in logs] == sorted(log.held for log in logs), "the oldest have gone first"
    assert logs[-1].held == 200


def test_the_log_of_the_last_job_stays_however_large_it_is() -> None:
    retention = Retention(unread_limit=MIB)
    first, last = filled(5, read=False), filled(5, read=False)
    retention.ended(first)
    assert first.held == 5
    retention.ended(last)
    assert (first.held, last.held) == (0, 5)


def test_a_log_that_is_being_read_is_dropped_when_its_reader_leaves() -> None:
    retention = Retention(unread_limit=MIB)
    first = filled(5, read=False)
    reader = first.reader(None)
    retention.ended(first)
    retention.ended(filled(5, read=False))
    assert [reader.next_nowait() is not None for _ in range(6)] == [True] * 5 + [False]
    reader.close()
    assert first.held == 0


def test_the_logs_of_the_heaviest_label_are_dropped_first() -> None:
    retention = Retention(unread_limit=10 * MIB)
    quiet = filled(1, read=False)
    retention.ended(quiet, "bob")
    loud = [filled(4, read=False) for _ in range(6)]
    for log in loud:
        retention.ended(log, "mallory")
    assert [log.held for log in loud] == [0, 0, 0, 0, 4, 4]
    assert quiet.held == 1
    late = filled(3, read=False)
    retention.ended(late, "bob")
    assert [log.held for log in (quiet, *loud[-2:], late)] == [1, 0, 4, 3]


def test_a_log_that_was_forgotten_does_not_count() -> None:
    retention = Retention(unread_limit=10 * MIB)
    first, second, last = (filled(4, read=False) for _ in range(3))
    for log in (first, second):
        retention.ended(log)
    retention.forget(first)
    retention.ended(last)
    assert [log.held for log in (first, second, last)] == [4, 4, 4]


def test_logs_that_were_forgotten_are_not_referenced() -> None:
    retention = Retention(MIB, unread_limit=100 * MIB)
    log = filled(3)
    retention.ended(log)
    retention.forget(log)
    gone = weakref.ref(log)
    del log
    assert gone() is None
    retention.tidy()


def test_a_log_does_not_keep_the_values_that_it_has_dropped() -> None:
    value = Value()
    gone = weakref.ref(value)
    log = ResultLog("job", ResultLimits(max_items=3))
    reader = log.reader(None)
    log.append(Result(0, "p", value, (0,), "s", "n"))
    reader.next_nowait()
    del value
    gc.collect()
    assert gone() is not None
    for offset in range(1, 5):
        log.append(Result(offset, "p", None, (0,), "s", "n"))
        reader.next_nowait()
    assert gone() is None
    assert log.held == 3
