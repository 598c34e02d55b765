"""How worker processes reach the process of the test: one socket, served by one thread, while somebody needs it.

A thread with a loop of its own, because what is served outlives single tests, and the loops of tests do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import cloudpickle

from dfm_async.wire.local_sockets import connected, require_same_user, same_user

__all__ = ["Conversation", "Line", "Relay", "ask"]

_HEAD: Final = struct.Struct("<Q")
_HAS_ABSTRACT_ADDRESSES: Final[bool] = sys.platform.startswith("linux")


class Conversation(Protocol):
    """What answers one connection, on the relay's own loop."""

    async def answer(self, request: Any) -> Any:
        """Answers a request; cancelled if nobody waits for it any more."""
        ...

    async def aclose(self) -> None:
        """The connection has ended."""
        ...


class Relay:
    """The server. Whoever acquires it releases it; the last one ends it. Its address is always the same."""

    _lock: Final = threading.RLock()
    _shared: Relay | None = None
    _users: int = 0
    _offers: Final[dict[str, Callable[[], Conversation]]] = {}
    _address: str | None = None

    def __init__(self, address: str, folder: tempfile.TemporaryDirectory[str] | None) -> None:
        self._at = address
        self._folder = folder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dfm-testing", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @classmethod
    def acquire(cls, key: str, converse: Callable[[], Conversation]) -> str:
        """Serves those who ask for a key, and tells at which address. Blocks for a moment."""
        with cls._lock:
            if cls._shared is None:
                address, folder = cls._address or f"\0dfm-testing-{os.getpid()}-{secrets.token_hex(12)}", None
                if not _HAS_ABSTRACT_ADDRESSES:
                    folder = tempfile.TemporaryDirectory(prefix="dfm-")
                    address = str(Path(folder.name) / "relay")
                cls._shared, cls._address = cls(address, folder), address
            cls._users += 1
            cls._offers[key] = converse
            assert cls._address is not None  # noqa: S101 - just set
            return cls._address

    @classmethod
    def release(cls, key: str) -> None:
        """Serves a key no longer. Blocks for a moment if it was the last."""
        with cls._lock:
            if cls._offers.pop(key, None) is None:
                return
            cls._users -= 1
            if cls._users == 0 and cls._shared is not None:
                relay, cls._shared = cls._shared, None
                relay.stop()

    def stop(self) -> None:
        """Ends the server and its thread."""
        assert self._loop is not None  # noqa: S101 - it was ready
        assert self._ended is not None  # noqa: S101 - it was ready
        self._loop.call_soon_threadsafe(self._ended.set)
        if threading.current_thread() is not self._thread:  # garbage may be collected anywhere
            self._thread.join()
        if self._folder is not None:
            self._folder.cleanup()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        talks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(_talk(reader, writer))
            talks.add(task)
            task.add_done_callback(talks.discard)

        server = await asyncio.start_unix_server(accept, self._at)
        self._ready.set()
        await self._ended.wait()
        server.close()
        for task in talks:
            task.cancel()
        if talks:
            await asyncio.wait(talks)


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    conversation: Conversation | None = None
    try:
        if not same_user(writer.get_extra_info("socket")):
            return
        key = await _read(reader)
        offer = Relay._offers.get(key)  # noqa: SLF001 - of this module
        if offer is None:
            return  # whoever asks takes the end for an answer
        conversation = offer()
        request = await _read(reader)
        while True:
            answer = asyncio.ensure_future(conversation.answer(request))
            following = asyncio.ensure_future(_read(reader))  # one comes only after the answer; before it, the end
            try:
                await asyncio.wait({answer, following}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    return
                writer.write(_settled(answer))
                request = await following
            finally:
                answer.cancel()
                following.cancel()
                await asyncio.wait({answer, following})
                for task in (answer, following):
                    if not task.cancelled():
                        task.exception()
    except (EOFError, ConnectionError):
        pass  # the other side has all it wants, or has died
    finally:
        if conversation is not None:
            await conversation.aclose()
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Any:
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return pickle.loads(await reader.readexactly(size))  # noqa: S301 - from a process of the same user, which we started


class _Unsent:
    """Stands for an answer that could not be sent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _settled(answer: asyncio.Future[Any]) -> bytes:
    found = answer.result()
    try:
        return _encoded(found)
    except Exception as error:  # noqa: BLE001 - values can hold anything
        return _encoded(_Unsent(f"{type(error).__name__}: {error}"))


def _received(data: bytes) -> Any:
    found = pickle.loads(data)  # noqa: S301 - from the process that started us
    if isinstance(found, _Unsent):
        raise TypeError(f"what the test answers cannot be sent to the process that asks: {found.reason}")
    return found


def _encoded(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=5)
    return _HEAD.pack(len(data)) + data


# the other side


class Line:
    """A connection to the relay, for the loop of a worker.

    Raises:
        ConnectionError: nobody is there, or serves the key.
    """

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._opening: bytes = _encoded(key)
        self._socket: socket.socket | None = None

    async def ask(self, request: Any) -> Any:
        """Sends a request, and waits for the answer.

        Raises:
            TypeError: the request or the answer cannot be sent.
        """
        loop = asyncio.get_running_loop()
        try:
            data = _encoded(request)
        except Exception as error:
            raise TypeError(f"what is asked of the test cannot be sent there: {error}") from error
        if self._socket is None:
            self._socket = await connected(self._address)
            data = self._opening + data
        await loop.sock_sendall(self._socket, data)
        (size,) = _HEAD.unpack(await self._receive(_HEAD.size))
        return _received(await self._receive(size))

    async def _receive(self, size: int) -> bytes:
        assert self._socket is not None  # noqa: S101 - the caller has it
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, size - len(data))
            if not part:
                raise ConnectionResetError("nobody answers there")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Ends the connection: whoever works on an answer stops."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def ask(address: str, key: str, request: Any) -> Any:
    """Asks once, and blocks until the answer is there; for threads.

    Raises:
        ConnectionError: nobody is there, or serves the key.
    """
    with _connected(address) as connection:
        connection.sendall(_encoded(key) + _encoded(request))
        with connection.makefile("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise ConnectionResetError("nobody answers there")
            return _received(file.read(_HEAD.unpack(head)[0]))


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        require_same_user(connection)
        yield connection
