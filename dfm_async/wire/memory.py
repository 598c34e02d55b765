"""Shared memory of processes: a sender's arena, and the views that its peers have of it.

Each process has one arena: an anonymous file in memory. Large parts of values are copied into blocks of it; messages
refer to them. A peer maps the arena for reading and builds its objects right on it. When the last of them is gone, the
peer releases the block. The memory vanishes with the processes, however they end.
"""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgspec

_log = logging.getLogger(__name__)

LARGE: Final = 64 * 1024
"""The size in bytes from which a buffer travels by shared memory. Smaller ones are about as fast over the socket."""
ARENA_LIMIT: Final = 1024 * 1024 * 1024
"""The number of bytes of a process's values that its peers can hold in its arena. Beyond that they hold copies of their
own, which take as much memory; so this is far above what the logs of a few jobs hold.
"""

_PAGE: Final = 4096
_EXITING: Final = 4
"""The flag of a process that is about to end, in /proc/<pid>/stat."""
_GATHER: Final = 4 * 1024 * 1024
_GATHER_TIME: Final = 0.01
"""Blocks are released in batches of this number of bytes, or after this number of seconds."""
_IDLE: Final = 5.0
"""The number of seconds that an arena must have been empty before its pages are returned to the system."""


class SharedBlock(Protocol):
    """A block as both sides of a message know it: its position and its contents."""

    @property
    def offset(self) -> int:
        """Where it begins in the arena."""
        ...

    @property
    def size(self) -> int:
        """Its number of bytes."""
        ...

    def view(self) -> memoryview:
        """Return its bytes, read-only; objects that are built on this view keep the block.

        Raises:
            OSError: the memory that it is in cannot be read here.
        """
        ...


class WritablePart(SharedBlock, Protocol):
    """A part at its sender: its bytes can be written, once."""

    @property
    def buffer(self) -> memoryview:
        """Its bytes, to be written."""
        ...


class Allocator(Protocol):
    """Where a codec puts the large parts of values, so that they do not travel inside messages."""

    def allocate(self, size: int) -> WritablePart | None:
        """Return space for a part; None if the part has to travel inside the message."""
        ...

    def adopt(self, data: memoryview) -> WritablePart | None:
        """Accept bytes without a copy; None if only copies are accepted here."""
        ...


class Payload(msgspec.Struct, array_like=True):
    """Encoded values of which large parts are in shared memory.

    ``blocks`` are :class:`Block` at the sender, pairs of offset and size in transit, and :class:`Lease` at the
    receiver.
    """

    data: bytes
    blocks: list[Any]

    @property
    def size(self) -> int:
        """Its number of bytes, with all its blocks."""
        return len(self.data) + sum(int(block.size) for block in self.blocks)


def size_of(payload: bytes | Payload) -> int:
    """Return the number of bytes of a payload, with those in shared memory."""
    return payload.size if isinstance(payload, Payload) else len(payload)


# The sender's side.


class Block:
    """A part of the arena. It is free again when this object has no reference any longer."""

    __slots__ = ("arena", "offset", "size")

    def __init__(self, arena: Arena, offset: int, size: int) -> None:
        self.arena = arena
        self.offset = offset
        self.size = size

    @property
    def buffer(self) -> memoryview:
        """Its bytes, to be written once."""
        return self.arena.buffer[self.offset : self.offset + self.size]

    def view(self) -> memoryview:
        """Return its bytes, read-only; objects that are built on this view keep the block."""
        return self.arena.mapping.view(self.offset, self.size, self)

    def __del__(self) -> None:
        self.arena.free(self.offset, self.size)


