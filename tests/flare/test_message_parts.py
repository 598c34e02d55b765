"""Messages in parts: what a sender that ignores the rules can make the receiver keep."""

from __future__ import annotations

import msgspec
import pytest

from dfm_async.targets.flare.message_parts import MessagePart, Parts, Reassembler, TooLarge, batches, split
from dfm_async.targets.flare.reliable_stream import ReliableStream

decode = msgspec.msgpack.Decoder(Parts).decode
encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 950])
def test_messages_are_joined_again(size: int) -> None:
    message, reassembler = bytes(index % 251 for index in range(size)), Reassembler(1000, 100)
    for _ in range(2):
        *before, last = [reassembler.take(part) for part in decode(encode(list(split(message, 100))))]
        assert last == message
        assert before == [None] * len(before)


@pytest.mark.parametrize(("size", "more"), [(0, True), (99, True), (101, True), (101, False)])
def test_parts_of_another_size_are_refused(size: int, more: bool) -> None:
    for before in (0, 1):
        reassembler = Reassembler(1000, 100)
        for _ in range(before):
            reassembler.take(MessagePart(memoryview(bytes(100)), True))
        with pytest.raises(ValueError, match=rf"a part of a message has {size} bytes instead of 100"):
            reassembler.take(MessagePart(memoryview(bytes(size)), more))
        assert reassembler.take(MessagePart(memoryview(b"next"))) == b"next"


def test_a_message_above_the_limit_is_refused() -> None:
    reassembler = Reassembler(150, 100)
    reassembler.take(MessagePart(memoryview(bytes(100)), True))
    with pytest.raises(TooLarge, match="150 bytes"):
        reassembler.take(MessagePart(memoryview(bytes(100)), True))


def test_a_part_that_is_kept_does_not_keep_its_packet() -> None:
    packet, reassembler = bytearray(encode([MessagePart(memoryview(bytes(100)), True)])), Reassembler(1000, 100)
    for part in decode(packet):
        reassembler.take(part)
    del part
    packet.clear()  # raises BufferError while there is a view of it


def test_parts_with_further_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode([[b"", True, bytes(1000)]]))


def test_a_packet_has_a_bounded_number_of_parts() -> None:
    many = [MessagePart(memoryview(b""))] * 10_000
    assert [len(decode(encode(group))) for group in batches(many, 1000)] == [4096, 4096, 1808]
    with pytest.raises(msgspec.ValidationError):
        decode(encode(many))
    with pytest.raises(ValueError, match="length"):
        ReliableStream(lambda _: None).take(encode([0, 0, many]))
