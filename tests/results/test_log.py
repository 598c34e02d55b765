"""The log of a job: offsets, readers, and what is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dfm_async.errors import ResultsExpired
from dfm_async.model.events import Event, FrameCompleted, Result
from dfm_async.model.options import ResultLimits
from dfm_async.results import log as log_module
from dfm_async.results.log import LogReader, ResultLog


def make(max_items: int = 1000, max_bytes: int = 1 << 30) -> ResultLog:
    return ResultLog("job", ResultLimits(max_items=max_items, max_bytes=max_bytes))


def nothing() -> None:
    pass


class Owner:
    """Calls back when the log is full, and when it has room."""

    def __init__(self, full: Callable[[], None] = nothing, room: Callable[[], None] = nothing) -> None:
        self.log_is_full = full
        self.log_has_room = room


def write(log: ResultLog, count: int = 1, size: int = 0) -> None:
    for _ in range(count):
        log.append(Result(log.end, "p", None, (log.end,), "s", "n"), size)


def is_full(log: ResultLog) -> bool:
    return log.full


def drain(reader: LogReader) -> list[int]:
    found = []
    while (event := reader.next_nowait()) is not None:
        found.append(event.offset)
    return found


def test_events_get_the_offsets_0_1_2() -> None:
    log = make()
    assert (log.first, log.end, log.held) == (0, 0, 0)
    write(log, 2)
    events: list[Event] = [FrameCompleted(2 + i, (i,)) for i in range(3)]
    log.extend(events, 10)
    assert (log.first, log.end, log.held) == (0, 5, 5)
    assert drain(log.reader(None)) == [0, 1, 2, 3, 4]
    assert log.get(3) is events[1]


def test_every_reader_sees_every_event_for_itself() -> None:
    log = make()
    early = log.reader(None)
    write(log, 3)
    late = log.reader(None)
    assert drain(early) == [0, 1, 2]
    write(log, 2)
    assert drain(late) == [0, 1, 2, 3, 4]
    assert drain(early) == [3, 4]


def test_a_reader_begins_behind_the_offset_that_it_names() -> None:
    log = make()
    write(log, 5)
    assert drain(log.reader(2)) == [3, 4]
    assert drain(log.reader(-1)) == [0, 1, 2, 3, 4]
    assert drain(log.reader(4)) == []


def test_reader_behind_a_future_offset_skips_to_it() -> None:
    log = make()
    write(log, 2)
    reader = log.reader(4)
    write(log, 6)
    assert drain(reader) == [5, 6, 7]


def test_the_oldest_events_that_all_readers_have_seen_make_room() -> None:
    log = make(max_items=3)
    fast, slow = log.reader(None), log.reader(None)
    write(log, 3)
    drain(fast)
    slow.next_nowait()
    write(log)
    assert (log.first, log.held, log.full) == (1, 3, False)
    assert drain(slow) == [1, 2, 3]


def test_events_are_kept_while_there_is_room_even_if_all_have_seen_them() -> None:
    log = make(max_items=3)
    drain_me = log.reader(None)
    write(log, 3)
    drain(drain_me)
    assert drain(log.reader(None)) == [0, 1, 2]


def test_a_log_is_full_when_it_can_drop_nothing_and_reports_room() -> None:
    log = make(max_items=2)
    reported: list[str] = []
    log.owner = Owner(full=lambda: reported.append("full"), room=lambda: reported.append("room"))
    slow, fast = log.reader(None), log.reader(None)
    write(log, 2)
    assert not is_full(log)
    write(log, 2)
    drain(fast)
    assert is_full(log)
    assert reported == ["full"]
    slow.next_nowait()
    assert is_full(log), "one is not enough"
    slow.next_nowait()
    assert not is_full(log)
    assert reported == ["full", "room"]
    assert drain(slow) == [2, 3]


def test_bytes_count_as_well_as_items() -> None:
    log = make(max_bytes=100)
    reported: list[str] = []
    log.owner = Owner(room=lambda: reported.append("room"))
    reader = log.reader(None)
    write(log, 1, size=60)
    assert not is_full(log)
    write(log, 1, size=60)
    assert is_full(log)
    reader.next_nowait()
    assert not is_full(log)
    assert reported == ["room"]
    assert log.first == 1
    log.extend([FrameCompleted(2, (0,)), FrameCompleted(3, (0,))], 25)
    assert is_full(log)
    drain(reader)
    assert log.held <= 2
    assert not is_full(log)


def test_a_value_larger_than_the_whole_log_still_passes() -> None:
    log = make(max_bytes=10)
    reader = log.reader(None)
    write(log, 1, size=1000)
    assert is_full(log)
    assert drain(reader) == [0]
    assert not is_full(log)


def test_a_full_log_without_readers_keeps_what_nobody_has_seen() -> None:
    log = make(max_items=2)
    write(log, 5)
    assert is_full(log)
    assert drain(log.reader(None)) == [0, 1, 2, 3, 4]
    assert not is_full(log)


def test_events_without_data_make_room_unseen_when_nobody_reads() -> None:
    log = make(max_items=2)
    for i in range(5):
        log.append(FrameCompleted(i, (i,)))
    assert not is_full(log)
    assert (log.first, log.end) == (3, 5)
    with pytest.raises(ResultsExpired):
        log.reader(None)
    assert drain(log.reader(None, data_only=True)) == [3, 4], "who wants only data misses nothing"


def test_a_data_only_reader_is_refused_when_data_is_gone() -> None:
    log = make(max_items=2)
    reader = log.reader(None)
    write(log, 2)
    drain(reader)
    write(log, 2)
    drain(reader)
    assert log.first == 2
    with pytest.raises(ResultsExpired):
        log.reader(None, data_only=True)
    with pytest.raises(ResultsExpired):
        log.reader(0, data_only=True)
    assert drain(log.reader(1, data_only=True)) == [2, 3]


def test_an_attached_reader_keeps_also_events_without_data() -> None:
    log = make(max_items=2)
    reader = log.reader(None)
    for i in range(5):
        log.append(FrameCompleted(i, (i,)))
    assert is_full(log)
    assert drain(reader) == [0, 1, 2, 3, 4]


def test_detaching_the_slowest_reader_makes_room() -> None:
    log = make(max_items=2)
    reported: list[str] = []
    log.owner = Owner(room=lambda: reported.append("room"))
    fast, slow = log.reader(None), log.reader(None)
    write(log, 4)
    drain(fast)
    assert is_full(log)
    assert log.readers == 2
    slow.close()
    assert log.readers == 1
    assert not is_full(log)
    assert reported == ["room"]
    assert log.held == 2


def test_detaching_the_last_reader_of_a_full_log_reports_it() -> None:
    log = make(max_items=2)
    reported: list[int] = []
    reader = log.reader(None)
    write(log, 4)
    log.owner = Owner(full=lambda: reported.append(log.readers))
    reader.close()
    assert reported == [0]
    reader.close()  # a second time changes nothing
    assert log.readers == 0


def test_a_reader_that_wants_nothing_old_makes_room_in_a_full_log() -> None:
    log = make(max_items=2)
    reported: list[str] = []
    log.owner = Owner(room=lambda: reported.append("room"))
    write(log, 4)
    assert is_full(log)
    reader = log.reader(3)
    assert reader.next_nowait() is None
    assert not is_full(log), "nobody wants what is held, and the reader waits for what cannot be written"
    assert reported == ["room"]


def test_dropped_events_are_freed() -> None:
    class Large:
        pass

    log = make(max_items=2)
    reader = log.reader(None)
    alive = []
    for i in range(3 * log_module._COMPACT):
        value = Large()
        alive.append(weakref.ref(value))
        log.append(Result(i, "p", value, (i,), "s", "n"))
        del value
        reader.next_nowait()
    gc.collect()
    left = sum(ref() is not None for ref in alive)
    assert log.held == 2
    assert left <= log_module._COMPACT + 3, "what is dropped is given back, at the latest with the next clean-up"


def test_expired_results_name_the_first_offset_of_the_log() -> None:
    log = make(max_items=2)
    reader = log.reader(None)
    write(log, 2)
    drain(reader)
    write(log, 3)
    drain(reader)
    assert log.first == 3
    for after, wanted in ((None, 0), (1, 2), (0, 1)):
        with pytest.raises(ResultsExpired) as caught:
            log.reader(after)
        assert (caught.value.job_id, caught.value.wanted, caught.value.first) == ("job", wanted, 3)
    assert drain(log.reader(caught.value.first - 1)) == [3, 4], "the advice of the message works"
    assert [log.get(offset).offset for offset in range(log.first, log.end)] == [3, 4]


def test_a_refused_reader_is_not_attached() -> None:
    log = make(max_items=1)
    reader = log.reader(None)
    write(log, 3)
    drain(reader)
    with pytest.raises(ResultsExpired):
        log.reader(None)
    assert log.readers == 1


def test_a_detached_reader_never_skips_what_it_missed() -> None:
    log = make(max_items=1)
    slow, fast = log.reader(None), log.reader(None)
    write(log, 2)
    slow.close()
    drain(fast)
    write(log, 2)
    drain(fast)
    with pytest.raises(ResultsExpired):
        slow.next_nowait()


async def test_a_waiting_reader_gets_the_next_event_and_then_the_end() -> None:
    log = make()
    reader, other = log.reader(None), log.reader(None)
    waiting = [asyncio.create_task(r.next()) for r in (reader, other)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    write(log)
    log.changed.notify()
    for task in waiting:
        event = await task
        assert event is not None
        assert event.offset == 0
    last = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    log.close()
    assert await last is None
    assert await reader.next() is None


async def test_a_closed_log_gives_what_it_holds_before_it_ends() -> None:
    log = make()
    write(log, 2)
    log.close()
    reader = log.reader(None)
    found = [await reader.next() for _ in range(3)]
    assert [None if event is None else event.offset for event in found] == [0, 1, None]


async def test_a_cancelled_wait_loses_no_event_and_leaves_nothing_behind() -> None:
    log = make()
    reader = log.reader(None)
    task = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not log.changed  # no waiter is left
    write(log)
    log.changed.notify()
    event = await reader.next()
    assert event is not None
    assert event.offset == 0


class Readers(RuleBasedStateMachine):
    """Each attached reader sees every event once and in order, whatever the others do."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(log_module, "_COMPACT", 1)  # clean up often
        self.log = make(max_items=3, max_bytes=50)
        self.log.owner = Owner(room=self._on_room)
        self.room = 0
        self.was_full = False
        self.written = 0
        self.attached: list[tuple[LogReader, list[int], int]] = []

    def _on_room(self) -> None:
        self.room += 1

    @rule(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def write_some(self, sizes: list[int]) -> None:
        for size in sizes:
            write(self.log, 1, size)
        self.written += len(sizes)

    @rule(count=st.integers(1, 4), size=st.integers(0, 10))
    def write_many(self, count: int, size: int) -> None:
        self.log.extend([FrameCompleted(self.log.end + i, (0,)) for i in range(count)], size)
        self.written += count

    @rule(after=st.none() | st.integers(-1, 20))
    def attach(self, after: int | None) -> None:
        start = 0 if after is None else after + 1
        if start > self.written:
            return
        if start < self.log.first:
            with pytest.raises(ResultsExpired):
                self.log.reader(after)
        else:
            self.attached.append((self.log.reader(after), [], start))

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), count=st.integers(1, 5))
    def read(self, data: Any, count: int) -> None:
        reader, seen, _ = data.draw(st.sampled_from(self.attached))
        for _ in range(count):
            event = reader.next_nowait()
            if event is not None:
                seen.append(event.offset)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def detach(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.attached) - 1))
        reader, _, _ = self.attached.pop(index)
        reader.close()

    @invariant()
    def nobody_misses_anything(self) -> None:
        log = self.log
        assert log.end == self.written
        for reader, seen, start in self.attached:
            assert seen == list(range(start, start + len(seen)))
            assert reader.position == start + len(seen)
            assert log.first <= reader.position
        kept = range(log.first, log.end)
        assert [log.get(offset).offset for offset in kept] == list(kept)

    @invariant()
    def it_is_full_only_if_nothing_can_be_dropped(self) -> None:
        log = self.log
        over = log.held > 3 or log.size > 50
        assert log.full == over
        assert log.size == sum(log._sizes[log._start :])
        if over and self.attached and all(seen for _, seen, _ in self.attached):
            assert min(reader.position for reader, _, _ in self.attached) == log.first
        if self.was_full and not log.full:
            assert self.room, "waiters are notified of room"
        self.room = 0
        self.was_full = log.full

    def teardown(self) -> None:
        self.patch.undo()
        for reader, seen, start in self.attached:
            assert seen + drain(reader) == list(range(start, self.written))


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=30, stateful_step_count=25)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 5))
async def test_readers_that_keep_up_through_a_small_log_miss_nothing(batches: list[int], max_items: int) -> None:
    log = make(max_items=max_items)
    room = asyncio.Event()
    log.owner = Owner(room=room.set)

    async def read() -> list[int]:
        reader = log.reader(None)
        found = []
        while (event := await reader.next()) is not None:
            found.append(event.offset)
        return found

    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        for count in batches:
            write(log, count)
            log.changed.notify()
            if log.full:
                room.clear()
                await room.wait()
        log.close()
    assert [task.result() for task in readers] == [list(range(sum(batches)))] * 3


def test_events_that_are_taken_together_are_those_that_come_one_by_one() -> None:
    log = ResultLog("j", ResultLimits(max_items=4))
    for offset in range(6):
        log.append(FrameCompleted(offset, (offset,)))
    reader = log.reader(log.first - 1)
    first = reader.next_nowait()
    assert first is not None
    assert [event.offset for event in (first, *reader.take_nowait(2))] == [2, 3, 4]
    assert [event.offset for event in reader.take_nowait(10)] == [5]
    assert reader.take_nowait(10) == []
    assert reader.position == log.end
    late = log.reader(log.first - 1)
    late.position = 0
    with pytest.raises(ResultsExpired):
        late.take_nowait(1)
