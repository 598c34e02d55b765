"""Messages as files in folders, in both directions of one channel.

``<root>/<channel>/x`` holds what is for the active end, the program; ``y`` what is for the passive end, the site; and
``t`` what is being written or read. A message is written in ``t`` and moved to where it is read from; the reader moves
it back to ``t``, reads it and deletes it. The name of a file says what a message is: ``REQ.<topic>.<id>`` or
``REP.<topic>.<request>.<id>``. So a message is there as a whole or not at all, and what is gone was taken.

The kernel reports changes of folders, but not what other hosts do in a shared one. So waiters also check once per
second; and ten times per second, as the peer does, where the kernel does not watch at all: elsewhere than on Linux, or
if all of its watchers are in use. ``asyncinotify`` reads from a descriptor that the loop watches. ``watchfiles`` would
need a thread, which stays, takes longer to notice a file, and does not tell files that were moved from deleted ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import io
import logging
import os
import re
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from dfm_async.base.signals import Signal
from dfm_async.base.tasks import in_thread
from dfm_async.exchange.filepipe.fobs_format import Buffer

try:
    import asyncinotify
except ImportError:  # elsewhere than on Linux
    _is_available = False
else:
    _is_available = True

_log = logging.getLogger(__name__)

_INLINE: Final = 256 * 1024
"""Larger files are written and read in threads; for smaller ones, starting a thread takes longer than that."""
_PIECE: Final = 4 * 1024 * 1024
"""The number of bytes that are written between checks whether they are still wanted."""
_WATCHED: Final = 1.0
"""The interval of checks although the kernel watches, in seconds."""
_UNWATCHED: Final = 0.1
_TICK: Final = 1000
"""The nanoseconds between two messages: the peer compares times as floats, which are no finer than 240 of them."""
_TOPIC: Final = re.compile(r"[A-Za-z0-9_]+")
_ID: Final = re.compile(r"[!-\-0-\[\]-~]+")
"""What can be seen, but no dots, which separate the parts, and nothing that leads out of a folder."""
_LONGEST_NAME: Final = 255


@dataclass(frozen=True, slots=True)
class MessageName:
    """What the name of a file says about the message in it.

    Attributes:
        topic: what it is about: the name of a task, or one of the peer's signals.
        id: its own id.
        request: the id of the request that it answers; None if it is a request itself.
    """

    topic: str
    id: str
    request: str | None = None


def format_name(name: MessageName) -> str:
    """Make the name of a file.

    Raises:
        ValueError: the topic or an id cannot be part of one.
    """
    ids = (name.id,) if name.request is None else (name.request, name.id)
    if not _TOPIC.fullmatch(name.topic):
        raise ValueError(f"a topic consists of letters, digits and underscores, unlike {name.topic!r}")
    for part in ids:
        if not _ID.fullmatch(part):
            raise ValueError(f"an id must not be empty or contain dots, slashes or blanks, unlike {part!r}")
    text = ".".join(("REQ" if name.request is None else "REP", name.topic, *ids))
    if len(text) > _LONGEST_NAME:
        raise ValueError(f"the name of a message has at most {_LONGEST_NAME} characters, unlike {text!r}")
    return text


def parse_name(text: str) -> MessageName:
    """Read the name of a file.

    Raises:
        ValueError: it is not the name of a message.
    """
    match text.split("."):
        case ["REQ", topic, own]:
            name = MessageName(topic, own)
        case ["REP", topic, request, own]:
            name = MessageName(topic, own, request)
        case _:
            raise ValueError(f"{text!r} is not the name of a message")
    format_name(name)  # refuses what it would not have made
    return name


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


class MessageInFlight:
    """A message in flight to the peer.

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

    async def gone(self) -> bool:
        """Wait until the peer has taken the message, and return whether it has.

        It has not if the message was taken back, as it is when the wait is cancelled, or deleted unread, as the peer
        does between two tasks.

        Raises:
            ConnectionResetError: the peer has removed the folders.
            ConnectionAbortedError: the queue was closed.
        """
        try:
            while (taken := self._look()) is None:
                await self._queue.changed()
        except asyncio.CancelledError:
            self.take_back()
            raise
        return taken

    def take_back(self) -> bool:
        """Delete the message if the peer has not taken it yet. Return whether the peer has not got it."""
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
        """Take note of what became of the message; what is known first counts."""
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
        root: the folder of all channels; created if it does not exist.
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
        self._watch: _FolderWatch | None = None
        self._closed = False
        self._sent: weakref.WeakValueDictionary[str, MessageInFlight] = weakref.WeakValueDictionary()
        self._last = 0
        self._ready: deque[str] = deque()
        self._strange: set[str] = set()
        self._getting = asyncio.Lock()
        self._reading: asyncio.Task[Received] | None = None

    def open(self) -> None:
        """Make the missing folders, private to this user, and begin to watch."""
        if self._closed or self._watch is not None:
            raise RuntimeError("the queue was opened before: make a new one")
        missing = [folder for folder in self._path.parents if not folder.exists()]
        for folder in (*reversed(missing), self._path, self._inbox, self._outbox, self._temporary):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
                self._made.append(folder)
        self._watch = _FolderWatch(self._inbox, self._outbox, self._left)

    async def __aenter__(self) -> DirectoryQueue:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, remove: bool = False) -> None:
        """End everything that waits for messages. One that is being read is lost, unless there is a reader.

        Args:
            remove: whether to delete the folders that this queue has made, with all messages in them.
        """
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        if (reading := self._reading) is not None:
            await asyncio.wait([reading])
            reading.exception()  # there may be no other reader
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
        """Raise if nothing can come or go any longer.

        Raises:
            ConnectionResetError: the peer has removed the folders, as the passive end does when it closes.
            ConnectionAbortedError: the queue was closed, or not opened yet.
        """
        if self._closed or self._watch is None:
            raise ConnectionAbortedError(f"the queue at {self._path} is not open")
        if self._watch.broken or not (self._inbox.is_dir() and self._outbox.is_dir() and self._temporary.is_dir()):
            raise ConnectionResetError(f"the peer has removed {self._path}")

    async def changed(self) -> None:
        """Wait until something has happened in the folders, or the next check is due."""
        if self._watch is not None and not self._closed:
            await self._watch.wait()

    def catch_up(self) -> None:
        """Take note of what has happened in the folders by now."""
        if self._watch is not None:
            self._watch.drain()

    def wake(self) -> None:
        """Let the waiters check."""
        if self._watch is not None:
            self._watch.changed.notify()

    def _left(self, name: str, moved: bool) -> None:
        if (sent := self._sent.get(name)) is not None:
            sent.settle(moved)

    # sending

    async def put(self, name: MessageName, buffers: Iterable[Buffer]) -> MessageInFlight:
        """Send a message to the peer. It is in the folder of the peer when this returns, or not at all.

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
        sent = MessageInFlight(self, name, self._outbox / text)
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
        """Wait for a message, and take the oldest one. One whose reading is cancelled comes again.

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
        """Move the oldest message away from where the peer sees it, and open it."""
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
        """List the messages."""
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
    """Open a file that is private to this user, but never what a link leads to."""
    return io.FileIO(os.open(path, flags | os.O_NOFOLLOW, 0o600), mode)


