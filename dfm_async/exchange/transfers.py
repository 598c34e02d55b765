"""Transfers of large parts of tasks and results: offered by one side, pulled in chunks by the other.

The receiver reports how far it is and how far the sender may go; that bounds the memory of both. Where a transport can
lose data, chunks carry checksums, and those that are lost or damaged are requested again. An interrupted receiver
resumes where it was. Nothing here waits: the clock is injected, and messages are returned or passed to a callback.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import xxhash

from dfm_async.errors import TransferFailed
from dfm_async.exchange.program_messages import Chunk, Message, TransferReport
from dfm_async.exchange.progress import ProgressTracker, TransferState

CHUNK: Final = 256 * 1024
"""The number of bytes in a chunk: about what the kernel takes at once, so that little has to be kept."""
WINDOW: Final = 16 * CHUNK
"""How many bytes a sender may be ahead of what the receiver has."""

_checksum: Final = xxhash.xxh3_64_intdigest


@dataclass(slots=True)
class _UploadStream:
    """One transfer to one receiver."""

    transfer: int
    receiver: str
    data: memoryview
    position: int = 0
    limit: int = 0
    queued: bool = False


class OutgoingTransfer:
    """Holds the large parts of one task or result until all receivers have them.

    Args:
        tx: the id of the task or result.
        parts: the bytes, by number.
        receivers: the names of the receivers that will pull them.
        tracker: gets the reports of the receivers.
        checksums: whether chunks carry checksums.
    """

    def __init__(
        self,
        tx: str,
        parts: Mapping[int, memoryview],
        receivers: Sequence[str],
        tracker: ProgressTracker,
        *,
        checksums: bool = False,
    ) -> None:
        self.tx = tx
        self.tracker = tracker
        self.reported_at = -math.inf
        """When the last report came."""
        self._checksums = checksums
        self._streams = {
            (transfer, receiver): _UploadStream(transfer, receiver, data)
            for transfer, data in parts.items()
            for receiver in receivers
        }
        self._ready: deque[_UploadStream] = deque()
        tracker.expect(tx, [(str(transfer), receiver) for transfer, receiver in self._streams])

    def report(self, report: TransferReport, now: float) -> None:
        """Take a receiver's report, and make ready the chunks that it requests."""
        self.reported_at = now
        stream = self._streams.get((report.transfer, report.receiver))
        if stream is not None and not 0 <= report.bytes_done <= len(stream.data):
            return  # a receiver that miscounts would be served for ever
        refused = self.tracker.update(
            report.tx, str(report.transfer), report.receiver, report.sequence, report.bytes_done, None, report.state
        )
        if stream is None or refused:
            return
        if TransferState.of(report.state) is not TransferState.ACTIVE:
            del self._streams[report.transfer, report.receiver]
            stream.limit = 0
            return
        if report.restart:
            stream.position = report.bytes_done
        stream.limit = min(report.limit, report.bytes_done + WINDOW, len(stream.data))
        if not stream.queued and stream.position < stream.limit:
            stream.queued = True
            self._ready.append(stream)

    @property
    def has_chunks(self) -> bool:
        """Whether :meth:`next_chunk` may have one."""
        return bool(self._ready)

    def next_chunk(self) -> tuple[Chunk, memoryview] | None:
        """Return the next chunk to send, of each receiver in turn; None if nobody has requested one."""
        while self._ready:
            stream = self._ready.popleft()
            start = stream.position
            piece = stream.data[start : min(start + CHUNK, stream.limit)]
            stream.position += len(piece)
            stream.queued = stream.position < stream.limit
            if stream.queued:
                self._ready.append(stream)
            if piece:
                checksum = _checksum(piece) if self._checksums else None
                return Chunk(self.tx, stream.transfer, stream.receiver, start, checksum), piece
        return None

    def free(self) -> bool:
        """Release the bytes; they can no longer be pulled.

        Returns:
            Whether a receiver did not have everything.
        """
        wanted = bool(self._streams)
        self._streams.clear()
        self._ready.clear()
        return wanted


class MemorySink:
    """Keeps a transfer in memory: each chunk is written to its room, and kept if it is complete and correct."""

    def __init__(self, size: int) -> None:
        # Not a bytearray: that would write zeros to all of it first.
        room: mmap.mmap | bytearray = bytearray()
        if size:  # no system maps nothing
            room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._all = memoryview(room)

    def room(self, offset: int, size: int) -> memoryview:
        """Return the memory for a chunk."""
        return self._all[offset : offset + size]

    def keep(self, offset: int, size: int) -> None:
        """Do nothing: the chunk is where it belongs."""

    def finish(self) -> memoryview:
        """Return all bytes."""
        return self._all

    def discard(self) -> None:
        """Free the memory."""
        self._all = memoryview(b"")


