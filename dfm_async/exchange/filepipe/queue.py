"""Messages as files in folders, in both directions of one channel.

``<root>/<channel>/x`` holds what is for the active end, the program; ``y`` what is for the passive end, the site; and
``t`` what is being written or read. A message is written in ``t`` and moved to where it is read from; the reader moves
it back to ``t``, reads it and deletes it. So a message is there as a whole or not at all, and what is gone was taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import io
import logging
import os
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from dfm_async.exchange.filepipe.names import MessageName, format_name, parse_name
from dfm_async.exchange.filepipe.sections import Buffer
from dfm_async.exchange.filepipe.watch import FolderWatch
from dfm_async.runtime.once import in_thread

__all__ = ["DirectoryQueue", "Received", "Sent", "Side"]

_log = logging.getLogger(__name__)

_INLINE: Final = 256 * 1024
"""Larger files are written and read in threads; for smaller ones, starting a thread takes longer than that."""
_PIECE: Final = 4 * 1024 * 1024
"""How much is written until the next look whether it is still wanted."""
_TICK: Final = 1000
"""The nanoseconds between two messages: the peer compares times as floats, which are no finer than 240 of them."""


class Side(enum.Enum):
    """The end of a channel at which a queue is. The values are the folders of what comes and of what goes."""

    ACTIVE = ("x", "y")
    PASSIVE = ("y", "x")


@dataclass(frozen=True, slots=True)
class Received:
    """A message that has come.

    Attributes:
        name: what it is.
        data: its content.
    """

    name: MessageName
    data: bytes


class Sent:
    """A message on its way to the peer.

    Attributes:
        name: what it is.
    """

    def __init__(self, queue: DirectoryQueue, name: MessageName, path: Path) -> None:
        self.name = name
        self._queue = queue
        self._path = path
        self._taken: bool | None = None

    @property
    def settled(self) -> bool:
        """Whether it is known what became of the message."""
        return self._look() is not None

    async def gone(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - a message is taken back at its end
        """Waits until the peer has taken the message, and tells whether it has.

        It has not if the message was taken back, or deleted unread, as the peer does between two tasks. A message is
        taken back when the time is over, or the wait is cancelled.

        Raises:
            ConnectionResetError: the peer has removed the folders.
            ConnectionAbortedError: the queue was closed.
        """
        try:
            async with asyncio.timeout(timeout):
                while (taken := self._look()) is None:
                    await self._queue.changed()
                return taken
        except TimeoutError:
            return not self.take_back()
        except asyncio.CancelledError:
            self.take_back()
            raise

    def take_back(self) -> bool:
        """Deletes the message if the peer has not taken it yet. Tells whether the peer has not got it."""
        if self._taken is None:
            try:
                self._path.unlink()
                self.settle(False)
            except FileNotFoundError:
                self._queue.catch_up()
                self.settle(self._path.parent.is_dir())
            self._queue.wake()
        return not self._taken

    def settle(self, taken: bool) -> None:
        """Takes note of what became of the message; what is known first counts."""
        if self._taken is None:
            self._taken = taken

    def _look(self) -> bool | None:
        if self._taken is None:
            self._queue.check()
            if not os.path.lexists(self._path):
                self._queue.catch_up()  # it may say that the file was deleted
                if self._taken is None:
                    self._queue.check()
                    self._taken = True
        return self._taken


class DirectoryQueue:
    """Sends and receives messages at one end of one channel.

    Use it with ``async with``; it belongs to one event loop. ``async for`` gives messages until the queue is closed.

    Args:
        root: the folder of all channels, made if there is none.
        channel: the name of the channel, such as ``task``.
        side: at which end this is.
    """

    def __init__(self, root: Path | str, channel: str, side: Side) -> None:
        if channel in ("", ".", "..") or "/" in channel or "\0" in channel:
            raise ValueError(f"{channel!r} cannot be the name of a channel")
        self._path = Path(root).absolute() / channel
        inbox, outbox = side.value
        self._inbox = self._path / inbox
        self._outbox = self._path / outbox
        self._temporary = self._path / "t"
        self._made: list[Path] = []
        self._watch: FolderWatch | None = None
        self._closed = False
        self._sent: weakref.WeakValueDictionary[str, Sent] = weakref.WeakValueDictionary()
        self._last = 0
        self._ready: deque[str] = deque()
        self._strange: set[str] = set()
        self._getting = asyncio.Lock()
        self._reading: asyncio.Task[Received] | None = None

    def open(self) -> None:
        """Makes the folders that are missing, for nobody else to see, and begins to watch."""
        if self._closed or self._watch is not None:
            raise RuntimeError("a queue is opened once")
        missing = [folder for folder in self._path.parents if not folder.exists()]
        for folder in (*reversed(missing), self._path, self._inbox, self._outbox, self._temporary):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
                self._made.append(folder)
        self._watch = FolderWatch(self._inbox, self._outbox, self._left)

    async def __aenter__(self) -> DirectoryQueue:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, remove: bool = False) -> None:
        """Ends everything that waits for messages. One that is being read is lost, unless somebody waits for it.

        Args:
            remove: whether to delete the folders that this queue has made, with all messages in them.
        """
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        if (reading := self._reading) is not None:
            await asyncio.wait([reading])
            reading.exception()  # nobody else may ask for it
        if remove:
            self._remove()

    def _remove(self) -> None:
        for folder in reversed(self._made):
            if folder == self._path or folder.parent == self._path:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # others use it, too
                    folder.rmdir()
        self._made.clear()

    # the folders

    def check(self) -> None:
        """Raises if nothing can come or go any more.

        Raises:
            ConnectionResetError: the peer has removed the folders, as the passive end does when it closes.
            ConnectionAbortedError: the queue was closed, or not opened yet.
        """
        if self._closed or self._watch is None:
            raise ConnectionAbortedError(f"the queue at {self._path} is not open")
        if self._watch.is_broken or not (self._inbox.is_dir() and self._outbox.is_dir() and self._temporary.is_dir()):
            raise ConnectionResetError(f"the peer has removed {self._path}")

    async def changed(self) -> None:
        """Waits until something has happened in the folders, or it is time to look anyway."""
        if self._watch is not None and not self._closed:
            await self._watch.wait()

    def catch_up(self) -> None:
        """Takes note of what has happened in the folders by now."""
        if self._watch is not None:
            self._watch.drain()

    def wake(self) -> None:
        """Lets everybody who waits look."""
        if self._watch is not None:
            self._watch.wake()

    def _left(self, name: str, moved: bool) -> None:
        if (sent := self._sent.get(name)) is not None:
            sent.settle(moved)

    # sending

    async def put(self, name: MessageName, buffers: Iterable[Buffer]) -> Sent:
        """Gives a message to the peer. It is in the folder of the peer when this returns, or not at all.

        Raises:
            ValueError: it cannot have this name.
            FileExistsError: a message of this name is being written or read.
            ConnectionResetError: the peer has removed the folders.
            ConnectionAbortedError: the queue was closed.
        """
        text = format_name(name)
        self.check()
        pieces = [memoryview(buffer).cast("B") for buffer in buffers]
        temporary = self._temporary / text
        sent = Sent(self, name, self._outbox / text)
        try:
            file = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb")
            try:
                await _write_somewhere(file, pieces)
                self._sent[text] = sent
                # The peer takes the oldest first, and the kernel's clock stands still for milliseconds.
                self._last = max(self._last + _TICK, time.time_ns())
                os.utime(temporary, ns=(self._last, self._last))
                os.rename(temporary, self._outbox / text)
            except BaseException:
                _delete(temporary)
                raise
        except FileNotFoundError:
            self.check()
            sent.settle(False)  # the peer has cleared the folders, as it does between two tasks
        return sent

    # receiving

    async def get(self) -> Received:
        """Waits for a message and takes it: the oldest one. One whose reading is cancelled comes again.

        Raises:
            ConnectionResetError: the peer has removed the folders.
            ConnectionAbortedError: the queue was closed.
        """
        async with self._getting:
            while self._reading is None:
                self.check()
                if (taken := self._take()) is None:
                    await self.changed()
                    continue
                name, file = taken
                if os.fstat(file.fileno()).st_size < _INLINE:
                    return self._read(name, file)
                self._reading = asyncio.create_task(self._read_in_thread(name, file))
            try:
                return await asyncio.shield(self._reading)
            finally:
                if self._reading is not None and self._reading.done():
                    self._reading = None

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.get()
        except ConnectionAbortedError:
            raise StopAsyncIteration from None

    def _take(self) -> tuple[MessageName, io.FileIO] | None:
        """Moves the oldest message away from where the peer sees it, and opens it."""
        while self._ready or self._list():
            text = self._ready.popleft()
            try:
                os.rename(self._inbox / text, self._temporary / text)
                return parse_name(text), _open(self._temporary / text, os.O_RDONLY | os.O_NONBLOCK, "rb")
            except FileNotFoundError:  # taken back, or cleared
                self.check()
        return None

    def _read(self, name: MessageName, file: io.FileIO) -> Received:
        try:
            with file:
                return Received(name, file.read())
        finally:
            _delete(self._temporary / format_name(name))

    async def _read_in_thread(self, name: MessageName, file: io.FileIO) -> Received:
        return await in_thread(lambda: self._read(name, file), "filepipe-read")

    def _list(self) -> bool:
        """Looks which messages there are."""
        found: list[tuple[int, str]] = []
        strange: set[str] = set()
        try:
            with os.scandir(self._inbox) as entries:
                for entry in entries:
                    if not _is_message(entry):
                        strange.add(entry.name)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        except FileNotFoundError:
            self.check()
        for name in strange - self._strange:
            _log.warning("%s is not a message, and is left where it is", self._inbox / name)
        self._strange = strange
        self._ready.extend(name for _, name in sorted(found))
        return bool(found)


def _is_message(entry: os.DirEntry[str]) -> bool:
    try:
        parse_name(entry.name)
    except ValueError:
        return False
    return entry.is_file(follow_symlinks=False)


def _open(path: Path, flags: int, mode: str) -> io.FileIO:
    """Opens a file for nobody else to read, but never what a link leads to."""
    return io.FileIO(os.open(path, flags | os.O_NOFOLLOW, 0o600), mode)


def _delete(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # the peer may have cleared the folder
        path.unlink()


async def _write_somewhere(file: io.FileIO, pieces: list[memoryview]) -> None:
    """Writes a file, in a thread if it is large. The thread ends early if the wait for it is cancelled."""
    unwanted = threading.Event()
    if sum(len(piece) for piece in pieces) < _INLINE:
        _write(file, pieces, unwanted)
        return
    try:
        await in_thread(lambda: _write(file, pieces, unwanted), "filepipe-write")
    finally:
        unwanted.set()


def _write(file: io.FileIO, pieces: list[memoryview], unwanted: threading.Event) -> None:
    with file:
        for piece in pieces:
            position = 0
            while position < len(piece) and not unwanted.is_set():
                position += file.write(piece[position : position + _PIECE])
