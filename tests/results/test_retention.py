"""Ended jobs keep what was not read, and drop what was when it is too much."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from dfm_async.errors import ResultsExpired
from dfm_async.model.events import Result
from dfm_async.model.limits import ResultLimits
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


def test_logs_are_not_kept_by_it() -> None:
    retention = Retention(100 * MIB)
    log = filled(3)
    retention.ended(log)
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
