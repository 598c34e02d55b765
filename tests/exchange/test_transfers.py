"""Large parts: offered by one side, pulled in chunks by the other, with a window, checksums where data can be damaged,
and a memory of how far they came (3.4). Without a loop.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import TransferFailed
from dfm_async.exchange import transfers
from dfm_async.exchange.program_messages import Chunk, Message, TransferReport
from dfm_async.exchange.progress import ProgressTracker, Verdict
from dfm_async.exchange.transfers import Download, MemorySink, OutgoingTransfer, Sink, TransferFile

SMALL = 8
"""The size of a chunk in these tests."""
AHEAD = 4 * SMALL
IDLE = 600.0


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "CHUNK", SMALL)
        patch.setattr(transfers, "WINDOW", AHEAD)
        yield


def content(size: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(size))


class Rig:
    """An upload, and what its receivers have reported."""

    def __init__(self, *parts: bytes, receivers: tuple[str, ...] = ("site",), checksums: bool = False) -> None:
        self.now = 0.0
        self.tracker = ProgressTracker(idle_timeout=IDLE, clock=lambda: self.now)
        self.reports: list[TransferReport] = []
        self.parts = dict(enumerate(parts, 1))
        views = {number: memoryview(data) for number, data in self.parts.items()}
        self.upload = OutgoingTransfer("tx", views, receivers, self.tracker, checksums=checksums)

    def report(self, message: Message) -> None:
        """From a receiver to the upload."""
        assert isinstance(message, TransferReport)
        self.reports.append(message)
        self.upload.report(message, self.now)

    def download(self, receiver: str = "site", **rest: Any) -> Download:
        parts = [(number, len(data)) for number, data in self.parts.items()]
        fields: dict[str, Any] = {"send": self.report, "idle_timeout": IDLE, **rest}
        return Download("tx", parts, receiver, clock=lambda: self.now, **fields)

    def take(self) -> list[tuple[Chunk, bytes]]:
        """The chunks that would be sent now."""
        found = []
        while (chunk := self.upload.next_chunk()) is not None:
            found.append((chunk[0], bytes(chunk[1])))
        return found

    def serve(self, *downloads: Download) -> None:
        """Carry chunks until none comes any more."""
        while chunks := self.take():
            for chunk, data in chunks:
                for download in downloads:
                    if download.receiver == chunk.receiver:
                        give(download, chunk, data)


def started(*, checksums: bool = False, **rest: Any) -> tuple[Rig, Download]:
    """The upload of one part of 100 bytes, and a download that has begun."""
    rig = Rig(content(100), checksums=checksums)
    download = rig.download(**rest)
    download.start()
    return rig, download


def give(download: Download, chunk: Chunk, data: bytes) -> None:
    """What a pipe does with a chunk."""
    room = download.room(chunk, len(data))
    if room is not None:
        room[:] = data
    download.received(chunk, len(data) if room is not None else 0)


def pulled(download: Download) -> list[bytes]:
    assert download.ended
    assert download.error is None
    return [bytes(data) for _, data in sorted(download.data.items())]


# the sender's side


def test_never_more_than_the_window_is_sent_ahead_of_what_has_arrived() -> None:
    rig, download = started()
    sent = rig.take()
    assert [chunk.offset for chunk, _ in sent] == [0, 8, 16, 24]
    done = 0
    while sent:
        last, rest = sent[-1]
        assert last.offset + len(rest) <= done + AHEAD
        done += len(sent[0][1])
        give(download, *sent.pop(0))
        sent += rig.take()
    assert pulled(download) == [content(100)]


def test_chunks_are_sent_once_and_the_last_has_the_rest() -> None:
    rig = Rig(content(2 * SMALL + 3))
    for limit in (8, 16, 100):
        rig.report(TransferReport(tx="tx", transfer=1, receiver="site", sequence=limit, bytes_done=0, limit=limit))
    assert [(chunk.offset, len(data)) for chunk, data in rig.take()] == [(0, SMALL), (SMALL, SMALL), (2 * SMALL, 3)]


def test_parts_and_receivers_are_served_in_turn() -> None:
    rig = Rig(content(20), content(20), receivers=("a", "b"))
    for receiver in ("a", "b"):
        rig.download(receiver).start()
    order = [(chunk.receiver, chunk.transfer) for chunk, _ in rig.take()]
    assert order == [("a", 1), ("a", 2), ("b", 1), ("b", 2)] * 3


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(
            TransferReport(tx="tx", transfer=2, receiver="site", sequence=1, bytes_done=0, limit=100), id="unknown part"
        ),
        pytest.param(
            TransferReport(tx="tx", transfer=1, receiver="somebody", sequence=1, bytes_done=0, limit=100),
            id="unknown receiver",
        ),
        *(
            TransferReport(
                tx="tx",
                transfer=1,
                receiver="site",
                sequence=0,
                bytes_done=done,
                state="active",
                limit=1 << 62,
                restart=True,
            )
            for done in (-1, -1000, 101, 1 << 62)
        ),
    ],
)
def test_a_report_that_cannot_be_right_is_ignored(report: TransferReport) -> None:
    rig = Rig(content(100))
    rig.report(report)
    assert rig.take() == []


def test_a_receiver_that_requests_more_than_a_window_gets_a_window() -> None:
    rig = Rig(content(10 * AHEAD))
    rig.report(
        TransferReport(tx="tx", transfer=1, receiver="site", sequence=0, bytes_done=0, state="active", limit=1 << 62)
    )
    assert sum(len(data) for _, data in rig.take()) == AHEAD


def test_an_old_report_sends_nothing_again() -> None:
    rig = Rig(content(100))
    rig.report(TransferReport(tx="tx", transfer=1, receiver="site", sequence=5, bytes_done=8, limit=16))
    rig.take()
    for sequence, done in ((5, 8), (4, 0)):
        rig.report(
            TransferReport(
                tx="tx", transfer=1, receiver="site", sequence=sequence, bytes_done=done, limit=100, restart=True
            )
        )
    assert rig.take() == []


def test_receivers_are_independent_of_each_other() -> None:
    rig = Rig(content(100), content(50), receivers=("fast", "slow", "broken"))
    fast, slow, broken = (rig.download(name) for name in ("fast", "slow", "broken"))
    for download in (fast, slow, broken):
        download.start()
    broken.fail("no room")
    rig.serve(fast)
    assert pulled(fast) == [content(100), content(50)]
    assert not slow.started
    slow.start()  # resumes: what was sent before was dropped
    rig.serve(slow)
    assert pulled(slow) == [content(100), content(50)]
    assert rig.tracker.decide().verdict is Verdict.FAILURE, "one of them failed"


def test_what_is_freed_is_neither_sent_nor_held() -> None:
    data = bytearray(content(100))
    tracker = ProgressTracker(idle_timeout=IDLE, clock=lambda: 0.0)
    upload = OutgoingTransfer("tx", {1: memoryview(data)}, ("site",), tracker)
    upload.report(TransferReport(tx="tx", transfer=1, receiver="site", sequence=0, bytes_done=0, limit=100), 0.0)
    assert upload.next_chunk() is not None
    assert upload.free(), "the receiver does not have everything"
    assert not upload.free()
    assert upload.next_chunk() is None
    upload.report(
        TransferReport(tx="tx", transfer=1, receiver="site", sequence=1, bytes_done=0, limit=100, restart=True), 0.0
    )
    assert upload.next_chunk() is None
    gc.collect()
    data.extend(b"more")  # raises if somebody holds the memory


def test_chunks_have_checksums_only_where_data_can_be_damaged() -> None:
    for checksums in (False, True):
        rig = Rig(content(20), checksums=checksums)
        rig.download().start()
        assert all((chunk.checksum is not None) == checksums for chunk, _ in rig.take())


# the receiver's side, where data can be lost or damaged


def test_a_damaged_chunk_is_requested_again() -> None:
    rig, download = started(retries=3, checksums=True)
    first, *rest = rig.take()
    give(download, first[0], b"x" * SMALL)
    for chunk, data in rest:
        give(download, chunk, data)
    assert not download.started
    assert [report.restart for report in rig.reports] == [False, True], "requested once, not for each that follows"
    rig.serve(download)
    assert pulled(download) == [content(100)]


@pytest.mark.parametrize("retries", [0, 2])
def test_chunks_that_are_damaged_too_often_fail_the_download(retries: int) -> None:
    rig, download = started(retries=retries, checksums=True)
    for _ in range(retries + 1):
        give(download, rig.take()[0][0], b"x" * SMALL)
    assert download.error is not None
    assert (download.error.transfer, download.error.receiver) == ("1", "site")
    assert "at byte 0 were damaged too often" in download.error.reason
    assert rig.reports[-1].state == "failed"
    assert rig.tracker.decide().verdict is Verdict.FAILURE


def test_lost_chunks_are_requested_again_after_the_interval() -> None:
    rig, download = started(retries=3, resend_interval=2.0)
    rig.take()
    assert download.wake_at() == 2
    rig.now = 1.9
    download.wake()
    assert rig.take() == []
    rig.now = 2.0
    download.wake()
    rig.serve(download)
    assert pulled(download) == [content(100)]


def test_unanswered_requests_are_limited_and_end_with_the_idle_timeout() -> None:
    """max_resends re-sends after the first try; the idle timeout decides."""
    rig, download = started(retries=3, resend_interval=2.0)
    while not download.ended:
        rig.now = download.wake_at()
        download.wake()
    assert rig.now == IDLE
    assert download.error is not None
    assert "nothing has come for 600 s, 0 of 100 bytes" in download.error.reason
    assert [report.state for report in rig.reports] == ["active"] * 4 + ["failed"]


BAD = st.sampled_from(["lost", "damaged", "twice"])


@given(
    sizes=st.lists(st.integers(0, 20 * SMALL), min_size=1, max_size=3),
    chunks=st.dictionaries(st.integers(0, 30), BAD, max_size=8),
    reports=st.sets(st.integers(0, 30), max_size=5),
)
def test_bytes_are_right_whatever_is_lost_damaged_or_doubled_within_the_retries(
    sizes: list[int], chunks: dict[int, str], reports: set[int]
) -> None:
    rig = Rig(*map(content, sizes), checksums=True)
    sent = carried = 0

    def report(message: Message) -> None:
        nonlocal sent
        assert isinstance(message, TransferReport)
        sent += 1
        if sent - 1 not in reports or message.state != "active":
            rig.upload.report(message, rig.now)

    retries = sum(kind != "twice" for kind in chunks.values()) + len(reports)
    download = rig.download(send=report, retries=retries, resend_interval=2.0)
    download.start()
    while not download.ended:
        for chunk, data in rig.take():
            fate = chunks.get(carried, "fine")
            carried += 1
            if fate == "damaged":
                give(download, chunk, bytes(byte ^ 1 for byte in data))
            elif fate != "lost":
                for _ in range(2 if fate == "twice" else 1):
                    give(download, chunk, data)
        if not download.ended and not rig.upload.has_chunks:
            rig.now = download.wake_at()
            download.wake()
    assert pulled(download) == [content(size) for size in sizes]


# the receiver's side, on every transport


def test_chunks_that_come_twice_or_were_not_requested_are_ignored() -> None:
    rig, download = started()
    (chunk, data), *rest = rig.take()
    give(download, chunk, data)
    give(download, chunk, data)
    for foreign, piece in (
        (Chunk("tx", 1, "site", -8), b"x" * SMALL),
        (Chunk("tx", 1, "site", SMALL), b""),
        (Chunk("tx", 1, "site", SMALL), b"x" * 200),
        (Chunk("tx", 2, "site", 0), b"x" * SMALL),
    ):
        assert download.room(foreign, len(piece)) is None
        give(download, foreign, piece)
    for chunk, data in rest:
        give(download, chunk, data)
    rig.serve(download)
    assert pulled(download) == [content(100)]


def test_a_chunk_that_came_while_nobody_pulled_is_not_taken_for_a_damaged_one() -> None:
    rig, download = started(checksums=True)
    chunk, _ = rig.take()[0]
    download.received(chunk, 0)
    assert not download.started
    download.start()
    rig.serve(download)
    assert pulled(download) == [content(100)]


def test_an_interrupted_download_resumes_where_it_was() -> None:
    rig, download = started()
    *given_, dropped = rig.take()
    for chunk, data in given_:
        give(download, chunk, data)
    rig.take()
    download.start()
    again = rig.take()
    assert again[0][0].offset == 3 * SMALL, "what has arrived is not sent again"
    give(download, Chunk("tx", 1, "site", 5 * SMALL), dropped[1])  # sent before the sender knew
    for chunk, data in again:
        give(download, chunk, data)
    rig.serve(download)
    assert rig.tracker.complete
    assert not rig.upload.free(), "nobody has to be notified"
    assert pulled(download) == [content(100)]


def test_a_download_without_progress_fails_after_the_idle_timeout() -> None:
    rig, download = started()
    rig.now = IDLE - 1
    give(download, *rig.take()[0])
    rig.now = 2 * IDLE - 2
    download.wake()
    assert not download.ended, "the time counts from the last chunk"
    rig.now = download.wake_at()
    download.wake()
    assert download.error is not None
    assert "8 of 100 bytes have arrived" in download.error.reason
    assert rig.reports[-1].state == "failed"


def test_a_failed_download_stays_failed_and_reports_it_once() -> None:
    rig, download = started()
    download.fail("first", "aborted")
    download.fail("second")
    download.start()
    assert [report.state for report in rig.reports] == ["active", "aborted"]
    assert download.error is not None
    assert download.error.reason == "first"


def test_one_part_that_fails_fails_the_others() -> None:
    rig = Rig(content(100), content(100))
    download = rig.download()
    download.start()
    chunk, data = next(found for found in rig.take() if found[0].transfer == 2 and found[0].offset)
    give(download, chunk, data)
    assert download.error is not None
    assert download.error.transfer == "2"
    assert [(report.transfer, report.state) for report in rig.reports[-2:]] == [(2, "failed"), (1, "aborted")]


def test_a_part_without_bytes_is_complete_at_once() -> None:
    rig = Rig(b"", content(3))
    download = rig.download()
    download.start()
    rig.serve(download)
    assert pulled(download) == [b"", content(3)]
    assert rig.tracker.complete


@pytest.mark.parametrize("parts", [[(1, 5), (1, 6)], [(1, 5), (2, -1)], [(1, 1 << 62)]])
def test_parts_for_which_there_is_no_room_are_refused(parts: list[tuple[int, int]]) -> None:
    reports: list[Any] = []
    with pytest.raises(TransferFailed):
        Download("tx", parts, "site", send=reports.append, clock=lambda: 0.0, idle_timeout=IDLE)
    assert reports[-1].state == "failed"


def test_a_full_disk_fails_the_download_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    rig = Rig(content(100))
    sink: Callable[[int, int], Sink] = lambda number, size: TransferFile(size, str(tmp_path / str(number)))  # noqa: E731
    download = rig.download(sink=sink)
    download.start()
    monkeypatch.setattr(os, "pwrite", full)
    rig.serve(download)
    assert download.error is not None
    assert "No space left on device" in download.error.reason
    assert rig.reports[-1].state == "failed"


# where the bytes go


@pytest.mark.parametrize(("size", "step"), [(100, 10), (100, 100), (0, 1)], ids=["chunks", "one chunk", "empty"])
def test_sinks_return_what_was_kept_and_it_can_be_written_to(tmp_path: Path, size: int, step: int) -> None:
    sinks: list[Sink] = [MemorySink(size), TransferFile(size, str(tmp_path / "part"))]
    for sink in sinks:
        for offset in range(0, size, step):
            sink.room(offset, step)[:] = content(size)[offset : offset + step]
            sink.keep(offset, step)
        found = sink.finish()
        assert bytes(found) == content(size)
        if size:
            found[0] = 255
        found.release()
    assert (tmp_path / "part").read_bytes() == content(size), "the file is not changed by what is done in memory"


def test_a_file_sink_is_private_and_does_not_touch_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        TransferFile(10, str(path))
    assert path.read_bytes() == b"mine"
    sink = TransferFile(10, str(tmp_path / "other"))
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
    sink.discard()


def test_a_file_sink_holds_no_descriptor_after_its_end(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    abandoned = TransferFile(10, str(tmp_path / "a"))
    abandoned.discard()
    abandoned.discard()
    done = TransferFile(10, str(tmp_path / "b"))
    done.room(0, 10)[:] = content(10)
    done.keep(0, 10)
    found = done.finish()
    done.discard()
    assert bytes(found) == content(10)
    found.release()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
