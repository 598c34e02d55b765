"""Large parts: offered by one side, pulled in chunks by the other, with a window, checksums and a memory for where
it was (3.4).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import TransferFailed
from dfm_async.exchange import transfers
from dfm_async.exchange.messages import Chunk, Message, Report
from dfm_async.exchange.progress import ProgressTracker, Verdict
from dfm_async.exchange.tasks import OwnedTasks
from dfm_async.exchange.transfers import FileSink, MemorySink, Pull, Sink, Source
from tests.exchange.virtual import idle, virtual

SMALL = 8
"""The size of a chunk in these tests."""
AHEAD = 4 * SMALL
IDLE = 600.0


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    with mock.patch.multiple(transfers, CHUNK=SMALL, WINDOW=AHEAD):
        yield


def content(size: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(size))


class Outlet:
    """Keeps what is sent. Drains when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Chunk, bytes]] = []
        self.open = asyncio.Event()
        self.open.set()

    def send(self, message: Message, data: memoryview | None = None) -> None:
        assert isinstance(message, Chunk)
        assert data is not None
        self.sent.append((message, bytes(data)))

    async def drain(self) -> None:
        await self.open.wait()

    def take(self) -> list[tuple[Chunk, bytes]]:
        found, self.sent = self.sent, []
        return found


class Rig:
    """A source with an outlet, and what its receivers have said to it."""

    def __init__(self, parts: dict[int, bytes], receivers: tuple[str, ...] = ("site",)) -> None:
        self.out = Outlet()
        self.tasks = OwnedTasks()
        self.tracker = ProgressTracker(idle_timeout=IDLE, clock=asyncio.get_running_loop().time)
        self.changes = 0
        self.reports: list[Report] = []
        self.parts = parts
        views = {number: memoryview(data) for number, data in parts.items()}
        self.source = Source(
            "tx",
            views,
            receivers,
            out=self.out,
            tasks=self.tasks,
            tracker=self.tracker,
            on_change=self._changed,
        )

    def _changed(self) -> None:
        self.changes += 1

    def tell(self, message: Message) -> None:
        """From a receiver to the source."""
        assert isinstance(message, Report)
        self.reports.append(message)
        self.source.report(message)

    def pull(self, number: int = 1, receiver: str = "site", *, sink: Sink | None = None, retries: int = 3) -> Pull:
        size = len(self.parts[number])
        return Pull("tx", number, receiver, size, sink or MemorySink(size), send=self.tell, retries=retries)


def give(pull: Pull, chunk: Chunk, data: bytes) -> None:
    """What a pipe does with a chunk."""
    room = pull.room(chunk, len(data))
    if room is not None:
        room[:] = data
    pull.arrived(chunk, len(data) if room is not None else 0)


async def serve(rig: Rig, *pulls: Pull) -> None:
    """Carries chunks until none comes any more."""
    await idle()
    while chunks := rig.out.take():
        for chunk, data in chunks:
            for pull in pulls:
                if pull.key == (chunk.tx, chunk.transfer, chunk.receiver):
                    give(pull, chunk, data)
        await idle()


