"""Messages in parts: what a sender that ignores the rules can make the receiver keep."""

from __future__ import annotations

import msgspec
import pytest

from dfm_async.targets.flare.duplex import Duplex
from dfm_async.targets.flare.parts import Joiner, Part, Parts, TooLarge, cut, together

decode = msgspec.msgpack.Decoder(Parts).decode
encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 950])
def test_messages_are_joined_again(size: int) -> None:
    message, joiner = bytes(index % 251 for index in range(size)), Joiner(1000, 100)
    for _ in range(2):
        *before, last = [joiner.take(part) for part in decode(encode(list(cut(message, 100))))]
        assert last == message
        assert before == [None] * len(before)


@pytest.mark.parametrize(("size", "more"), [(0, True), (99, True), (101, True), (101, False)])
def test_parts_of_another_size_are_refused(size: int, more: bool) -> None:
    for before in (0, 1):
        joiner = Joiner(1000, 100)
        for _ in range(before):
            joiner.take(Part(memoryview(bytes(100)), True))
        with pytest.raises(ValueError, match=rf"a part of a message has {size} bytes instead of 100"):
            joiner.take(Part(memoryview(bytes(size)), more))
        assert joiner.take(Part(memoryview(b"next"))) == b"next"


def test_a_message_above_the_limit_is_refused() -> None:
    joiner = Joiner(150, 100)
    joiner.take(Part(memoryview(bytes(100)), True))
    with pytest.raises(TooLarge, match="150 bytes"):
        joiner.take(Part(memoryview(bytes(100)), True))


def test_a_part_that_is_kept_does_not_keep_its_packet() -> None:
    packet, joiner = bytearray(encode([Part(memoryview(bytes(100)), True)])), Joiner(1000, 100)
    for part in decode(packet):
        joiner.take(part)
    del part
    packet.clear()  # raises BufferError while there is a view of it


def test_parts_with_further_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode([[b"", True, bytes(1000)]]))


def test_a_packet_has_a_bounded_number_of_parts() -> None:
    many = [Part(memoryview(b""))] * 10_000
    assert [len(decode(encode(group))) for group in together(many, 1000)] == [4096, 4096, 1808]
    with pytest.raises(msgspec.ValidationError):
        decode(encode(many))
    with pytest.raises(ValueError, match="length"):
        Duplex(lambda _: None).take(encode([0, 0, many]))
