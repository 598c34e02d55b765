"""Spans in files: one JSON object per line, for the owner's eyes, readable whatever happened to the writer."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import Federation, Session
from dfm_async.telemetry import FileSink, Span, read_trace
from dfm_async.telemetry.spans import encode_spans, new_span_id
from tests.support.processes import ROOT, run_python
from tests.telemetry.rig import Tree, doubles, fed

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts
times = st.integers(0, 2**63 - 1)
hexes = st.integers(1, 2**64 - 1).map("{:016x}".format)
spans = st.builds(
    Span,
    name=texts,
    trace_id=st.integers(1, 2**128 - 1).map("{:032x}".format),
    span_id=hexes,
    parent_id=st.none() | hexes,
    start=times,
    end=times,
    process=texts,
    attributes=st.dictionaries(texts, scalars),
    status=st.sampled_from(["ok", "error"]),
    message=texts,
)

ONE = Span(name="a", trace_id="1" * 32, span_id="2" * 16, parent_id=None, start=1, end=2, process="p")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(st.lists(spans, max_size=4))
def test_spans_are_read_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, found: list[Span]) -> None:
    path = tmp_path_factory.getbasetemp() / "spans.jsonl"
    path.write_bytes(encode_spans(found))
    assert read_trace(path) == found


@given(st.lists(spans, min_size=1, max_size=4), st.data())
def test_a_file_that_was_cut_anywhere_lacks_only_what_was_cut(
    tmp_path_factory: pytest.TempPathFactory, found: list[Span], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    whole = encode_spans([ONE, *found])
    first = len(encode_spans([ONE]))
    cut = data.draw(st.integers(first, len(whole)))
    path.write_bytes(whole[:cut])
    read = read_trace(path)
    assert read == [ONE, *found][: len(read)]
    assert len(read) >= whole[:cut].count(b"\n")


def test_the_keys_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    sink = FileSink(path)
    sink.open()
    sink.write([ONE])
    sink.close()
    assert lines(path) == [
        {
            "name": "a",
            "trace_id": "1" * 32,
            "span_id": "2" * 16,
            "parent_id": None,
            "start": 1,
            "end": 2,
            "process": "p",
            "attributes": {},
            "status": "ok",
            "message": "",
        }
    ]


def test_keys_that_are_not_known_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode_spans([ONE]).replace(b"{", b'{"new":[1,{"x":2}],', 1) + b"\n")
    assert read_trace(path) == [ONE]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": 3}\n', "line 1: Expected `str`, got `int`"),
        ("# Read me\n", "line 1"),
        ("\n[]\n", "line 2: Expected `object`, got `array`"),
        ('{"name": "a"}\n', "line 1: Object missing required field"),
    ],
)
def test_file_that_has_no_spans_is_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "wrong"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_an_empty_file_has_no_spans(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_trace(tmp_path / "empty") == []


async def test_sessions_append_to_a_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        async with Session(fed, target="inline", trace=str(path)) as session:
            await (await session.execute(doubles, {"count": 1}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_trace(path)
    assert len({span.trace_id for span in found}) == 2


async def test_session_appends_behind_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode_spans([ONE]) + b'{"name":"to')
    async with Session(fed, target="inline", trace=path) as session:
        await (await session.execute(doubles, {"count": 1}))
    first, *others = read_trace(path)
    assert first == ONE
    assert Tree(others).root.name == "dfm.execute"


async def test_a_file_that_cannot_be_opened_keeps_the_session_from_connecting(tmp_path: Path) -> None:
    session = Session(fed, target="inline", trace=tmp_path / "nowhere" / "trace.jsonl")
    with pytest.raises(FileNotFoundError):
        await session.connect()
    await session.close()


async def test_a_sink_serves_one_session_at_a_time(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "trace.jsonl")
    async with Session(fed, target="inline", trace=sink) as session:
        with pytest.raises(RuntimeError, match=re.escape(str(sink.path))):
            async with Session(fed, target="inline", trace=sink):
                pass
        await (await session.execute(doubles, {"count": 1}))
    async with Session(fed, target="inline", trace=sink) as session:  # one after the other is well
        await (await session.execute(doubles, {"count": 1}))
    assert len({span.trace_id for span in read_trace(sink.path)}) == 2


FULL = """
import asyncio, logging, resource, sys
from dfm_async import Session
from tests.telemetry.rig import doubles, fed

async def main():
    async with Session(fed, target="inline", trace=sys.argv[1]) as session:
        for _ in range(2):
            print(await (await session.execute(doubles, {"count": 1})))

logging.basicConfig(level=logging.ERROR, format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))  # no file may grow: as on a full disk
asyncio.run(main())
"""


def test_full_disk_loses_the_trace_but_not_the_job(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    done = run_python("-c", FULL, path, cwd=ROOT)
    assert done.stdout.split() == ["JobStatus.FINISHED"] * 2
    assert len([line for line in done.stderr.splitlines() if str(path) in line]) == 1


def test_invalid_trace_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"trace must be .* not 3"):
        Session(Federation("x"), trace=3)  # type: ignore[arg-type]


def test_ids_are_unique_and_never_zero() -> None:
    found = {new_span_id() for _ in range(10_000)}
    assert len(found) == 10_000
    assert all(0 < span < 2**64 for span in found)