def with_small_chunks(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on a loop of its own, with chunks of a few bytes."""

    @functools.wraps(work)
    def run(**arguments: Any) -> None:
        with small_chunks():
            virtual(work(**arguments))  # type: ignore[arg-type]

    return run


# the sender's side


@with_small_chunks
async def test_nothing_is_sent_before_it_is_asked_for() -> None:
    rig = Rig({1: content(100)})
    await idle()
    assert rig.out.sent == []
    assert rig.source.free()


@with_small_chunks
async def test_never_more_than_the_window_is_sent_ahead_of_what_has_arrived() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull()
    pull.begin()
    await idle()
    assert [chunk.offset for chunk, _ in rig.out.sent] == [0, 8, 16, 24]
    while rig.out.sent:
        last, rest = rig.out.sent[-1]
        assert last.offset + len(rest) <= pull.done + AHEAD
        give(pull, *rig.out.sent.pop(0))
        await idle()
    assert bytes(await pull.wait(IDLE)) == content(100)


@with_small_chunks
async def test_a_sender_whose_outlet_is_full_waits_after_each_chunk() -> None:
    rig = Rig({1: content(100)})
    rig.out.open.clear()
    rig.pull().begin()
    await idle()
    assert len(rig.out.sent) == 1
    rig.out.open.set()
    await idle()
    assert len(rig.out.sent) == 4


@with_small_chunks
async def test_the_last_chunk_has_what_is_left() -> None:
    rig = Rig({1: content(SMALL + 3)})
    rig.pull().begin()
    await idle()
    assert [len(data) for _, data in rig.out.sent] == [SMALL, 3]


@with_small_chunks
async def test_one_task_serves_a_stream_however_often_it_is_asked() -> None:
    rig = Rig({1: content(100)})
    rig.out.open.clear()
    pull = rig.pull()
    pull.begin()
    for _ in range(5):
        pull.begin()
    await idle()
    assert len(rig.tasks) == 1
    await rig.tasks.close()


@with_small_chunks
async def test_a_change_is_told_when_a_pair_ends_and_not_before() -> None:
    rig = Rig({1: content(20)})
    pull = rig.pull()
    pull.begin()
    await idle()
    assert rig.changes == 0
    await serve(rig, pull)
    assert rig.changes == 1
    assert rig.tracker.complete
    assert not rig.source.free(), "everybody has everything"


@with_small_chunks
async def test_reports_of_strangers_are_ignored() -> None:
    rig = Rig({1: content(100)})
    rig.tell(Report("tx", 2, "site", 1, 0, limit=100))
    rig.tell(Report("tx", 1, "somebody", 1, 0, limit=100))
    await idle()
    assert rig.out.sent == []


@pytest.mark.parametrize("done", [-1, -1000, 101, 1 << 62])
@with_small_chunks
async def test_a_receiver_that_cannot_count_gets_nothing(done: int) -> None:
    rig = Rig({1: content(100)})
    rig.tell(Report("tx", 1, "site", 0, done, "active", 1 << 62, True))
    await idle()
    assert rig.out.take() == []
    await rig.tasks.close()


@with_small_chunks
async def test_a_receiver_that_asks_for_more_than_a_window_gets_a_window() -> None:
    rig = Rig({1: content(10 * AHEAD)})
    rig.tell(Report("tx", 1, "site", 0, 0, "active", 1 << 62))
    await idle()
    assert sum(len(data) for _, data in rig.out.take()) == AHEAD
    await rig.tasks.close()


@with_small_chunks
async def test_an_old_report_does_not_send_anything_again() -> None:
    rig = Rig({1: content(100)})
    rig.tell(Report("tx", 1, "site", 5, 8, limit=16))
    await idle()
    rig.out.take()
    rig.tell(Report("tx", 1, "site", 5, 8, limit=100, restart=True))
    rig.tell(Report("tx", 1, "site", 4, 0, limit=100, restart=True))
    await idle()
    assert rig.out.sent == []


@with_small_chunks
async def test_receivers_are_independent_of_each_other() -> None:
    rig = Rig({1: content(100), 2: content(50)}, ("fast", "slow", "broken"))
    fast = [rig.pull(number, "fast") for number in (1, 2)]
    slow = [rig.pull(number, "slow") for number in (1, 2)]
    broken = rig.pull(1, "broken")
    for pull in (*fast, *slow, broken):
        pull.begin()
    broken.fail("no room")
    await serve(rig, *fast)
    assert [bytes(await pull.wait(IDLE)) for pull in fast] == [content(100), content(50)]
    assert [pull.done for pull in slow] == [0, 0]
    for pull in slow:
        pull.begin()  # what was sent to it before got lost
    await serve(rig, *slow)
    assert [bytes(await pull.wait(IDLE)) for pull in slow] == [content(100), content(50)]
    assert rig.tracker.decide().verdict is Verdict.FAILURE, "one of them failed"


@with_small_chunks
async def test_what_is_freed_is_not_served_and_not_held() -> None:
    data = bytearray(content(100))
    rig = Rig({1: bytes(1)})
    rig.source = Source(
        "tx2",
        {1: memoryview(data)},
        ("site",),
        out=rig.out,
        tasks=rig.tasks,
        tracker=rig.tracker,
        on_change=rig._changed,
    )
    rig.out.open.clear()
    rig.source.report(Report("tx2", 1, "site", 0, 0, limit=100))
    await idle()
    assert len(rig.out.take()) == 1
    assert rig.source.free(), "the receiver has not got everything"
    assert not rig.source.free()
    rig.out.open.set()
    await idle()
    assert rig.out.sent == []
    rig.source.report(Report("tx2", 1, "site", 1, 0, limit=100, restart=True))
    await idle()
    assert rig.out.sent == []
    gc.collect()
    data.extend(b"more")  # raises if somebody holds the memory


# the receiver's side


@with_small_chunks
async def test_a_damaged_chunk_is_asked_for_again() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull()
    pull.begin()
    await idle()
    first, *rest = rig.out.take()
    give(pull, first[0], b"x" * SMALL)
    for chunk, data in rest:
        give(pull, chunk, data)
    assert pull.done == 0
    assert [report.restart for report in rig.reports] == [False, True], "asked for once, not for each that follows"
    await serve(rig, pull)
    assert bytes(await pull.wait(IDLE)) == content(100)


@with_small_chunks
async def test_chunks_that_are_damaged_too_often_end_it() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=2)
    pull.begin()
    for _ in range(3):
        await idle()
        give(pull, rig.out.take()[0][0], b"x" * SMALL)
    with pytest.raises(TransferFailed, match="at byte 0 were damaged too often") as caught:
        await pull.wait(IDLE)
    assert (caught.value.transfer, caught.value.receiver) == ("1", "site")
    assert rig.reports[-1].state == "failed"
    assert rig.tracker.decide().verdict is Verdict.FAILURE


@with_small_chunks
async def test_without_retries_the_first_damage_ends_it() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=0)
    pull.begin()
    await idle()
    give(pull, rig.out.take()[0][0], b"x" * SMALL)
    with pytest.raises(TransferFailed, match="damaged"):
        await pull.wait(IDLE)


@with_small_chunks
async def test_a_chunk_that_got_lost_is_asked_for_when_the_next_one_comes() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=1)
    pull.begin()
    await idle()
    for chunk, data in rig.out.take()[1:]:
        give(pull, chunk, data)
    await serve(rig, pull)
    assert bytes(await pull.wait(IDLE)) == content(100)


@with_small_chunks
async def test_when_all_chunks_of_a_window_got_lost_they_are_asked_for_again_after_a_while() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull()
    pull.begin()
    await idle()
    rig.out.take()
    waiting = asyncio.ensure_future(pull.wait(IDLE, 2))
    await asyncio.sleep(1.9)
    assert rig.out.sent == []
    await asyncio.sleep(0.2)
    await serve(rig, pull)
    assert bytes(await waiting) == content(100)


@with_small_chunks
async def test_silence_is_asked_into_only_so_often_and_then_ends_it() -> None:
    """max_resends re-sends after the first try; the idle timeout decides."""
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=3)
    pull.begin()
    with pytest.raises(TransferFailed, match=r"nothing has come for 600 s, 0 of 100 bytes"):
        await pull.wait(IDLE, 2)
    assert [report.state for report in rig.reports] == ["active"] * 4 + ["failed"]


@with_small_chunks
async def test_chunks_that_come_twice_or_that_nobody_asked_for_are_ignored() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=0)
    pull.begin()
    await idle()
    (chunk, data), *rest = rig.out.take()
    give(pull, chunk, data)
    give(pull, chunk, data)
    assert pull.done == SMALL
    good = transfers._checksum(b"")
    for foreign, piece in (
        (Chunk("tx", 1, "site", -8, good), b"x" * SMALL),
        (Chunk("tx", 1, "site", SMALL, good), b""),
        (Chunk("tx", 1, "site", SMALL, good), b"x" * 200),
    ):
        assert pull.room(foreign, len(piece)) is None
        give(pull, foreign, piece)
    assert pull.done == SMALL
    for chunk, data in rest:
        give(pull, chunk, data)
    await serve(rig, pull)
    assert bytes(await pull.wait(IDLE)) == content(100)


@with_small_chunks
async def test_a_chunk_for_which_there_was_no_room_is_not_taken_for_a_damaged_one() -> None:
    """It began to come while nobody pulled, and ended when somebody did again."""
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=0)
    pull.begin()
    await idle()
    chunk, _ = rig.out.take()[0]
    pull.arrived(chunk, 0)
    assert pull.done == 0
    pull.begin()
    await serve(rig, pull)
    assert bytes(await pull.wait(IDLE)) == content(100)


@with_small_chunks
async def test_a_pull_whose_wait_was_cancelled_goes_on_where_it_was() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull(retries=0)
    pull.begin()
    waiting = asyncio.ensure_future(pull.wait(IDLE))
    await idle()
    for chunk, data in rig.out.take()[:3]:
        give(pull, chunk, data)
    waiting.cancel()
    await idle()
    lost = rig.out.take()
    assert lost, "this came while nobody waited"
    assert pull.done == 3 * SMALL
    pull.begin()
    await idle()
    assert rig.out.sent[0][0].offset == 3 * SMALL, "what is there is not sent again"
    late, data = lost[-1]
    give(pull, late, data)  # sent before the sender knew
    await serve(rig, pull)
    assert bytes(await pull.wait(IDLE)) == content(100)


@with_small_chunks
async def test_a_transfer_that_stands_still_ends_after_the_idle_timeout() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull()
    pull.begin()
    waiting = asyncio.ensure_future(pull.wait(IDLE))
    await asyncio.sleep(IDLE - 1)
    chunk, data = rig.out.take()[0]
    give(pull, chunk, data)
    await asyncio.sleep(IDLE - 1)
    assert not waiting.done(), "the time counts from the last chunk"
    await asyncio.sleep(2)
    with pytest.raises(TransferFailed, match="8 of 100 bytes are there"):
        await waiting
    assert rig.reports[-1].state == "failed"


@with_small_chunks
async def test_a_pull_that_failed_stays_so_and_is_told_once() -> None:
    rig = Rig({1: content(100)})
    pull = rig.pull()
    pull.begin()
    pull.fail("first", "aborted")
    pull.fail("second")
    pull.begin()
    assert [report.state for report in rig.reports] == ["active", "aborted"]
    with pytest.raises(TransferFailed, match="first"):
        await pull.wait(IDLE)


@with_small_chunks
async def test_nobody_has_to_wait_for_a_pull_that_failed() -> None:
    """The loop would complain about an exception that nobody has seen."""
    rig = Rig({1: content(100)})
    rig.pull().fail("nobody looks")
    await idle()
    gc.collect()


@with_small_chunks
async def test_a_part_without_bytes_is_there_at_once() -> None:
    rig = Rig({1: b""})
    pull = rig.pull()
    pull.begin()
    assert bytes(await pull.wait(IDLE)) == b""
    assert rig.tracker.complete


BAD = st.sampled_from(["lost", "damaged", "twice"])


@given(
    size=st.integers(1, 20 * SMALL),
    chunks=st.dictionaries(st.integers(0, 30), BAD, max_size=8),
    reports=st.sets(st.integers(0, 30), max_size=5),
)
def test_whatever_is_lost_damaged_or_doubled_within_the_retries_the_bytes_are_right(
    size: int, chunks: dict[int, str], reports: set[int]
) -> None:
    async def main() -> None:
        rig = Rig({1: content(size)})
        sent = 0

        def tell(message: Message) -> None:
            nonlocal sent
            assert isinstance(message, Report)
            sent += 1
            if sent - 1 not in reports:
                rig.source.report(message)

        retries = sum(kind != "twice" for kind in chunks.values()) + len(reports)
        pull = Pull("tx", 1, "site", size, MemorySink(size), send=tell, retries=retries)
        pull.begin()
        waiting = asyncio.ensure_future(pull.wait(IDLE, 2))
        carried = 0
        while not waiting.done():
            await idle()
            for chunk, data in rig.out.take():
                fate = chunks.get(carried, "fine")
                carried += 1
                if fate == "damaged":
                    give(pull, chunk, bytes(byte ^ 1 for byte in data))
                elif fate != "lost":
                    for _ in range(2 if fate == "twice" else 1):
                        give(pull, chunk, data)
            if not rig.out.sent:
                await asyncio.wait({waiting}, timeout=1)
        assert bytes(waiting.result()) == content(size)
        rig.source.free()
        await rig.tasks.close()

    with small_chunks():
        virtual(main())


# where the bytes go


def sinks(tmp_path: Path, size: int) -> list[Sink]:
    return [MemorySink(size), FileSink(size, str(tmp_path / "part"))]


def test_both_sinks_give_what_was_kept_and_it_can_be_written_to(tmp_path: Path) -> None:
    for sink in sinks(tmp_path, 100):
        for offset in range(0, 100, 10):
            sink.room(offset, 10)[:] = content(100)[offset : offset + 10]
            sink.keep(offset, 10)
        found = sink.finish()
        assert bytes(found) == content(100)
        found[0] = 255
        found.release()
    assert (tmp_path / "part").read_bytes() == content(100), "the file is not changed by what is done in memory"


def test_both_sinks_have_room_for_nothing(tmp_path: Path) -> None:
    for sink in sinks(tmp_path, 0):
        assert bytes(sink.finish()) == b""


def test_a_file_sink_is_private_and_does_not_touch_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        FileSink(10, str(path))
    assert path.read_bytes() == b"mine"
    sink = FileSink(10, str(tmp_path / "other"))
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
    sink.discard()


def test_a_file_sink_holds_no_descriptor_after_its_end(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    given_up = FileSink(10, str(tmp_path / "a"))
    given_up.discard()
    given_up.discard()
    done = FileSink(10, str(tmp_path / "b"))
    done.room(0, 10)[:] = content(10)
    done.keep(0, 10)
    found = done.finish()
    done.discard()
    assert bytes(found) == content(10)
    found.release()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_sink_takes_chunks_that_are_larger_than_usual(tmp_path: Path) -> None:
    with small_chunks():
        sink = FileSink(100, str(tmp_path / "part"))
        sink.room(0, 100)[:] = content(100)
        sink.keep(0, 100)
        assert bytes(sink.finish()) == content(100)


def test_a_full_disk_ends_the_transfer_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        rig = Rig({1: content(100)})
        pull = rig.pull(sink=FileSink(100, str(tmp_path / "part")))
        pull.begin()
        monkeypatch.setattr(os, "pwrite", full)
        await serve(rig, pull)
        with pytest.raises(TransferFailed, match=r"cannot be kept: .*No space left"):
            await pull.wait(IDLE)
        assert rig.reports[-1].state == "failed"

    with small_chunks():
        virtual(main())