def _delete(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # the peer may have cleared the folder
        path.unlink()


async def _write_somewhere(file: io.FileIO, pieces: list[memoryview]) -> None:
    """Write a file, in a thread if it is large. The thread ends early if the wait for it is cancelled."""
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


# watching


class _FolderWatch:
    """Watches an inbox for messages that come, and an outbox for messages that are taken.

    Args:
        inbox: messages come here.
        outbox: messages are taken from here.
        left: called with the name of every file that leaves the outbox, and whether it was moved rather than deleted.
    """

    def __init__(self, inbox: Path, outbox: Path, left: Callable[[str, bool], None]) -> None:
        self._left = left
        self.changed = Signal()
        """Is notified of everything that the kernel reports."""
        self.broken = False
        """Whether one of the folders was removed, as far as the kernel has reported."""
        self._loop = asyncio.get_running_loop()
        self._inotify = _inotify()
        if self._inotify is not None:
            mask = asyncinotify.Mask
            ends = mask.DELETE_SELF | mask.MOVE_SELF | mask.ONLYDIR
            try:
                self._inotify.add_watch(inbox, mask.MOVED_TO | ends)
                self._outbox = self._inotify.add_watch(outbox, mask.MOVED_FROM | mask.DELETE | ends)
            except OSError as error:  # too many folders are watched
                _warn(error)
                self._inotify.close()
                self._inotify = None
            else:
                self._loop.add_reader(self._inotify.fd, self.drain)

    async def wait(self) -> None:
        """Wait until something has happened since the last check, or the next check is due.

        What happens between a check and this call is not missed as long as there is no ``await`` between them: the
        kernel keeps it until the loop runs again.
        """
        await self.changed.wait(self._loop.time() + (_UNWATCHED if self._inotify is None else _WATCHED))

    def drain(self) -> None:
        """Take note of everything that the kernel has reported by now, and let the waiters check."""
        while self._inotify is not None:
            try:
                event = self._inotify.sync_get()
            except BlockingIOError:  # that was all
                return
            self.changed.notify()
            if event is None:
                return
            mask = asyncinotify.Mask
            if event.mask & (mask.DELETE_SELF | mask.MOVE_SELF | mask.IGNORED | mask.UNMOUNT):
                self.broken = True
            elif event.watch is self._outbox and event.name is not None:
                self._left(str(event.name), bool(event.mask & mask.MOVED_FROM))

    def close(self) -> None:
        """Stop watching, and let the waiters check once more."""
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        self.changed.notify()


def _inotify() -> asyncinotify.Inotify | None:
    if not _is_available:
        return None
    try:
        inotify = asyncinotify.Inotify()
    except OSError as error:  # too many are open
        _warn(error)
        return None
    # It should be so already, but asyncinotify 4.4 takes the wrong constant for its flag.
    os.set_blocking(inotify.fd, False)
    return inotify


def _warn(error: OSError) -> None:
    _log.warning(
        "folders are checked every %g s instead of watched: %s. Raise fs.inotify.max_user_instances and "
        "fs.inotify.max_user_watches with sysctl",
        _UNWATCHED,
        error,
    )
