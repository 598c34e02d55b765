"""Pure utilities: bounded dicts, growing delays, framing, cleaned text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.base.backoff import delay_after, delays
from dfm_async.base.containers import BoundedDict
from dfm_async.base.framing import HEAD, Unframer
from dfm_async.base.text import cleaned, cut


def test_bounded_dict_evicts_the_oldest_item() -> None:
    evicted: list[tuple[str, int]] = []
    found: BoundedDict[str, int] = BoundedDict(2, lambda key, value: evicted.append((key, value)))
    found["a"], found["b"], found["a"] = 1, 2, 3
    assert not evicted
    found["c"] = 4
    assert evicted == [("a", 3)]
    assert list(found.items()) == [("b", 2), ("c", 4)]


def test_bounded_dict_keeps_what_is_used() -> None:
    found: BoundedDict[str, int] = BoundedDict(2)
    found.update(a=1, b=2)
    assert found.use("a") == 1
    assert found.use("missing") is None
    assert found.setdefault("c", 3) == 3
    assert list(found) == ["a", "c"]


def test_delays_double_up_to_the_longest() -> None:
    assert list(itertools.islice(delays(0.1, 0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert [delay_after(attempt, 0.1, 0.5) for attempt in range(1, 6)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_delays_do_not_overflow() -> None:
    assert delay_after(10_000, 0.1, 30.0) == 30.0
    assert delay_after(10_000, 0.0, 30.0) == 0.0
    assert next(itertools.islice(delays(0.1, 30.0), 5_000, None)) == 30.0


def framed(messages: list[bytes]) -> bytes:
    """Return the stream of messages."""
    return b"".join(HEAD.pack(len(message)) + message for message in messages)


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 60)))
def test_unframer_finds_the_messages_however_the_stream_is_cut(messages: list[bytes], sizes: list[int]) -> None:
    stream, found, unframer = framed(messages), list[bytes](), Unframer(40)
    start = 0
    for size in [*sizes, len(stream) + 1]:
        unframer.feed(stream[start : start + size], lambda message: found.append(bytes(message)))
        start += size
    assert found == messages


def test_unframer_refuses_a_message_beyond_the_limit() -> None:
    unframer, found = Unframer(3), list[bytes]()
    with pytest.raises(ValueError, match="4 bytes exceeds the limit of 3 bytes"):
        unframer.feed(framed([b"abc", b"abcd"]), lambda message: found.append(bytes(message)))
    assert found == [b"abc"]


def test_unframer_raises_what_its_receiver_raises() -> None:
    def take(_message: memoryview) -> None:
        raise KeyError("receiver")

    with pytest.raises(KeyError, match="receiver"):
        Unframer(10).feed(framed([b"abc"]), take)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("two\nlines\t", "two\nlines\t"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\u202eb", "a\\u202eb"),
        ("größe", "größe"),
    ],
)
def test_cleaned_escapes_control_characters(text: str, expected: str) -> None:
    assert cleaned(text, 100) == expected


def test_cut_counts_bytes_and_keeps_characters_whole() -> None:
    assert cut("äää", 6) == "äää"
    assert cut("äää", 5) == "ää…"
    assert cleaned("abcdef", 3) == "abc…"
