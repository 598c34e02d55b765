"""Large parts of tasks and results: offered by one side, pulled in chunks by the other.

The receiver says how far it is and how far the sender may go; that bounds the memory of both. Chunks are checked, and
asked for again where they were damaged. A receiver that was interrupted goes on where it was.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import xxhash

from dfm_async.errors import TransferFailed
from dfm_async.exchange.messages import Chunk, Message, Report
from dfm_async.exchange.progress import ProgressTracker, TransferState
from dfm_async.exchange.tasks import OwnedTasks

__all__ = ["CHUNK", "WINDOW", "FileSink", "MemorySink", "Outlet", "Pull", "Sink", "Source"]

CHUNK: Final = 256 * 1024
"""How many bytes are sent at a time: about what the kernel takes at once, so that little has to be kept."""
WINDOW: Final = 16 * CHUNK
"""How far a sender may be ahead of what the receiver has."""

_checksum: Final = xxhash.xxh3_64_intdigest


class Outlet(Protocol):
    """Where messages go out, with a limit on what waits."""

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queues a message."""
        ...

    async def drain(self) -> None:
        """Waits until there is room for more."""
        ...


# The sender's side.


class _Stream:
    """One transfer to one receiver."""

    __slots__ = ("busy", "data", "limit", "position", "receiver", "transfer")

    def __init__(self, transfer: int, receiver: str, data: memoryview) -> None:
        self.transfer = transfer
        self.receiver = receiver
        self.data = data
        self.position = 0
        self.limit = 0
        self.busy = False


class Source:
    """Holds the large parts of one task or result until all receivers have them.

    Args:
        tx: the id of the task or result.
        parts: the bytes, by number.
        receivers: who will pull them.
        out: where chunks go.
        tasks: the owner of what is started here.
        tracker: is told what the receivers report.
        on_change: is called when a pair has ended.
    """

    def __init__(
        self,
        tx: str,
        parts: Mapping[int, memoryview],
        receivers: Sequence[str],
        *,
        out: Outlet,
        tasks: OwnedTasks,
        tracker: ProgressTracker,
        on_change: Callable[[], None],
    ) -> None:
        self.tx = tx
        self.tracker = tracker
        self._out = out
        self._tasks = tasks
        self._on_change = on_change
        self._streams = {
            (transfer, receiver): _Stream(transfer, receiver, data)
            for transfer, data in parts.items()
            for receiver in receivers
        }
        tracker.expect(tx, [(str(transfer), receiver) for transfer, receiver in self._streams])

    def report(self, report: Report) -> None:
        """Takes a receiver's word, and sends what it asks for."""
        stream = self._streams.get((report.transfer, report.receiver))
        if stream is not None and not 0 <= report.bytes_done <= len(stream.data):
            return  # a receiver that cannot count would be served for ever
        refused = self.tracker.update(
            report.tx, str(report.transfer), report.receiver, report.sequence, report.bytes_done, None, report.state
        )
        if stream is None or refused:
            return
        if TransferState.of(report.state) is not TransferState.ACTIVE:
            del self._streams[report.transfer, report.receiver]
            stream.limit = 0
            self._on_change()
            return
        if report.restart:
            stream.position = report.bytes_done
        stream.limit = min(report.limit, report.bytes_done + WINDOW, len(stream.data))
        if not stream.busy and stream.position < stream.limit:
            stream.busy = True
            self._tasks.start(self._serve(stream), f"transfer {stream.transfer} of {self.tx}")

    async def _serve(self, stream: _Stream) -> None:
        try:
            while stream.position < stream.limit:
                start = stream.position
                piece = stream.data[start : min(start + CHUNK, stream.limit)]
                stream.position += len(piece)
                head = Chunk(self.tx, stream.transfer, stream.receiver, start, _checksum(piece))
                self._out.send(head, piece)
                await self._out.drain()
        finally:
            stream.busy = False

    def free(self) -> bool:
        """Lets go of the bytes. What is asked for later is not there.

        Returns:
            Whether somebody had not got everything.
        """
        wanted = bool(self._streams)
        for stream in self._streams.values():
            stream.limit = 0
        self._streams.clear()
        return wanted


# The receiver's side.


class Sink(Protocol):
    """Where the bytes of a transfer go."""

    def room(self, offset: int, size: int) -> memoryview:
        """Gives the place for a chunk."""
        ...

    def keep(self, offset: int, size: int) -> None:
        """The chunk is there, and good."""
        ...

    def finish(self) -> memoryview:
        """Everything is there: gives all of it."""
        ...

    def discard(self) -> None:
        """It will not be finished."""
        ...


class MemorySink:
    """Keeps a transfer in memory."""

    def __init__(self, size: int) -> None:
        # Not a bytearray: that would write zeros to all of it first.
        room: mmap.mmap | bytearray = bytearray()
        if size:  # no system maps nothing
            room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._all = memoryview(room)

    def room(self, offset: int, size: int) -> memoryview:
        """Gives the place for a chunk."""
        return self._all[offset : offset + size]

    def keep(self, offset: int, size: int) -> None:
        """The chunk is where it belongs already."""

    def finish(self) -> memoryview:
        """Gives all of it."""
        return self._all

    def discard(self) -> None:
        """Lets go of it."""
        self._all = memoryview(b"")


