"""What workers say survives its way through a pipe, however it is cut into pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dfm_async.wire.worker_output import LONGEST, Heartbeat, LogRecord, Output, OutputSplitter, cut, encode_output

lines = st.text(st.characters(exclude_characters="\n\r\x1e", exclude_categories=["Cs"]), max_size=20)
records = st.builds(
    LogRecord,
    level=st.integers(0, 100),
    message=st.text(st.characters(exclude_categories=["Cs"])),
    origin=st.text(st.characters(exclude_categories=["Cs"])),
    created=st.floats(0, 1e10),
    frame=st.none() | st.lists(st.integers(0, 1000), max_size=3).map(tuple),
    job=st.none() | st.just("job"),
)
pulses = st.builds(Heartbeat, lag=st.floats(0, 1e5), alive=st.floats(0, 1e9), idle=st.booleans())


def _bytes(item: Output) -> bytes:
    return item.encode() + b"\n" if isinstance(item, str) else encode_output(item)


def _split(data: bytes, cuts: list[int]) -> list[Output]:
    splitter = OutputSplitter()
    found: list[Output] = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        found += splitter.feed(data[start:end])
    return found + splitter.finish()


@given(st.lists(lines | records | pulses), st.lists(st.integers(0, 10_000), max_size=8))
def test_everything_arrives_in_order_however_it_is_cut(items: list[Output], cuts: list[int]) -> None:
    assert _split(b"".join(map(_bytes, items)), cuts) == items


@given(st.binary(), st.lists(st.integers(0, 1000), max_size=5))
def test_any_bytes_at_all_can_be_read(data: bytes, cuts: list[int]) -> None:
    assert _split(data, cuts) == _split(data, [])


@given(st.lists(st.sampled_from([b"\x1e", b"\n", b"text", encode_output(Heartbeat(lag=1.0, alive=2.0))]), max_size=20))
def test_a_record_between_other_output_is_found(parts: list[bytes]) -> None:
    """Only text directly behind a record's beginning spoils it."""
    found = _split(b"".join(parts), [])
    assert found.count(Heartbeat(lag=1.0, alive=2.0)) == parts.count(encode_output(Heartbeat(lag=1.0, alive=2.0)))


def test_an_unfinished_line_before_a_record_is_a_line_of_its_own() -> None:
    data = b"half a line" + encode_output(Heartbeat(lag=1.0, alive=2.0)) + b"the end"
    assert _split(data, []) == ["half a line", Heartbeat(lag=1.0, alive=2.0), "the end"]


def test_a_record_that_was_torn_apart_is_text() -> None:
    whole = encode_output(LogRecord(level=20, message="message", origin="origin", created=1.0))
    torn = whole[:10] + b"NOISE\n" + whole[10:]
    assert _split(torn + encode_output(Heartbeat(lag=1.0, alive=2.0)), [])[-1] == Heartbeat(lag=1.0, alive=2.0)
    assert all(isinstance(item, str) for item in _split(torn, []))


@given(st.text())
def test_any_text_can_be_sent(text: str) -> None:
    class Text(str):
        __slots__ = ()

    for message in (text, Text(text)):
        (found,) = _split(encode_output(LogRecord(level=20, message=message, origin=message, created=1.0)), [])
        assert isinstance(found, LogRecord)
        assert found.message == text.encode("utf-8", "backslashreplace").decode()


def test_long_texts_are_cut_with_a_note() -> None:
    assert cut("x" * LONGEST) == "x" * LONGEST
    assert cut("x" * (LONGEST + 1000)) == "x" * LONGEST + " [... cut: 1,000 more characters]"
    assert _split(b"x" * (LONGEST + 7) + b"\n", [100]) == ["x" * LONGEST + " [... cut: 7 more characters]"]


def test_a_line_that_never_ends_is_not_kept() -> None:
    splitter = OutputSplitter()
    found: list[Output] = []
    for _ in range(100):
        found += splitter.feed(b"x" * LONGEST)
        assert len(splitter._rest) <= 5 * 1024 * 1024
    found += splitter.feed(b"\nnext\n")
    assert [str(line)[:4] for line in found] == ["xxxx", "next"]
