"""Pipes: messages come whole, in order and only from this launch; the end is told once. For sockets and for memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.exchange.messages import Abort, Beat, Chunk, End, Hello, Message, Metrics, Progress, TaskOffer, encode
from dfm_async.exchange.pipes import socket as socket_module
from dfm_async.exchange.pipes.base import Pipe, stamp_of
from dfm_async.exchange.pipes.memory import memory_pair
from dfm_async.exchange.pipes.socket import SocketPipe

HEAD = struct.Struct("<IIQ")
STAMP = stamp_of("session", "token")

Pair: TypeAlias = tuple[Any, Any]


def frame(message: Message | bytes, data: bytes = b"", stamp: int = STAMP) -> bytes:
    body = message if isinstance(message, bytes) else encode(message)
    return HEAD.pack(len(body), len(data), stamp) + body + data


@dataclass
class Taker:
    """Takes everything, and keeps the bytes of chunks that it wants."""

    wants: bool = True
    got: list[Message] = field(default_factory=list)
    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    count: int = 0
    _room: bytearray = field(default_factory=bytearray)
    _waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    _lost: asyncio.Event = field(default_factory=asyncio.Event)

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        if not self.wants:
            return None
        self._room = bytearray(size)
        return memoryview(self._room)

    def received(self, message: Message, size: int) -> None:
        if isinstance(message, Chunk):
            self.chunks.append((message.offset, bytes(self._room[:size])))
        else:
            assert size == 0
        self.got.append(message)
        for count, waiting in self._waiting:
            if len(self.got) >= count and not waiting.done():
                waiting.set_result(None)

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self._lost.set()

    async def until(self, count: int) -> list[Message]:
        if len(self.got) < count:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append((count, waiting))
            await waiting
        return self.got

    async def gone(self) -> str:
        await self._lost.wait()
        return self.reasons[0]


async def socket_pair(stamps: tuple[int | None, int | None] = (STAMP, STAMP)) -> Pair:
    loop = asyncio.get_running_loop()
    ends = []
    for end, stamp in zip(socket.socketpair(), stamps, strict=True):
        end.setblocking(False)
        _, pipe = await loop.create_connection(lambda stamp=stamp: SocketPipe(stamp), sock=end)  # type: ignore[misc]
        ends.append(pipe)
    return ends[0], ends[1]


async def pair_of_memory() -> Pair:
    return memory_pair()


@pytest.fixture(params=[socket_pair, pair_of_memory], ids=["socket", "memory"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two ends that are connected; closed afterwards."""
    make: Callable[[], Awaitable[Pair]] = request.param
    pair = await make()
    yield pair
    for pipe in pair:
        pipe.abort()
        await pipe.wait_closed()