class FileSink:
    """Writes a transfer to a file, so that memory holds only one chunk of it; the finished file is mapped.

    Args:
        size: how many bytes will come.
        path: the file; it must not exist. Whoever gives the path removes the file.
    """

    def __init__(self, size: int, path: str) -> None:
        self._size = size
        self._path = path
        self._piece = memoryview(bytearray(min(CHUNK, size)))  # raises if the size is negative
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def room(self, offset: int, size: int) -> memoryview:
        """Gives the place for a chunk."""
        del offset
        if size > len(self._piece):
            self._piece = memoryview(bytearray(size))
        return self._piece[:size]

    def keep(self, offset: int, size: int) -> None:
        """Writes the chunk."""
        with self._piece[:size] as piece:
            written = 0
            while written < size:
                written += os.pwrite(self._file, piece[written:], offset + written)

    def finish(self) -> memoryview:
        """Maps the file. Changes to what is mapped stay in memory."""
        try:
            if not self._size:  # no system maps that
                return memoryview(b"")
            return memoryview(mmap.mmap(self._file, self._size, flags=mmap.MAP_PRIVATE))
        finally:
            self._close()

    def discard(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1
        self._piece = memoryview(b"")


class Pull:
    """Pulls one transfer for one receiver.

    Args:
        tx: the id of the task or result.
        transfer: which part of it.
        receiver: for whom.
        size: how many bytes it has.
        sink: where they go.
        send: sends a message to the other side.
        retries: how many chunks that were damaged or lost are asked for again, and how often in silence.
    """

    def __init__(
        self,
        tx: str,
        transfer: int,
        receiver: str,
        size: int,
        sink: Sink,
        *,
        send: Callable[[Message], None],
        retries: int = 3,
    ) -> None:
        self.tx = tx
        self.transfer = transfer
        self.receiver = receiver
        self.size = size
        self.done = 0
        """How many bytes are there and good."""
        self._sink = sink
        self._send = send
        self._retries = retries
        self._asks = self._patience = retries
        self._asked = False
        """Whether the chunk at ``done`` was asked for again: what comes meanwhile was sent before."""
        self._asked_at = 0.0
        self._begun = False
        self._reported = 0
        self._sequence = itertools.count()
        self._moved = 0.0
        self._ended: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    @property
    def key(self) -> tuple[str, int, str]:
        """What chunks for it carry."""
        return (self.tx, self.transfer, self.receiver)

    def begin(self) -> None:
        """Asks for the first chunks, or goes on after an interruption where it was."""
        self._moved = asyncio.get_running_loop().time()
        if self._ended.done():
            return
        self._report(restart=self._begun)
        self._asked = self._begun
        self._begun = True
        if not self.size:  # there is nothing to wait for
            self._finish()

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """The place for a chunk, if it is the next one."""
        if self._ended.done() or chunk.offset != self.done or not 0 < size <= self.size - self.done:
            return None
        return self._sink.room(chunk.offset, size)

    def arrived(self, chunk: Chunk, size: int) -> None:
        """A chunk has come, to the place that was given for it; of size 0 if there was none."""
        if self._ended.done():
            return
        if chunk.offset > self.done and not self._asked:
            self._again("lost")
            return
        if chunk.offset != self.done or not 0 < size <= self.size - self.done:
            return  # sent before the sender knew that it must go back
        if _checksum(self._sink.room(chunk.offset, size)) != chunk.checksum:
            self._again("damaged")
            return
        try:
            self._sink.keep(chunk.offset, size)
        except OSError as error:
            self.fail(f"it cannot be kept: {error}")
            return
        self.done += size
        self._asked = False
        self._asks = self._patience
        self._moved = asyncio.get_running_loop().time()
        if self.done < self.size:
            if self.done - self._reported >= WINDOW // 4:
                self._report()
            return
        self._finish()

    def _again(self, what: str) -> None:
        """Asks for the next chunk once more."""
        self._retries -= 1
        if self._retries < 0:
            self.fail(f"chunks at byte {self.done} were {what} too often")
        else:
            self._asked = True
            self._report(restart=True)

    def _finish(self) -> None:
        try:
            found = self._sink.finish()
        except (OSError, ValueError) as error:
            self.fail(f"it cannot be kept: {error}")
        else:
            self._report("completed")
            self._ended.set_result(found)

    def fail(self, reason: str, state: str = "failed") -> None:
        """Gives up."""
        if not self._ended.done():
            self._report(state)
            self._sink.discard()
            self._ended.set_exception(TransferFailed(str(self.transfer), self.receiver, reason))
            self._ended.exception()  # whoever waits gets it; nobody has to

    async def wait(self, idle_timeout: float, resend_interval: float = math.inf) -> memoryview:
        """Waits until everything is there. One whose wait was cancelled can go on by :meth:`begin`.

        Args:
            idle_timeout: how long it may stand still, in seconds.
            resend_interval: how long it may stand still before it is asked for again, in seconds.

        Raises:
            TransferFailed: it stood still for too long, chunks were damaged too often, or the other side is gone.
        """
        loop = asyncio.get_running_loop()
        while not self._ended.done():
            now = loop.time()
            due = self._moved + idle_timeout
            if now >= due:
                self.fail(f"nothing has come for {idle_timeout:g} s, {self.done:,} of {self.size:,} bytes are there")
                break
            again = max(self._moved, self._asked_at) + resend_interval if self._asks else due
            if now >= again:
                self._asks -= 1
                self._asked, self._asked_at = True, now
                self._report(restart=True)
            else:
                await asyncio.wait({self._ended}, timeout=min(due, again) - now)
        return self._ended.result()

    def _report(self, state: str = "active", *, restart: bool = False) -> None:
        limit = self.done + WINDOW
        self._reported = self.done
        report = Report(self.tx, self.transfer, self.receiver, next(self._sequence), self.done, state, limit, restart)
        self._send(report)
