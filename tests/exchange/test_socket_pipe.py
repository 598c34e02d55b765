"""Pipes: messages come whole, in order and only from this launch; the end is reported once. For sockets and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias
from unittest import mock

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.exchange import socket_pipe as socket_module
from dfm_async.exchange.bootstrap import stamp_of
from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.memory_pipe import memory_pair
from dfm_async.exchange.program_messages import (
    Abort,
    Beat,
    Chunk,
    EndOfTasks,
    Hello,
    Message,
    ProgramMetrics,
    ProgramProgress,
    ResultOffer,
    TaskAnswer,
    TaskOffer,
    encode,
)
from dfm_async.exchange.socket_pipe import SocketPipe
from tests.exchange.rig import Recorder

HEAD = struct.Struct("<IIQ")
STAMP = stamp_of("session", "token")
CHUNK = Chunk("tx", 1, "site", 0, 0)

Pair: TypeAlias = tuple[Any, Any]


def frame(message: Message | bytes, data: bytes = b"", stamp: int = STAMP) -> bytes:
    body = message if isinstance(message, bytes) else encode(message)
    return HEAD.pack(len(body), len(data), stamp) + body + data


async def socket_pair(kernel: int | None = None) -> Pair:
    """Two ends of a socket; the kernel keeps so much of what is not read."""
    loop = asyncio.get_running_loop()
    sockets = socket.socketpair()
    if kernel is not None:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel)
    left, right = [(await loop.create_connection(lambda: SocketPipe(STAMP), sock=end))[1] for end in sockets]
    return left, right


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
async def raw(stamp: int | None = STAMP) -> AsyncIterator[tuple[socket.socket, SocketPipe, Recorder]]:
    """A pipe, and the bare socket at its other end."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    _, pipe = await loop.create_connection(lambda: SocketPipe(stamp), sock=far)
    taker = Recorder(pipe)
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
    taker = Recorder(right)
    sent: list[Message] = [ProgramProgress(float(number)) for number in range(100)]
    for message in sent:
        left.send(message)
    assert await taker.until(100) == sent


async def test_both_directions_at_once(ends: Pair) -> None:
    takers = [Recorder(pipe) for pipe in ends]
    for pipe in ends:
        pipe.send(Beat())
        pipe.send(EndOfTasks("mine"))
    for taker in takers:
        assert await taker.until(2) == [Beat(), EndOfTasks("mine")]


async def test_chunks_and_messages_keep_their_order(ends: Pair) -> None:
    left, right = ends
    taker = Recorder(right)
    data = bytes(range(256)) * 1000
    sent: list[Message] = []
    for number in range(5):
        chunk = Chunk("tx", 1, "site", number, 0)
        left.send(chunk, memoryview(data)[number:])
        left.send(ProgramProgress(float(number)))
        sent += [chunk, ProgramProgress(float(number))]
    assert await taker.until(10) == sent
    assert taker.chunks == [(number, data[number:]) for number in range(5)]


async def test_an_unwanted_chunk_is_reported_without_bytes(ends: Pair) -> None:
    left, right = ends
    taker = Recorder(right, wants=False)
    left.send(CHUNK, memoryview(b"x" * 300_000))
    left.send(Beat())
    assert await taker.until(2) == [CHUNK, Beat()]
    assert taker.chunks == [(0, b"")], "there are no bytes where it said"


async def test_another_receiver_takes_the_rest(ends: Pair) -> None:
    left, right = ends
    second = Recorder()

    class First(Recorder):
        def received(self, message: Message, size: int) -> None:
            super().received(message, size)
            right.open(second)

    first = First(right)
    for message in (Beat(), EndOfTasks(), Abort()):
        left.send(message)
    assert await second.until(2) == [EndOfTasks(), Abort()]
    assert first.got == [Beat()]


async def test_closing_sends_what_is_queued(ends: Pair) -> None:
    left, right = ends
    taker = Recorder(right)
    data = bytes(3_000_000)
    left.send(CHUNK, memoryview(data))
    left.send(EndOfTasks("bye"))
    left.close()
    assert await taker.until(2) == [CHUNK, EndOfTasks("bye")]
    await taker.end()
    await left.wait_closed()


async def test_both_ends_are_notified_of_the_end_once(ends: Pair) -> None:
    takers = [Recorder(pipe) for pipe in ends]
    ends[0].close()
    ends[0].close()
    ends[0].abort()
    for pipe, taker in zip(ends, takers, strict=True):
        assert await taker.end() == "the connection was closed"
        await pipe.wait_closed()
        pipe.abort()
    await asyncio.sleep(0)
    assert [len(taker.reasons) for taker in takers] == [1, 1]


async def test_a_late_receiver_gets_the_messages_and_then_the_end(ends: Pair) -> None:
    left, right = ends
    left.send(Refusal)
    left.close()
    first = Recorder(left)
    await first.end()
    if isinstance(right, SocketPipe):
        await right.wait_closed()
    order: list[object] = []

    class Late(Recorder):
        def received(self, message: Message, size: int) -> None:
            order.append(message)

        def lost(self, reason: str) -> None:
            order.append("lost")

    right.open(Late())
    assert order == [Refusal, "lost"]