@contextlib.asynccontextmanager
async def raw(stamp: int | None = STAMP) -> AsyncIterator[tuple[socket.socket, SocketPipe, Taker]]:
    """A pipe, and the bare socket at its other end."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    _, pipe = await loop.create_connection(lambda: SocketPipe(stamp), sock=far)
    taker = Taker()
    pipe.open(taker)
    try:
        yield near, pipe, taker
    finally:
        near.close()
        pipe.abort()
        await pipe.wait_closed()


async def write(near: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(near, data)


# what every pipe does


async def test_messages_come_in_order_and_none_twice(ends: Pair) -> None:
    left, right = ends
    taker = Taker()
    right.open(taker)
    sent: list[Message] = [Progress(float(number)) for number in range(100)]
    for message in sent:
        left.send(message)
    assert await taker.until(100) == sent


async def test_both_directions_at_once(ends: Pair) -> None:
    takers = Taker(), Taker()
    for pipe, taker in zip(ends, takers, strict=True):
        pipe.open(taker)
        pipe.send(Beat())
        pipe.send(End("mine"))
    for taker in takers:
        assert await taker.until(2) == [Beat(), End("mine")]


async def test_chunks_and_messages_keep_their_order(ends: Pair) -> None:
    left, right = ends
    taker = Taker()
    right.open(taker)
    data = bytes(range(256)) * 1000
    sent: list[Message] = []
    for number in range(5):
        chunk = Chunk("tx", 1, "site", number, 0)
        left.send(chunk, memoryview(data)[number:])
        left.send(Progress(float(number)))
        sent += [chunk, Progress(float(number))]
    assert await taker.until(10) == sent
    assert taker.chunks == [(number, data[number:]) for number in range(5)]


async def test_a_chunk_that_nobody_wants_says_so_and_harms_nothing(ends: Pair) -> None:
    left, right = ends
    taker = Taker(wants=False)
    right.open(taker)
    left.send(Chunk("tx", 1, "site", 0, 0), memoryview(b"x" * 300_000))
    left.send(Beat())
    assert await taker.until(2) == [Chunk("tx", 1, "site", 0, 0), Beat()]
    assert taker.chunks == [(0, b"")], "there are no bytes where it said"


async def test_a_message_of_many_mebibytes_comes_whole(ends: Pair) -> None:
    left, right = ends
    taker = Taker()
    right.open(taker)
    large = TaskOffer("t", "train", bytes(range(256)) * 20_000, [])
    left.send(Beat())
    left.send(large)
    left.send(End())
    assert await taker.until(3) == [Beat(), large, End()]


async def test_another_receiver_takes_the_rest(ends: Pair) -> None:
    left, right = ends
    second = Taker()

    class First(Taker):
        def received(self, message: Message, size: int) -> None:
            super().received(message, size)
            right.open(second)

    first = First()
    right.open(first)
    left.send(Beat())
    left.send(End())
    left.send(Abort())
    assert await second.until(2) == [End(), Abort()]
    assert first.got == [Beat()]


async def test_closing_sends_what_is_queued(ends: Pair) -> None:
    left, right = ends
    taker = Taker()
    right.open(taker)
    data = bytes(3_000_000)
    left.send(Chunk("tx", 1, "site", 0, 0), memoryview(data))
    left.send(End("bye"))
    left.close()
    assert await taker.until(2) == [Chunk("tx", 1, "site", 0, 0), End("bye")]
    await taker.gone()
    await left.wait_closed()


async def test_the_end_is_told_once_to_both_ends(ends: Pair) -> None:
    takers = Taker(), Taker()
    for pipe, taker in zip(ends, takers, strict=True):
        pipe.open(taker)
    ends[0].close()
    ends[0].close()
    ends[0].abort()
    for pipe, taker in zip(ends, takers, strict=True):
        assert await taker.gone() == "the connection was closed"
        await pipe.wait_closed()
        pipe.abort()
    await asyncio.sleep(0)
    assert [len(taker.reasons) for taker in takers] == [1, 1]


async def test_who_opens_too_late_gets_what_came_and_then_the_end(ends: Pair) -> None:
    left, right = ends
    left.send(Refusal)
    left.close()
    first = Taker()
    left.open(first)
    await first.gone()
    if isinstance(right, SocketPipe):
        await right.wait_closed()
    order: list[object] = []

    class Late(Taker):
        def received(self, message: Message, size: int) -> None:
            order.append(message)

        def lost(self, reason: str) -> None:
            order.append("lost")

    right.open(Late())
    assert order == [Refusal, "lost"]


Refusal = End("the only message that may come so early")


async def test_what_is_sent_after_the_end_is_ignored(ends: Pair) -> None:
    right = ends[1]
    taker = Taker()
    right.open(taker)
    right.abort()
    await taker.gone()
    for pipe in ends:
        await pipe.wait_closed()
        pipe.send(Beat())
        pipe.send(Chunk("tx", 1, "site", 0, 0), memoryview(b"x"))
        await pipe.drain()
    assert taker.got == []


async def test_draining_waits_while_the_other_end_does_not_take(ends: Pair) -> None:
    left, right = ends
    if isinstance(right, SocketPipe):
        right._transport.pause_reading()  # type: ignore[union-attr]
    for _ in range(20):
        left.send(Chunk("tx", 1, "site", 0, 0), memoryview(bytes(200_000)))
    waiting = asyncio.ensure_future(left.drain())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    right.open(Taker(wants=False))
    if isinstance(right, SocketPipe):
        right._transport.resume_reading()  # type: ignore[union-attr]
    await waiting


async def test_draining_ends_with_the_connection(ends: Pair) -> None:
    left, right = ends
    if isinstance(right, SocketPipe):
        right._transport.pause_reading()  # type: ignore[union-attr]
    for _ in range(20):
        left.send(Chunk("tx", 1, "site", 0, 0), memoryview(bytes(200_000)))
    waiting = [asyncio.ensure_future(left.drain()) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    right.abort()
    left.abort()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


async def test_a_drain_that_is_cancelled_leaves_the_others_waiting(ends: Pair) -> None:
    left, right = ends
    if isinstance(right, SocketPipe):
        right._transport.pause_reading()  # type: ignore[union-attr]
    for _ in range(20):
        left.send(Chunk("tx", 1, "site", 0, 0), memoryview(bytes(200_000)))
    first, second = (asyncio.ensure_future(left.drain()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert not second.done()
    right.open(Taker(wants=False))
    if isinstance(right, SocketPipe):
        right._transport.resume_reading()  # type: ignore[union-attr]
    await second


def test_both_kinds_keep_the_contract_of_a_pipe() -> None:
    async def main() -> None:
        pipes: list[Pipe] = [*await socket_pair(), *memory_pair()]
        assert all(pipe.can_resend and pipe.shows_progress and pipe.has_metrics for pipe in pipes)
        for pipe in pipes:
            pipe.abort()
            await pipe.wait_closed()

    asyncio.run(main())


# sockets


MESSAGES = st.one_of(
    st.builds(Progress, st.floats(0, 1), st.none(), st.text(max_size=20)),
    st.builds(Metrics, st.integers(0, 9), st.binary(max_size=40)),
    st.just(Beat()),
    st.tuples(
        st.builds(Chunk, st.just("tx"), st.just(1), st.just("site"), st.integers(0, 9), st.just(0)),
        st.binary(min_size=1, max_size=50),
    ),
)


@given(messages=st.lists(MESSAGES, min_size=1, max_size=8), cuts=st.lists(st.integers(0, 400), max_size=12))
async def test_any_split_of_the_stream_gives_the_same_messages(messages: list[Any], cuts: list[int]) -> None:
    frames = [frame(*message) if isinstance(message, tuple) else frame(message) for message in messages]
    stream = b"".join(frames)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pipe, taker = SocketPipe(STAMP), Taker()
    pipe.open(taker)
    for begin, end in itertools.pairwise(places):
        rest = stream[begin:end]
        while rest:  # as a transport does
            buffer = pipe.get_buffer(-1)
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            del buffer
            pipe.buffer_updated(size)
            rest = rest[size:]
    assert taker.got == [message[0] if isinstance(message, tuple) else message for message in messages]
    assert taker.chunks == [(message[0].offset, message[1]) for message in messages if isinstance(message, tuple)]
    pipe.connection_lost(None)


async def test_the_stream_may_come_byte_by_byte() -> None:
    async with raw() as (near, _, taker):
        chunk = Chunk("tx", 1, "site", 3, 0)
        for byte in frame(chunk, b"abc") + frame(End()):
            await write(near, bytes([byte]))
        assert await taker.until(2) == [chunk, End()]
        assert taker.chunks == [(3, b"abc")]


async def test_a_frame_of_another_launch_is_ignored_and_counted() -> None:
    """3.1: messages carry the session's id and the launch's token, others are ignored."""
    async with raw() as (near, pipe, taker):
        await write(near, frame(Beat()) + frame(Abort(), stamp=STAMP + 1) + frame(End()))
        assert await taker.until(2) == [Beat(), End()]
        assert pipe.ignored == 1


@pytest.mark.parametrize("size", [5, 300_000])
async def test_a_chunk_of_another_launch_is_ignored_with_its_bytes(size: int) -> None:
    async with raw() as (near, pipe, taker):
        chunk = Chunk("tx", 1, "site", 0, 0)
        await write(near, frame(chunk, bytes(size), STAMP + 1) + frame(chunk, b"mine") + frame(End()))
        assert await taker.until(2) == [chunk, End()]
        assert taker.chunks == [(0, b"mine")]
        assert pipe.ignored == 1


async def test_what_is_not_even_a_message_is_ignored_if_it_is_of_another_launch() -> None:
    async with raw() as (near, pipe, taker):
        await write(near, frame(b"garbage", stamp=1) + frame(End()))
        assert await taker.until(1) == [End()]
        assert pipe.ignored == 1


async def test_a_refusal_by_one_that_has_no_stamp_yet_is_heard_but_nothing_after_the_handshake() -> None:
    """A gate that has no room says so before it has heard who is there."""
    async with raw() as (near, pipe, taker):
        await write(near, frame(End("no room"), stamp=0) + frame(Beat()) + frame(Abort(), stamp=0) + frame(End()))
        assert await taker.until(3) == [End("no room"), Beat(), End()]
        assert pipe.ignored == 1


def test_stamps_depend_on_the_session_and_on_the_token() -> None:
    stamps = {stamp_of(session, token) for session in ("a", "b", "ab") for token in ("c", "bc", "")}
    assert len(stamps) == 9
    assert stamp_of("a", "b") == stamp_of("a", "b")


async def test_a_peer_that_is_not_known_yet_may_say_only_little() -> None:
    async with raw(stamp=None) as (near, _, taker):
        await write(near, HEAD.pack(socket_module._LARGEST_STRANGER + 1, 0, 0))
        assert "is too large" in await taker.gone()


async def test_a_peer_that_is_not_known_yet_may_send_no_chunk() -> None:
    async with raw(stamp=None) as (near, _, taker):
        await write(near, frame(Chunk("tx", 1, "site", 0, 0), b"x"))
        assert "is too large" in await taker.gone()
        assert taker.got == []


async def test_a_peer_that_is_not_known_yet_may_say_hello_with_any_stamp() -> None:
    async with raw(stamp=None) as (near, pipe, taker):
        hello = Hello(1, "t", "s", 7)
        await write(near, frame(hello, stamp=77))
        assert await taker.until(1) == [hello]
        pipe.send(End("no"))
        answer = await asyncio.get_running_loop().sock_recv(near, 100)
        assert HEAD.unpack_from(answer)[2] == 77, "so that the peer does not ignore the answer"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        HEAD.pack(1 << 31, 0, STAMP),
        HEAD.pack(3, (1 << 31), STAMP) + b"abc",
        frame(b"garbage"),
        frame(b""),
        frame(b"\x91\x63"),
        frame(Beat(), b"bytes behind a message that has none"),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["ff", "huge", "huge chunk", "no message", "empty", "unknown tag", "behind", "http"],
)
async def test_garbage_ends_the_connection_with_a_reason(garbage: bytes) -> None:
    async with raw() as (near, pipe, taker):
        await write(near, frame(Beat()) + garbage)
        assert "does not keep to the protocol" in await taker.gone()
        assert taker.got == [Beat()], "what came before was good"
        await pipe.wait_closed()
        assert await asyncio.get_running_loop().sock_recv(near, 10) == b""


async def test_garbage_is_told_once_even_to_who_opens_meanwhile() -> None:
    async with raw() as (near, pipe, _):
        later = Taker()

        class Handing(Taker):
            def received(self, message: Message, size: int) -> None:
                asyncio.get_running_loop().call_soon(pipe.open, later)

        pipe.open(Handing())
        await write(near, frame(Beat()) + b"\xff" * 64)
        await later.gone()
        await pipe.wait_closed()
        assert len(later.reasons) == 1


async def test_a_peer_that_vanishes_in_the_middle_of_a_message_is_lost() -> None:
    async with raw() as (near, pipe, taker):
        await write(near, frame(End("never whole"))[:-3])
        near.close()
        assert await taker.gone() == "the connection was closed"
        await pipe.wait_closed()
        assert (taker.got, len(taker.reasons)) == ([], 1)


async def test_a_peer_that_vanishes_in_the_middle_of_a_chunk_is_lost_and_its_room_is_let_go() -> None:
    async with raw() as (near, pipe, taker):
        await write(near, frame(Chunk("tx", 1, "site", 0, 0), bytes(1000))[:-3])
        near.close()
        await taker.gone()
        await pipe.wait_closed()
        assert taker.chunks == []
        gc.collect()
        taker._room.extend(b"more")  # raises if the pipe held it


async def test_a_connection_that_breaks_says_how() -> None:
    async with raw() as (near, pipe, taker):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pipe._transport._fatal_error(ConnectionResetError("reset"))  # type: ignore[union-attr]
        assert await taker.gone() == "the connection broke: reset"


async def test_the_bytes_of_a_chunk_go_straight_to_their_room() -> None:
    """They are read from the socket to where they belong, except for what came with the message before them."""
    pipe, taker = SocketPipe(STAMP), Taker()
    pipe.open(taker)
    head = frame(Chunk("tx", 1, "site", 0, 0), bytes(100_000))[:-100_000]
    pipe.get_buffer(-1)[: len(head)] = head
    pipe.buffer_updated(len(head))
    buffer = pipe.get_buffer(-1)
    assert buffer.obj is taker._room
    assert len(buffer) == 100_000
    del buffer
    pipe.connection_lost(None)


async def test_the_buffer_grows_for_a_large_message_and_shrinks_again() -> None:
    async with raw() as (near, pipe, taker):
        large = TaskOffer("t", "train", bytes(1_000_000), [])
        await write(near, frame(large))
        await taker.until(1)
        assert len(pipe._in) == socket_module._BUFFER


async def test_a_message_that_is_written_in_one_turn_is_one_write(ends: Pair) -> None:
    left, right = ends
    if not isinstance(left, SocketPipe):
        return
    writes: list[int] = []
    transport = left._transport
    assert transport is not None
    write_really = transport.write

    def count(data: bytes) -> None:
        writes.append(len(data))
        write_really(data)

    transport.write = count  # type: ignore[method-assign, assignment]
    taker = Taker()
    right.open(taker)
    for _ in range(5):
        left.send(Beat())
    await taker.until(5)
    assert len(writes) == 1


async def test_a_pipe_that_is_closed_before_its_connection_is_made_closes_it_then() -> None:
    """A gate refuses whom it has no room for while the connection is being made."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)

    def refused() -> SocketPipe:
        pipe = SocketPipe()
        pipe.send(End("no room"))
        pipe.close()
        return pipe

    _, pipe = await loop.create_connection(refused, sock=far)
    await asyncio.wait_for(pipe.wait_closed(), 5)
    assert b"no room" in await loop.sock_recv(near, 100)
    assert await loop.sock_recv(near, 100) == b""
    near.close()


async def test_the_user_of_a_peer_is_known_on_unix_sockets() -> None:
    async with raw() as (_, pipe, _taker):
        assert pipe.peer_user == os.getuid()
    assert SocketPipe().peer_user is None
