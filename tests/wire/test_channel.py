"""Messages arrive whole and in order, however the bytes come."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.wire.messages import Credit, FramesDone, Message, SendNet, WorkerReady, WorkerRefused, encoder
from tests.wire.ends import End, connected


class Kept(asyncio.WriteTransport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def framed(*messages: Message) -> bytes:
    parts = [encoder.encode(message) for message in messages]
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Credit, st.integers(0, 2**40), st.just(0), st.integers(0, 9), st.integers(0, 9)),
    st.builds(WorkerRefused, st.text(max_size=30), st.text(max_size=30)),
    st.builds(FramesDone, st.just(1), st.just(2), st.lists(st.integers(0, 2**33), max_size=5)),
    st.builds(SendNet, st.text(max_size=9), st.integers(0, 9), st.binary(max_size=300)),
)


@given(st.lists(messages, max_size=8), st.data())
async def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(
    sent: list[Message], data: st.DataObject
) -> None:
    end = End()
    whole = framed(*sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        if start < stop:
            end.channel.data_received(whole[start:stop])
    assert end.got == sent
    assert end.channel.bytes_in == len(whole)


async def test_messages_arrive_byte_by_byte() -> None:
    end = End()
    sent: list[Message] = [WorkerReady(1, "a"), Credit(1, 2, 3, 4), WorkerReady(2, "")]
    seen = []
    for byte in framed(*sent):
        end.channel.data_received(bytes([byte]))
        seen.append(len(end.got))
    assert end.got == sent
    assert seen[-2:] == [2, 3], "a message arrives with its last byte, not before"


@given(st.lists(st.lists(messages, max_size=4), max_size=4))
async def test_what_is_sent_is_what_the_other_end_gets(turns: list[list[Message]]) -> None:
    here, there = End(), End()
    transport = Kept()
    here.channel.connection_made(transport)
    for turn in turns:
        for message in turn:
            here.channel.send(message)
        here.channel.flush()
    for part in transport.written:
        there.channel.data_received(part)
    assert there.got == [message for turn in turns for message in turn]
    assert here.channel.bytes_out == there.channel.bytes_in


async def test_messages_of_one_turn_of_the_loop_are_written_together() -> None:
    end, transport = End(), Kept()
    end.channel.connection_made(transport)
    end.channel.send(WorkerReady(1, "a"))
    end.channel.send(WorkerReady(2, "b"))
    assert not transport.written
    await asyncio.sleep(0)
    assert transport.written == [framed(WorkerReady(1, "a"), WorkerReady(2, "b"))]
    end.channel.send(WorkerReady(3, "c"))
    await asyncio.sleep(0)
    assert transport.written[1:] == [framed(WorkerReady(3, "c"))]


async def test_what_is_sent_before_the_connection_is_there_is_sent_when_it_is() -> None:
    end, transport = End(), Kept()
    end.channel.send(WorkerReady(1, "early"))
    await asyncio.sleep(0)  # the turn in which it would have been written
    end.channel.send(WorkerReady(2, "later"))
    end.channel.connection_made(transport)
    assert b"".join(transport.written) == framed(WorkerReady(1, "early"), WorkerReady(2, "later"))
    await asyncio.sleep(0)
    assert b"".join(transport.written) == framed(WorkerReady(1, "early"), WorkerReady(2, "later")), "and only once"


async def test_what_is_sent_to_a_lost_connection_is_ignored() -> None:
    end, transport = End(), Kept()
    end.channel.connection_made(transport)
    end.channel.connection_lost(None)
    end.channel.send(WorkerReady(1, "nobody"))
    await asyncio.sleep(0)
    assert transport.written == []
    assert end.lost == [None]


@pytest.mark.parametrize("size", [(1 << 34) + 1, 2**64 - 1])
async def test_a_header_that_announces_too_much_is_refused(size: int) -> None:
    end = End()
    end.channel.data_received(framed(WorkerReady(1, "good")))
    with pytest.raises(ValueError, match="exceeds the limit"):
        end.channel.data_received(struct.pack("<Q", size) + b"x" * 100)
    assert end.got == [WorkerReady(1, "good")]


# over real sockets


async def test_messages_cross_a_socket_in_both_directions_in_order() -> None:
    async with connected(End) as (a, b):
        sent: list[Message] = [Credit(i, 0, i, i) for i in range(500)]
        for i, message in enumerate(sent):
            a.channel.send(message)
            b.channel.send(WorkerReady(i, "x" * (i % 7)))
        await b.until(lambda: len(b.got) == 500)
        await a.until(lambda: len(a.got) == 500)
        assert b.got == sent
        assert a.got == [WorkerReady(i, "x" * (i % 7)) for i in range(500)]


async def test_a_message_of_many_megabytes_arrives_between_small_ones() -> None:
    payload = bytes(range(256)) * (1 << 16)  # 16 MiB, far more than a socket's buffer
    async with connected(End) as (a, b):
        sent: list[Message] = [WorkerReady(1, "before"), SendNet("p", 0, payload), WorkerReady(2, "after")]
        for message in sent:
            a.channel.send(message)
        await b.until(lambda: len(b.got) == 3)
        assert b.got == sent


async def test_what_was_sent_right_before_closing_arrives() -> None:
    async with connected(End) as (a, b):
        sent: list[Message] = [WorkerRefused(f"{i}", "j" * 1000) for i in range(1000)]
        for message in sent:
            a.channel.send(message)
        a.channel.close()
        await b.until(lambda: b.lost)
        assert b.got == sent


async def test_each_end_is_notified_once_of_a_lost_connection() -> None:
    async with connected(End) as (a, b):
        a.channel.close()
        a.channel.close()
        await a.until(lambda: a.lost)
        await b.until(lambda: b.lost)
        b.channel.close()
        await asyncio.sleep(0)
    assert a.lost == [None]
    assert b.lost == [None]
    assert a.channel.lost
    assert b.channel.lost


@pytest.mark.parametrize("junk", [b"\xff" * 64, struct.pack("<Q", 3) + b"\xc1\xc1\xc1"], ids=["header", "body"])
async def test_a_connection_that_brings_junk_is_ended(junk: bytes) -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context))
    end = End()
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        await loop.create_connection(lambda: end.channel, sock=ours)
        theirs.sendall(framed(WorkerReady(1, "good")) + junk)
        await end.until(lambda: end.lost)
    loop.set_exception_handler(None)
    assert end.got == [WorkerReady(1, "good")]
    assert len(end.lost) == 1
    assert isinstance(end.lost[0], ValueError)
    assert reported