Refusal = EndOfTasks("the only message that may come so early")


async def test_what_is_sent_after_the_end_is_ignored(ends: Pair) -> None:
    right = ends[1]
    taker = Recorder(right)
    right.abort()
    await taker.end()
    for pipe in ends:
        await pipe.wait_closed()
        pipe.send(Beat())
        pipe.send(CHUNK, memoryview(b"x"))
        await pipe.drain()
    assert taker.got == []


def _full(ends: Pair) -> Pair:
    """Send more than the connection takes while the other end does not read."""
    left, right = ends
    if isinstance(right, SocketPipe):
        right._transport.pause_reading()  # type: ignore[union-attr]
    for _ in range(20):
        left.send(CHUNK, memoryview(bytes(200_000)))
    return ends


def _read(pipe: Pipe) -> None:
    Recorder(pipe, wants=False)
    if isinstance(pipe, SocketPipe):
        pipe._transport.resume_reading()  # type: ignore[union-attr]


async def test_draining_waits_while_the_other_end_does_not_take(ends: Pair) -> None:
    left, right = _full(ends)
    waiting = asyncio.ensure_future(left.drain())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    _read(right)
    await waiting


async def test_draining_ends_with_the_connection(ends: Pair) -> None:
    left, right = _full(ends)
    waiting = [asyncio.ensure_future(left.drain()) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    right.abort()
    left.abort()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


async def test_a_drain_that_is_cancelled_leaves_the_others_waiting(ends: Pair) -> None:
    left, right = _full(ends)
    first, second = (asyncio.ensure_future(left.drain()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert not second.done()
    _read(right)
    await second


# sockets


MESSAGES = st.one_of(
    st.builds(ProgramProgress, st.floats(0, 1), st.none(), st.text(max_size=20)),
    st.builds(ProgramMetrics, st.integers(0, 9), st.binary(max_size=40)),
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
    pipe = SocketPipe(STAMP)
    taker = Recorder(pipe)
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


@pytest.mark.parametrize(
    "foreign",
    [
        frame(Abort(), stamp=STAMP + 1),
        frame(CHUNK, bytes(5), STAMP + 1),
        frame(CHUNK, bytes(300_000), STAMP + 1),
        frame(b"garbage", stamp=1),
    ],
    ids=["message", "chunk", "large chunk", "garbage"],
)
async def test_a_frame_of_another_launch_is_ignored_and_counted(foreign: bytes) -> None:
    """3.1: messages carry the session's id and the launch's token, others are ignored."""
    async with raw() as (near, pipe, taker):
        await write(near, frame(Beat()) + foreign + frame(CHUNK, b"mine") + frame(EndOfTasks()))
        assert await taker.until(3) == [Beat(), CHUNK, EndOfTasks()]
        assert taker.chunks == [(0, b"mine")]
        assert pipe.ignored == 1


async def test_frames_without_a_stamp_count_only_before_the_handshake() -> None:
    """A gate that has no room says so before it has heard who is there."""
    async with raw() as (near, pipe, taker):
        await write(
            near, frame(EndOfTasks("no room"), stamp=0) + frame(Beat()) + frame(Abort(), stamp=0) + frame(EndOfTasks())
        )
        assert await taker.until(3) == [EndOfTasks("no room"), Beat(), EndOfTasks()]
        assert pipe.ignored == 1


def test_stamps_depend_on_the_session_and_on_the_token() -> None:
    stamps = {stamp_of(session, token) for session in ("a", "b", "ab") for token in ("c", "bc", "")}
    assert len(stamps) == 9
    assert stamp_of("a", "b") == stamp_of("a", "b")


@pytest.mark.parametrize(
    "data", [HEAD.pack(socket_module._LARGEST_UNKNOWN + 1, 0, 0), frame(CHUNK, b"x")], ids=["large", "chunk"]
)
async def test_an_unknown_peer_may_send_only_short_messages(data: bytes) -> None:
    async with raw(stamp=None) as (near, _, taker):
        await write(near, data)
        assert "is too large" in await taker.end()
        assert taker.got == []


async def test_a_peer_that_is_not_known_yet_may_say_hello_with_any_stamp() -> None:
    async with raw(stamp=None) as (near, pipe, taker):
        hello = Hello(1, "t", "s", 7)
        await write(near, frame(hello, stamp=77))
        assert await taker.until(1) == [hello]
        pipe.send(EndOfTasks("no"))
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
        assert "violates the protocol" in await taker.end()
        assert taker.got == [Beat()], "what came before was good"
        await pipe.wait_closed()
        assert await asyncio.get_running_loop().sock_recv(near, 10) == b""


async def test_garbage_is_reported_once_even_to_a_new_receiver() -> None:
    async with raw() as (near, pipe, _):
        later = Recorder()

        class Handing(Recorder):
            def received(self, message: Message, size: int) -> None:
                asyncio.get_running_loop().call_soon(pipe.open, later)

        pipe.open(Handing())
        await write(near, frame(Beat()) + b"\xff" * 64)
        await later.end()
        await pipe.wait_closed()
        assert len(later.reasons) == 1


@pytest.mark.parametrize(
    "whole", [frame(EndOfTasks("never whole")), frame(CHUNK, bytes(1000))], ids=["message", "chunk"]
)
async def test_a_peer_that_vanishes_in_the_middle_of_a_frame_is_lost(whole: bytes) -> None:
    async with raw() as (near, pipe, taker):
        await write(near, whole[:-3])
        near.close()
        assert await taker.end() == "the connection was closed"
        await pipe.wait_closed()
        assert (taker.got, len(taker.reasons)) == ([], 1)
        gc.collect()
        taker.place.extend(b"more")  # raises if the pipe held it


async def test_a_broken_connection_is_reported_with_its_cause() -> None:
    async with raw() as (near, pipe, taker):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pipe._transport._fatal_error(ConnectionResetError("reset"))  # type: ignore[union-attr]
        assert await taker.end() == "the connection broke: reset"


async def test_the_bytes_of_a_chunk_go_straight_to_their_room() -> None:
    """They are read from the socket to where they belong, except for what came with the message before them."""
    pipe = SocketPipe(STAMP)
    taker = Recorder(pipe)
    head = frame(CHUNK, bytes(100_000))[:-100_000]
    pipe.get_buffer(-1)[: len(head)] = head
    pipe.buffer_updated(len(head))
    buffer = pipe.get_buffer(-1)
    assert buffer.obj is taker.place
    assert len(buffer) == 100_000
    del buffer
    pipe.connection_lost(None)


async def test_the_buffer_grows_for_a_large_message_and_shrinks_again() -> None:
    async with raw() as (near, pipe, taker):
        large = TaskOffer(task="t", name="train", data=bytes(range(256)) * 20_000, parts=[])
        await write(near, frame(Beat()) + frame(large) + frame(EndOfTasks()))
        assert await taker.until(3) == [Beat(), large, EndOfTasks()]
        assert len(pipe._in) == socket_module._BUFFER


async def test_what_is_sent_in_one_turn_is_one_write() -> None:
    async with raw() as (near, pipe, _):
        transport = pipe._transport
        with mock.patch.object(transport, "write", wraps=transport.write) as writing:  # type: ignore[union-attr]
            for _ in range(5):
                pipe.send(Beat())
            await asyncio.sleep(0)
        assert writing.call_count == 1
        assert await asyncio.get_running_loop().sock_recv(near, 1000) == frame(Beat()) * 5


async def test_a_pipe_that_is_closed_before_its_connection_is_made_closes_it_then() -> None:
    """A gate refuses whom it has no room for while the connection is being made."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)

    def refused() -> SocketPipe:
        pipe = SocketPipe()
        pipe.send(EndOfTasks("no room"))
        pipe.close()
        return pipe

    _, pipe = await loop.create_connection(refused, sock=far)
    await asyncio.wait_for(pipe.wait_closed(), 5)
    assert b"no room" in await loop.sock_recv(near, 100)
    assert await loop.sock_recv(near, 100) == b""
    near.close()


# writing


SIZES = [1, 1000, 64 * 1024, 256 * 1024, 1024 * 1024, 3, 700_000] * 4


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("kernel", [None, 4096])
@pytest.mark.parametrize("drains", [True, False])
def test_chunks_and_messages_arrive_in_order_whatever_the_kernel_takes(
    loop: Callable[[], asyncio.AbstractEventLoop], kernel: int | None, drains: bool
) -> None:
    async def exchange() -> None:
        sender, receiver = await socket_pair(kernel)
        taker = Recorder(receiver)
        sent: list[Message] = []
        for number, size in enumerate(SIZES):
            # One of them waits for the end of the loop's turn, the other is written at once.
            note: Message = (
                ProgramProgress(float(number)) if number % 2 else ResultOffer("task", str(number), "OK", b"", [])
            )
            chunk = Chunk("tx", number, "r", 0, 0)
            sender.send(note)
            sender.send(chunk, memoryview(bytes([number]) * size))
            sent += [note, chunk]
            if drains:
                await sender.drain()
        async with asyncio.timeout(20):
            assert await taker.until(len(sent)) == sent
        assert taker.chunks == [(0, bytes([number]) * size) for number, size in enumerate(SIZES)]
        for pipe in (sender, receiver):
            pipe.abort()
            await pipe.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(exchange())


async def test_chunks_for_a_peer_that_is_gone_are_dropped() -> None:
    sender, receiver = await socket_pair()
    taker = Recorder(sender)
    receiver.abort()
    await receiver.wait_closed()
    sender.send(CHUNK, memoryview(bytes(1024)))
    async with asyncio.timeout(20):
        await taker.end()
    sender.send(CHUNK, memoryview(bytes(1024)))
    await sender.drain()
    await sender.wait_closed()


async def test_an_accepted_task_is_reported_before_the_program_can_block_its_loop() -> None:
    async with raw() as (near, pipe, _):
        pipe.send(TaskAnswer("task", True))
        assert near.recv(1000)