class TransferFile:
    """Writes a transfer to a file, so that memory holds only one chunk of it; the finished file is mapped.

    Args:
        size: the number of bytes that will come.
        path: the file; it must not exist. The caller removes it.
    """

    def __init__(self, size: int, path: str) -> None:
        self._size = size
        self._path = path
        self._piece = memoryview(bytearray(min(CHUNK, size)))  # raises if the size is negative
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def room(self, offset: int, size: int) -> memoryview:
        """Return the memory for a chunk."""
        del offset
        if size > len(self._piece):
            self._piece = memoryview(bytearray(size))
        return self._piece[:size]

    def keep(self, offset: int, size: int) -> None:
        """Write the chunk."""
        with self._piece[:size] as piece:
            written = 0
            while written < size:
                written += os.pwrite(self._file, piece[written:], offset + written)

    def finish(self) -> memoryview:
        """Map the file. Changes to what is mapped stay in memory."""
        try:
            if not self._size:  # no system maps that
                return memoryview(b"")
            return memoryview(mmap.mmap(self._file, self._size, flags=mmap.MAP_PRIVATE))
        finally:
            self._close()

    def discard(self) -> None:
        """Close the file."""
        if self._file >= 0:
            self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1
        self._piece = memoryview(b"")


Sink: TypeAlias = MemorySink | TransferFile
"""The destination of the bytes of a transfer."""


@dataclass(slots=True)
class _DownloadPart:
    """One part of a download."""

    number: int
    size: int
    sink: Sink
    retries: int
    """How many more chunks that were damaged or lost may be requested again."""
    attempts: int
    """How many more times the next chunk may be requested when nothing comes."""
    done: int = 0
    """The number of bytes that are complete and correct."""
    requested: bool = False
    """Whether the chunk at ``done`` was requested again: what comes before it was sent earlier."""
    requested_at: float = -math.inf
    reported: int = 0
    sequence: Iterator[int] = field(default_factory=itertools.count)
    moved: float = 0.0


