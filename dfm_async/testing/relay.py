"""The connection of worker processes to the process of the test: one socket, served by one thread while it is used.

A thread with a loop of its own, because what is served outlives single tests, and the loops of tests do not.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import cloudpickle

from dfm_async.base.framing import HEAD
from dfm_async.base.sockets import LocalListener, connected, same_user


class Conversation(Protocol):
    """Answers one connection, on the relay's own loop."""

    async def answer(self, request: Any) -> Any:
        """Answer a request; cancelled if the client has disconnected."""
        ...

    async def aclose(self) -> None:
        """Handle the end of the connection."""
        ...


class Relay:
    """The server. It is acquired and released; the last release ends it. On Linux its address is always the same."""

    _lock: Final = threading.RLock()
    _shared: Relay | None = None
    _offers: Final[dict[str, Callable[[], Conversation]]] = {}
    _name = ""

    def __init__(self, name: str) -> None:
        self._listener = LocalListener(name)
        self.address = self._listener.address
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
        """Serve a key, and return the address. Blocks for a moment."""
        with cls._lock:
            if cls._shared is None:
                cls._name = cls._name or f"dfm-testing-{os.getpid()}-{secrets.token_hex(12)}"
                cls._shared = cls(cls._name)
            cls._offers[key] = converse
            return cls._shared.address

    @classmethod
    def release(cls, key: str) -> None:
        """Serve a key no longer. Blocks for a moment if it was the last."""
        with cls._lock:
            cls._offers.pop(key, None)
            if not cls._offers and cls._shared is not None:
                relay, cls._shared = cls._shared, None
                relay.stop()

    def stop(self) -> None:
        """End the server and its thread."""
        assert self._loop is not None  # noqa: S101 - it was ready
        assert self._ended is not None  # noqa: S101 - it was ready
        self._loop.call_soon_threadsafe(self._ended.set)
        if threading.current_thread() is not self._thread:  # garbage may be collected anywhere
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
            self._ready.set()
        finally:
            self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        talks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(_talk(reader, writer))
            talks.add(task)
            task.add_done_callback(talks.discard)

        server = await asyncio.start_unix_server(accept, sock=self._listener.socket)
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
            return  # the client takes the end for a response
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
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
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
        raise TypeError(f"the response of the test cannot be sent to the worker: {found.reason}")
    return found


def _encoded(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=5)
    return HEAD.pack(len(data)) + data


# the other side


class RelayConnection:
    """A connection to the relay, for the loop of a worker.

    Raises:
        ConnectionError: there is no server, or it does not serve the key.
    """

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._opening: bytes = _encoded(key)
        self._socket: socket.socket | None = None

    async def ask(self, request: Any) -> Any:
        """Send a request, and wait for the response.

        Raises:
            TypeError: the request or the answer cannot be sent.
        """
        loop = asyncio.get_running_loop()
        try:
            data = _encoded(request)
        except Exception as error:
            raise TypeError(f"the request cannot be sent to the test: {error}") from error
        if self._socket is None:
            self._socket = await connected(self._address)
            data = self._opening + data
        await loop.sock_sendall(self._socket, data)
        (size,) = HEAD.unpack(await self._receive(HEAD.size))
        return _received(await self._receive(size))

    async def _receive(self, size: int) -> bytes:
        assert self._socket is not None  # noqa: S101 - the caller has it
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, size - len(data))
            if not part:
                raise ConnectionResetError("the test has closed the connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        """End the connection: pending work on a response is cancelled."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