class Arena:
    """The memory that one process puts large values into, for its peers to read.

    It is made when it is first needed. Blocks are taken from the lowest address that has room, so that the same pages
    are used again and again. Where the system has no such memory, there is never room.

    Args:
        limit: how many bytes of blocks there can be at a time. Only what is used costs anything.
    """

    def __init__(self, limit: int = ARENA_LIMIT) -> None:
        self.limit = _whole_pages(limit)
        self._lock = threading.Lock()
        self._file = -1
        self._opened = False
        self._buffer: memoryview | None = None
        self._mapping: _Mapping | None = None
        # The free ranges: where they begin, in order, and how long each is.
        self._starts = [0]
        self._lengths = {0: self.limit}
        self._free = self.limit
        # Blocks end whenever the last reference to them does: also in the middle of an allocation.
        self._freed: deque[tuple[int, int]] = deque()
        self._allocations = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int:
        """The number of bytes in blocks; each takes whole pages."""
        with self._lock:
            self._take_back()
            return self.limit - self._free

    @property
    def buffer(self) -> memoryview:
        """All of its bytes."""
        assert self._buffer is not None  # noqa: S101 - there is a block
        return self._buffer

    @property
    def mapping(self) -> _Mapping:
        """Where it is in this process."""
        assert self._mapping is not None  # noqa: S101 - there is a block
        return self._mapping

    def identity(self) -> tuple[int, int, int, int, int]:
        """How a peer finds it: process, file, size, and its identity in the system."""
        found = os.fstat(self._file)
        return os.getpid(), self._file, self.limit, found.st_dev, found.st_ino

    def allocate(self, size: int) -> Block | None:
        """Return a block, or None if there is no space. May be called by any thread."""
        length = _whole_pages(size)
        with self._lock:
            self._take_back()
            if not self._opened:
                self._open()
            fits = (index for index, start in enumerate(self._starts) if self._lengths[start] >= length)
            index = next(fits, None)
            if index is None:
                return None
            start = self._starts[index]
            left = self._lengths.pop(start) - length
            if left:
                self._starts[index] = start + length
                self._lengths[start + length] = left
            else:
                del self._starts[index]
            self._free -= length
            self._allocations += 1
            return Block(self, start, size)

    def adopt(self, data: memoryview) -> Block | None:
        """Return None: peers can only read the bytes that are in the arena."""
        del data
        return None

    def free(self, offset: int, size: int) -> None:
        """Free a block. Must not take the lock: the thread that holds it may be the one that calls."""
        self._freed.append((offset, _whole_pages(size)))

    def trim(self) -> None:
        """Return the pages to the system, if no block is in use."""
        with self._lock:
            self._take_back()
            if self._mapping is not None and self._free == self.limit:
                self._mapping.discard()

    def close(self) -> None:
        """Return the pages to the system now; no further block is needed. The arena is gone with its last block."""
        if self._timer is not None:  # it would keep the arena with its descriptors until it fires
            self._timer.cancel()
            self._timer = None
        self.trim()

    def rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return the pages to the system once the arena has been empty for a while; called after releases."""
        if self._timer is None and not self.used:
            self._timer = loop.call_later(_IDLE, self._rested, loop, self._allocations)

    def _rested(self, loop: asyncio.AbstractEventLoop, allocations: int) -> None:
        self._timer = None
        if self._allocations == allocations:
            self.trim()
        else:
            self.rest(loop)

    def _open(self) -> None:
        self._opened = True
        try:
            self._file = os.memfd_create("dfm-arena", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, self.limit)
            self._mapping = _Mapping(self._file, self.limit, mmap.PROT_READ | mmap.PROT_WRITE)
        except (AttributeError, OSError) as error:  # not Linux, or not allowed here
            _log.info("large values travel through sockets: there is no shared memory (%s)", error)
            self._starts, self._lengths = [], {}
            self.limit = self._free = 0
        else:
            self._buffer = memoryview(self._mapping.memory)

    def _take_back(self) -> None:
        freed, starts, lengths = self._freed, self._starts, self._lengths
        while freed:
            offset, length = freed.popleft()
            self._free += length
            index = bisect.bisect(starts, offset)
            if index < len(starts) and starts[index] == offset + length:
                length += lengths.pop(starts.pop(index))
            if index and starts[index - 1] + lengths[starts[index - 1]] == offset:
                lengths[starts[index - 1]] += length
            else:
                starts.insert(index, offset)
                lengths[offset] = length


class Loans:
    """The blocks of an arena that were sent to one peer, which has not released them."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def lend(self, blocks: Iterable[Block]) -> None:
        """Count one more message to the peer that refers to these blocks."""
        for block in blocks:
            self._blocks.setdefault(block.offset, []).append(block)

    def give_back(self, offsets: Iterable[int]) -> None:
        """Release the blocks of one message, which the peer no longer needs."""
        for offset in offsets:
            lent = self._blocks.get(offset)
            if lent:
                lent.pop()
                if not lent:
                    del self._blocks[offset]

    def clear(self) -> None:
        """Release all blocks: the peer is gone."""
        self._blocks.clear()


# The receiver's side.


