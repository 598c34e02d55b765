"""Bare mechanisms between two processes: a socket round trip, a queue, a pipe, and a copy into shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import pickle
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from benchmarks import operations

_LENGTH = struct.Struct("<I")
_spawn = multiprocessing.get_context("spawn")


async def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value, 5)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


async def _serve_echo(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            await _send(writer, await _receive(reader))
    writer.close()


def _echo_process(path: str) -> None:
    asyncio.run(_serve_echo(path))


class SocketEcho:
    """A process that sends back what it gets over a Unix socket; asyncio streams on both sides."""

    _echo = staticmethod(_echo_process)

    async def __aenter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        path = str(Path(self._directory.name) / "echo")
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(lambda r, w: connected.set_result((r, w)), path)
        self._process = _spawn.Process(target=self._echo, args=(path,), daemon=True)
        self._process.start()
        self._reader, self._writer = await connected
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.close()
        await asyncio.to_thread(self._process.join, 5)
        self._directory.cleanup()

    async def round_trip(self, x: int) -> Any:
        """Sends a small value there and back."""
        await _send(self._writer, operations.echo(x))
        return await _receive(self._reader)


async def _receive_bytes(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


async def _serve_bytes(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            data = await _receive_bytes(reader)
            writer.write(_LENGTH.pack(len(data)) + data)
    writer.close()


def _echo_bytes_process(path: str) -> None:
    asyncio.run(_serve_bytes(path))


class BytesEcho(SocketEcho):
    """The same for bytes as they are, behind their length."""

    _echo = staticmethod(_echo_bytes_process)

    async def round_trip(self, data: Any) -> Any:
        """Sends bytes there and back."""
        self._writer.write(_LENGTH.pack(len(data)) + data)
        return await _receive_bytes(self._reader)


def _produce(commands: Any, values: Any) -> None:
    while (command := commands.get()) is not None:
        kind, n = command
        for value in operations.GENERATORS[kind](n):
            values.put(value)
        values.put(None)
    values.put(StopIteration)


class QueueStream:
    """A process that puts values into a ``multiprocessing.Queue``, which a thread hands to the event loop."""

    async def __aenter__(self) -> QueueStream:
        self._commands, self._values = _spawn.SimpleQueue(), _spawn.Queue()
        self._process = _spawn.Process(target=_produce, args=(self._commands, self._values), daemon=True)
        self._process.start()
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._process.join, 5)
        await asyncio.to_thread(self._thread.join, 5)

    def _read(self) -> None:
        while (value := self._values.get()) is not StopIteration:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, value)

    async def stream(self, kind: str, n: int) -> AsyncIterator[Any]:
        """Gives n small values."""
        self._commands.put((kind, n))
        while (value := await self._arrived.get()) is not None:
            yield value


_REQUEST = struct.Struct("<QQQ")


def _slots(memory: mmap.mmap, size: int, count: int) -> list[Any]:
    import numpy

    return [numpy.frombuffer(memory, "f8", size // 8, slot * size) for slot in range(count)]


def _copy(path: str, told: socket.socket) -> None:
    import numpy

    memory = mmap.mmap(os.open(path, os.O_RDWR), 0)
    while request := told.recv(_REQUEST.size):
        n, size, count = _REQUEST.unpack(request)
        slots = _slots(memory, size, count)
        for i, array in enumerate(operations.arrays(n, size)):
            if i >= len(slots):
                told.recv(1)
            numpy.copyto(slots[i % len(slots)], array)
            told.send(b"x")
        for _ in range(min(n, len(slots))):
            told.recv(1)


class SharedCopy:
    """A process that copies arrays into shared memory, all over the same pages, and tells of each over a socket."""

    def __init__(self, memory: int) -> None:
        self._file = os.memfd_create("raw")
        os.ftruncate(self._file, memory)
        self._memory = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)

    async def __aenter__(self) -> SharedCopy:
        self._told, theirs = socket.socketpair()
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._process = _spawn.Process(target=_copy, args=(path, theirs), daemon=True)
        self._process.start()
        theirs.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._told.close()
        os.close(self._file)
        await asyncio.to_thread(self._process.join, 5)

    async def read(self, n: int, size: int, count: int) -> None:
        """Reads n arrays from this many slots, as fast as it goes: nothing else runs meanwhile."""
        slots = _slots(self._memory, size, count)
        self._told.send(_REQUEST.pack(n, size, count))
        for i in range(n):
            self._told.recv(1)
            if slots[i % len(slots)][0] != i:
                raise RuntimeError("an array came out of turn")
            self._told.send(b"x")


def _write(pipe: Any) -> None:
    with contextlib.suppress(EOFError):
        while True:
            for array in operations.arrays(*pipe.recv()):
                pipe.send(array)


class PickledPipe:
    """A process that sends arrays through a ``multiprocessing.Pipe``."""

    async def __aenter__(self) -> PickledPipe:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_write, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pipe.close()
        await asyncio.to_thread(self._process.join, 5)

    async def read(self, n: int, size: int) -> None:
        """Reads n arrays."""
        self._pipe.send((n, size))
        for i in range(n):
            if self._pipe.recv()[0] != i:
                raise RuntimeError("an array came out of turn")