class Download:
    """Pulls all large parts of one task or result for one receiver.

    Args:
        tx: the id of the task or result.
        parts: the numbers and sizes of its parts.
        receiver: the name of the receiver.
        sink: makes the destination of a part, from its number and size.
        send: sends a message to the other side.
        clock: returns the time, in seconds.
        idle_timeout: how long a part may make no progress, in seconds.
        resend_interval: after how long without progress the next chunk is requested again, in seconds.
        retries: the number of times that chunks are requested again; 0 where none can be lost.

    Attributes:
        data: the parts that are complete, by number.
        error: why it failed; None if it has not.

    Raises:
        TransferFailed: there is no room for a part. The other side is notified.
    """

    def __init__(
        self,
        tx: str,
        parts: Sequence[tuple[int, int]],
        receiver: str,
        sink: Callable[[int, int], Sink] = lambda _number, size: MemorySink(size),
        *,
        send: Callable[[Message], None],
        clock: Callable[[], float],
        idle_timeout: float,
        resend_interval: float = math.inf,
        retries: int = 0,
    ) -> None:
        self.tx = tx
        self.receiver = receiver
        self.data: dict[int, memoryview] = {}
        self.error: TransferFailed | None = None
        self._send = send
        self._clock = clock
        self._idle_timeout = idle_timeout
        self._resend_interval = resend_interval
        self._retries = retries
        self._requested = False
        self._open: dict[int, _DownloadPart] = {}
        if len({number for number, _ in parts}) < len(parts):
            send(
                TransferReport(tx=tx, transfer=parts[0][0], receiver=receiver, sequence=0, bytes_done=0, state="failed")
            )
            raise TransferFailed("all", receiver, "several parts have the same number")
        for number, size in parts:
            try:
                self._open[number] = _DownloadPart(number, size, sink(number, size), retries, retries)
            except (OSError, MemoryError, OverflowError, ValueError) as error:
                self.fail("there is no room for another part", "aborted")
                send(
                    TransferReport(tx=tx, transfer=number, receiver=receiver, sequence=0, bytes_done=0, state="failed")
                )
                raise TransferFailed(str(number), receiver, f"no room for {size:,} bytes: {error}") from error

    @property
    def key(self) -> tuple[str, str]:
        """The task or result, and the receiver."""
        return (self.tx, self.receiver)

    @property
    def started(self) -> bool:
        """Whether any bytes have arrived."""
        return bool(self.data) or any(part.done for part in self._open.values())

    @property
    def ended(self) -> bool:
        """Whether all parts are complete, or it has failed."""
        return not self._open

    def start(self) -> None:
        """Request the first chunks, or resume after an interruption."""
        now = self._clock()
        for part in list(self._open.values()):
            if self.error is not None:
                break
            part.moved = now
            self._report(part, restart=self._requested)
            part.requested = self._requested
            if not part.size:  # there is nothing to wait for
                self._finish(part)
        self._requested = True

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """Return the memory for a chunk; None if it is not the next one of its part."""
        part = self._open.get(chunk.transfer)
        if part is None or chunk.offset != part.done or not 0 < size <= part.size - part.done:
            return None
        return part.sink.room(chunk.offset, size)

    def received(self, chunk: Chunk, size: int) -> None:
        """Take a chunk that was written to the memory that :meth:`room` gave; of size 0 if there was none."""
        part = self._open.get(chunk.transfer)
        if part is None:
            return
        if chunk.offset > part.done and not part.requested:
            self._request_again(part, "lost")
            return
        if chunk.offset != part.done or not 0 < size <= part.size - part.done:
            return  # sent before the sender knew that it must go back
        if chunk.checksum is not None and _checksum(part.sink.room(chunk.offset, size)) != chunk.checksum:
            self._request_again(part, "damaged")
            return
        try:
            part.sink.keep(chunk.offset, size)
        except OSError as error:
            self._fail_part(part, f"it cannot be kept: {error}")
            return
        part.done += size
        part.requested = False
        part.attempts = self._retries
        part.moved = self._clock()
        if part.done == part.size:
            self._finish(part)
        elif part.done - part.reported >= WINDOW // 4:
            self._report(part)

    def wake_at(self) -> float:
        """Return the time at which :meth:`wake` has to be called."""
        return min((due for part in self._open.values() for due in self._due(part)), default=math.inf)

    def _due(self, part: _DownloadPart) -> Iterator[float]:
        yield part.moved + self._idle_timeout
        if part.attempts:
            yield max(part.moved, part.requested_at) + self._resend_interval

    def wake(self) -> None:
        """Fail parts that have been idle for too long, and request chunks that have not come."""
        now = self._clock()
        for part in list(self._open.values()):
            idle, *again = self._due(part)
            if now >= idle:
                done = f"{part.done:,} of {part.size:,} bytes have arrived"
                self._fail_part(part, f"nothing has come for {self._idle_timeout:g} s, {done}")
                return
            if again and now >= again[0]:
                part.attempts -= 1
                part.requested, part.requested_at = True, now
                self._report(part, restart=True)

    def _request_again(self, part: _DownloadPart, what: str) -> None:
        part.retries -= 1
        if part.retries < 0:
            self._fail_part(part, f"chunks at byte {part.done} were {what} too often")
        else:
            part.requested = True
            self._report(part, restart=True)

    def _finish(self, part: _DownloadPart) -> None:
        try:
            found = part.sink.finish()
        except (OSError, ValueError) as error:
            self._fail_part(part, f"it cannot be kept: {error}")
        else:
            self._report(part, "completed")
            self.data[part.number] = found
            self._open.pop(part.number, None)

    def fail(self, reason: str, state: str = "failed") -> None:
        """Abandon all parts that are not complete, and report it."""
        parts, self._open = list(self._open.values()), {}
        for part in parts:
            self._report(part, state)
            part.sink.discard()
        if parts and self.error is None:
            self.error = TransferFailed(str(parts[0].number), self.receiver, reason)

    def _fail_part(self, part: _DownloadPart, reason: str) -> None:
        del self._open[part.number]
        self._report(part, "failed")
        part.sink.discard()
        self.error = TransferFailed(str(part.number), self.receiver, reason)
        self.fail("another part of the same value failed", "aborted")

    def _report(self, part: _DownloadPart, state: str = "active", *, restart: bool = False) -> None:
        part.reported = part.done
        sequence, limit = next(part.sequence), part.done + WINDOW
        self._send(
            TransferReport(
                tx=self.tx,
                transfer=part.number,
                receiver=self.receiver,
                sequence=sequence,
                bytes_done=part.done,
                state=state,
                limit=limit,
                restart=restart,
            )
        )