class Lease:
    """One block of one message, at the receiver. When nothing uses it any longer, the block is released."""

    __slots__ = ("_memory", "offset", "size")

    def __init__(self, memory: PeerMemory, offset: int, size: int) -> None:
        self._memory = memory
        self.offset = offset
        self.size = size

    def view(self) -> memoryview:
        """Return its bytes, read-only; objects that are built on this view keep the block.

        Raises:
            OSError: the memory of the peer cannot be read here.
        """
        return self._memory.view(self)

    def __del__(self) -> None:
        self._memory.release(self)


class PeerMemory:
    """The arena of a peer, mapped for reading.

    Args:
        identity: its identity, as the peer has sent it.
        give_back: is called on the loop with the offsets of blocks that are not used any longer.
    """

    def __init__(self, identity: tuple[int, int, int, int, int], give_back: Callable[[list[int]], None]) -> None:
        self._give_back: Callable[[list[int]], None] | None = give_back
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._released: deque[tuple[int, int]] = deque()
        self._scheduled = False
        self._offsets: list[int] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._mapping: _Mapping | None = None
        self._problem = ""
        self.gone = False
        """Whether the peer had ended before its memory could be opened: its contents are lost."""
        try:
            self._mapping = _open_peer(*identity)
        except OSError as error:
            self._problem = f"the shared memory of process {identity[0]} cannot be opened: {error}"
            self.gone = _has_ended(identity[0])

    def view(self, lease: Lease) -> memoryview:
        """Return the bytes of a block, which keep its lease.

        Raises:
            OSError: there are no such bytes here.
        """
        if self._mapping is None:
            raise OSError(self._problem)
        return self._mapping.view(lease.offset, lease.size, lease)

    def release(self, lease: Lease) -> None:
        """Release a lease: in any thread, and perhaps while the interpreter ends. Must not raise."""
        if self._give_back is None:
            return
        self._released.append((lease.offset, lease.size))
        if not self._scheduled:
            self._scheduled = True
            try:
                if threading.get_ident() == self._thread:
                    self._loop.call_soon(self._gather)  # it is awake
                else:
                    self._loop.call_soon_threadsafe(self._gather)
            except RuntimeError:  # the loop is closed, and with it the connection to the peer
                self._give_back = None

    def _gather(self) -> None:
        """Collect further blocks for a moment, in order not to wake the peer for each of them."""
        self._scheduled = False
        while self._released:
            offset, size = self._released.popleft()
            self._offsets.append(offset)
            self._size += size
        if self._size >= _GATHER:
            self._flush()
        elif self._timer is None and self._offsets:
            self._timer = self._loop.call_later(_GATHER_TIME, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        offsets, self._offsets, self._size = self._offsets, [], 0
        if offsets and self._give_back is not None:
            self._give_back(offsets)

    def close(self) -> None:
        """Stop releasing blocks: the peer is gone. Objects that are built on its memory stay valid."""
        self._give_back = None
        self._flush()


def _open_peer(process: int, file: int, size: int, device: int, inode: int) -> _Mapping:
    number = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if (found.st_dev, found.st_ino, found.st_size) != (device, inode, size):
            raise OSError("another file is there")
        return _Mapping(number, size, mmap.PROT_READ)
    finally:
        os.close(number)


def _has_ended(process: int) -> bool:
    """Return whether a process has ended, or is about to: its files are closed a moment before its end."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return state in (b"Z", b"X") or bool(int(fields[5]) & _EXITING)


# Both sides.


class _Mapping:
    """A file in the memory of this process, and views of its parts that keep something (which must keep this) alive.

    A view of a memory map alone would not do: it does not report when the last object that was built on it is gone.
    """

    def __init__(self, file: int, size: int, protection: int) -> None:
        self.memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=protection)
        self._size = size
        self._address = _address(self.memory)
        self._region: Any = ctypes.c_ubyte * size

    def view(self, offset: int, size: int, keeps: object) -> memoryview:
        """Return a part, read-only."""
        if offset < 0 or size < 0 or offset + size > self._size:
            raise OSError(f"the shared memory has no {size} bytes at {offset}")
        region = self._region.from_address(self._address)
        region.keeps = keeps
        return memoryview(region)[offset : offset + size].toreadonly()

    def discard(self) -> None:
        """Return all pages to the system; their contents are gone."""
        self.memory.madvise(mmap.MADV_REMOVE)


class _Buffer(ctypes.Structure):
    """``Py_buffer``: the only source of the address of read-only memory."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(memory: mmap.mmap) -> int:
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(found), 0)
    address = found.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    assert address is not None  # noqa: S101 - it is mapped
    return int(address)


def _whole_pages(size: int) -> int:
    return -(-max(size, 1) // _PAGE) * _PAGE
