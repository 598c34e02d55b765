"""Server-sent events: the parser finds what the standard says, however the stream is cut."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dfm_async.client.event_stream import EventParser, EventTooLarge, SentEvent

LARGE = 1_000_000
ENDS = [b"\n", b"\r", b"\r\n"]
LINES = [
    b"",
    b"",
    b":",
    b": comment",
    b"data",
    b"data:",
    b"data: a",
    b"data:  b",
    b"data: \xe2\x82\xac",
    b"data: \xf0\x9f\x98",
]
LINES += [b"event: e", b"event:", b"event", b"id: 7", b"id: \0", b"id", b"retry: 250", b"retry: -1", b"retry: 2x"]
LINES += [b"retry: " + b"9" * 30, b"retry: \xd9\xa3", b"\xef\xbb\xbf", b"\xef\xbb\xbfdata: c", b" data: d", b"Data: e"]

lines = st.tuples(st.sampled_from(LINES) | st.binary(max_size=6), st.sampled_from(ENDS)).map(b"".join)
streams = st.tuples(st.sampled_from([b"", b"\xef\xbb\xbf"]), st.lists(lines).map(b"".join), st.binary(max_size=3)).map(
    b"".join
)


def reference(stream: bytes) -> tuple[list[SentEvent], int | None]:
    """Return the events and the reconnection time of a whole stream, by the algorithm of the standard."""
    found: list[SentEvent] = []
    name, data, last, retry = "", "", "", None
    for line in re.split("\r\n|\r|\n", stream.decode("utf-8-sig", "replace"))[:-1]:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                found.append(SentEvent(name or "message", data.removesuffix("\n"), last))
            name, data = "", ""
        elif field == "event":
            name = value
        elif field == "data":
            data += value + "\n"
        elif field == "id" and "\0" not in value:
            last = value
        elif field == "retry" and re.fullmatch("[0-9]{1,18}", value):
            retry = int(value)
    return found, retry


def parts_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted(cut % (len(stream) + 1) for cut in cuts)
    return [stream[start:end] for start, end in zip([0, *ends], [*ends, len(stream)], strict=True)]


def read(parts: list[bytes], largest: int = LARGE) -> tuple[list[SentEvent], int | None]:
    """Return the events and the reconnection time; what exceeds the limit ends them."""
    stream = EventParser(largest)
    found: list[SentEvent] = []
    try:
        for part in parts:
            found.extend(stream.feed(part))
    except EventTooLarge:
        found.append(SentEvent("too large", "", ""))
    return found, stream.retry


@given(streams, st.lists(st.integers(0, 1000), max_size=8))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", list(range(23)))
@example(b"\xef\xbb\xbfdata: \xe2\x82\xac\n\n", list(range(20)))
def test_events_are_those_of_the_standard_however_the_stream_is_cut(stream: bytes, cuts: list[int]) -> None:
    assert read(parts_of(stream, cuts)) == reference(stream)


@given(streams, st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 40))
def test_limit_holds_in_the_same_place_however_the_stream_is_cut(stream: bytes, cuts: list[int], largest: int) -> None:
    assert read(parts_of(stream, cuts), largest) == read([stream], largest)


@pytest.mark.parametrize("end", ENDS)
def test_event_is_found_as_soon_as_its_blank_line_begins(end: bytes) -> None:
    stream = EventParser(LARGE)
    assert list(stream.feed(b"data: a" + end)) == []
    assert list(stream.feed(end[:1])) == [SentEvent("message", "a", "")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_many_events_may_be_longer_together_than_the_limit(end: bytes, size: int) -> None:
    data = (b": a comment of 30 characters...." + end + b"data: x" + end + end) * 10
    found, _ = read([data[start : start + size] for start in range(0, len(data), size)], 50)
    assert found == [SentEvent("message", "x", "")] * 10


@pytest.mark.parametrize(
    "part", [b"x" * 100, b"data: " + b"x" * 100 + b"\n", b"data:\r\n", b":\r", b"event: a\n", b"data: \xff\n"]
)
def test_event_without_an_end_is_refused_within_bounded_memory(part: bytes) -> None:
    largest = 50_000
    stream = EventParser(largest)
    tracemalloc.start()
    try:
        with pytest.raises(EventTooLarge, match="more than 50,000 bytes"):
            for _ in range(largest):
                assert list(stream.feed(part)) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * largest
