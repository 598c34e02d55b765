"""Traces of jobs on both targets: every call and every hop, with right parents, whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dfm_async import JobAborted, JobFailed, Pipeline, Session
from dfm_async.telemetry import Span, read_trace
from dfm_async.telemetry.spans import APPLICATION
from dfm_async.testing import no_leaks
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.sessions import all_values, first_value
from tests.telemetry.rig import (
    Gathered,
    Tree,
    breaking,
    doubles,
    endless,
    fed,
    generators,
    hands,
    impatient,
    mortal,
    patient,
    streams,
    tries,
)


async def trace_of(connect: Connect, pipeline: Pipeline, params: Any) -> Tree:
    """Execute a pipeline in a session of its own, and return its trace."""
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        await (await session.execute(pipeline, params))
    return sink.tree


PARENTS = {"dfm.job": "dfm.execute", "dfm.site": "dfm.job", "dfm.operation": "dfm.site"}


async def test_a_job_is_one_trace_from_its_execution_to_every_call(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with connect(fed, trace=path) as session:
        job = await session.execute(doubles, {"count": 3})
        await job
    tree = Tree(read_trace(path))
    assert tree.root.name == "dfm.execute"
    for name, parent in PARENTS.items():
        assert set(tree.parents(name)) == {parent}
    calls = Counter((span.process, span.attributes["dfm.operation"]) for span in tree.of("dfm.operation"))
    assert calls == {("lab", "numbers"): 1, ("desk", "double"): 3}
    frames = [span.attributes["dfm.frame"] for span in tree.of("dfm.operation", operation="double")]
    assert sorted(map(str, frames)) == ["0.0", "0.1", "0.2"]
    assert {span.attributes["dfm.job"] for span in tree.spans} == {job.job_id}
    assert {span.attributes["dfm.pipeline"] for span in tree.spans} == {"doubles"}
    assert {span.process for span in tree.of("dfm.site")} == {"lab", "desk"}
    assert {span.status for span in tree.spans} == {"ok"}
    assert {span.process for span in (*tree.of("dfm.job"), tree.root)} == {APPLICATION}


async def test_values_hop_from_the_span_of_their_sender(connect: Connect) -> None:
    tree = await trace_of(connect, doubles, [{"count": 3}] * 2)
    tokens: Counter[tuple[object, object]] = Counter()
    for hop in tree.of("dfm.hop"):
        sender, source = tree.parent(hop), hop.attributes["dfm.from"]
        assert sender.name == ("dfm.job" if source == APPLICATION else "dfm.site")
        assert sender.process == source
        assert hop.process == hop.attributes["dfm.to"]
        count, size = hop.attributes["dfm.tokens"], hop.attributes["dfm.bytes"]
        assert isinstance(count, int)
        assert isinstance(size, int)
        tokens[source, hop.attributes["dfm.to"]] += count
    assert tokens[APPLICATION, "lab"] == 2
    assert tokens["lab", "desk"] >= 6
    assert tokens["desk", APPLICATION] == 6


async def test_the_elements_of_a_stream_hop_too(connect: Connect) -> None:
    tree = await trace_of(connect, streams, {"count": 20})
    hops = [span for span in tree.of("dfm.hop") if span.attributes["dfm.from"] == "lab"]
    assert sum(int(hop.attributes["dfm.tokens"]) for hop in hops) >= 20


async def test_spans_of_operations_are_nested(connect: Connect) -> None:
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        await (await session.execute(doubles, {"count": 2}))
        await (await session.execute(hands))
    first = Tree(span for span in sink.spans if span.trace_id == sink.spans[0].trace_id)
    count = first.one("count")
    assert first.parent(count).attributes["dfm.operation"] == "numbers"
    assert (count.attributes["limit"], count.attributes["found"]) == (2, 2)
    assert first.parent(first.one("inner")) is count
    assert count.process == "lab"
    assert first.parents("in thread") == {"dfm.operation": 2}
    second = Tree(span for span in sink.spans if span.trace_id != sink.spans[0].trace_id)
    # A thread that the operation has started by itself knows the operation, but not what is open elsewhere.
    assert second.parents("by hand") == second.parents("around") == {"dfm.operation": 1}


async def test_the_call_of_a_generator_lasts_until_its_end(connect: Connect) -> None:
    tree = await trace_of(connect, generators, {"count": 4})
    assert tree.parents("all") == {"dfm.operation": 2}
    assert tree.parents("one") == {"all": 8}
    for part in (*tree.of("all"), *tree.of("one")):
        assert tree.parent(part).end >= part.end


async def test_generators_that_are_not_read_to_their_ends_are_whole(connect: Connect) -> None:
    tree = await trace_of(connect, impatient, {"count": 1000})
    assert tree.parents("all") == {"dfm.operation": 2}
    assert set(tree.parents("one")) == {"all"}
    assert {span.status for span in tree.spans} == {"ok"}


async def test_failed_spans_have_the_error(connect: Connect) -> None:
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        with pytest.raises(JobFailed):
            await (await session.execute(breaking, {"value": 1}))
    tree = sink.tree
    call, inner = tree.one("dfm.operation"), tree.one("risky")
    for span in (call, inner):
        assert (span.status, span.message) == ("error", "ValueError: one")
        assert span.attributes["exception.type"] == "ValueError"
        assert span.attributes["exception.message"] == "one"
        assert 'raise ValueError("one")' in str(span.attributes["exception.stacktrace"])
    job = tree.one("dfm.job")
    assert (job.status, job.message, job.attributes["dfm.status"]) == ("error", "1 error", "failed")
    assert tree.one("dfm.site").status == "ok"


async def test_each_attempt_has_a_span(connect: Connect, tmp_path: Path) -> None:
    tree = await trace_of(connect, tries, {"path": str(tmp_path / "tries")})
    calls = tree.of("dfm.operation")
    assert [(call.attributes["dfm.attempt"], call.status) for call in calls] == [(1, "error"), (2, "error"), (3, "ok")]
    assert [tree.parent(look) for look in tree.of("look")] == calls


async def test_a_cancelled_job_has_a_whole_trace(connect: Connect) -> None:
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        job = await session.execute(endless, watch=True)
        async for activity in job.activity():
            if any(node.started for node in activity.nodes):
                break
        await job.cancel("enough")
        with pytest.raises(JobAborted):
            await job
    tree = sink.tree
    assert tree.parent(tree.one("waiting")) is tree.one("dfm.operation")
    assert {name: tree.one(name).status for name in ("dfm.job", "dfm.site", "dfm.operation", "waiting")} == {
        "dfm.job": "error",
        "dfm.site": "error",
        "dfm.operation": "error",
        "waiting": "error",
    }
    assert tree.one("dfm.job").message == "enough"


async def test_killed_worker_leaves_a_span_with_the_error(tmp_path: Path) -> None:
    sink = Gathered()
    async with Session(fed, trace=sink) as session:
        job = await session.execute(mortal, {"path": str(tmp_path / "once")})
        await job
    tree = sink.tree
    lost, again = tree.of("dfm.site", site="desk")
    assert (lost.status, lost.attributes["dfm.attempt"]) == ("error", 1)
    assert "SIGKILL" in lost.message
    assert (again.status, again.attributes["dfm.attempt"]) == ("ok", 2)
    assert tree.parent(tree.one("dfm.operation")) is again  # what the dead one did not send is missing


async def test_a_job_that_is_resumed_has_a_trace_of_its_own(connect: Connect, tmp_path: Path) -> None:
    store, first, second = f"sqlite:///{tmp_path / 'jobs.db'}", Gathered(), Gathered()
    async with connect(fed, trace=first, store=store) as session:
        job = await session.execute(patient, {"path": str(tmp_path / "once")}, watch=True)
        async for activity in job.activity():
            if any(node.started for node in activity.nodes):
                break
    assert first.tree.one("dfm.job").attributes["dfm.status"] == "interrupted"
    async with connect(fed, trace=second, store=store) as session:
        await (await session.resume(job.job_id))
    tree = second.tree
    assert (tree.root.name, tree.root.attributes["dfm.resumed"]) == ("dfm.execute", True)
    assert tree.root.attributes["dfm.job"] == first.tree.root.attributes["dfm.job"] == job.job_id
    assert tree.one("dfm.job").attributes["dfm.status"] == "finished"


async def test_all_calls_are_recorded_or_counted(connect: Connect) -> None:
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        await (await session.execute(doubles, {"count": 3000}))
    assert len({span.span_id for span in sink.spans}) == len(sink.spans)
    told = sum(span.name in ("dfm.operation", "in thread") for span in sink.spans)
    left_out = sum(int(span.attributes.get("dfm.spans_left_out", 0)) for span in sink.spans)
    assert told <= 6001
    assert told + left_out >= 6001


async def test_an_execution_that_is_refused_ends_its_trace(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        monkeypatch.setattr(session.target, "submit", _refuse)
        with pytest.raises(ConnectionError):
            await session.execute(doubles, {"count": 1})
    tree = sink.tree
    assert (tree.root.status, tree.root.message) == ("error", "ConnectionError: no")
    assert tree.one("dfm.job").attributes["dfm.status"] == "aborted"


async def _refuse(*_: object) -> None:
    raise ConnectionError("no")


async def test_a_traced_session_leaves_nothing_behind(connect: Connect, tmp_path: Path) -> None:
    with no_leaks():
        async with connect(fed, trace=tmp_path / "trace.jsonl") as session:
            finished = await session.execute(generators, {"count": 2})
            await session.execute(endless)  # is aborted with the session
            await finished
    statuses = {
        span.attributes["dfm.status"] for span in read_trace(tmp_path / "trace.jsonl") if span.name == "dfm.job"
    }
    assert statuses == {"finished", "aborted"}


async def test_many_jobs_at_once_have_traces_of_their_own(connect: Connect) -> None:
    sink = Gathered()
    async with connect(fed, trace=sink) as session:
        jobs = [await session.execute(doubles, {"count": 2}) for _ in range(5)]
        await asyncio.gather(*jobs)
    traces = {span.trace_id for span in sink.spans}
    assert len(traces) == 5
    for trace_id in traces:
        tree = Tree(span for span in sink.spans if span.trace_id == trace_id)
        assert len(tree.of("dfm.operation")) == 3
    assert sink.calls == ["open", "close"]


async def test_a_job_that_runs_inside_an_operation_belongs_to_its_trace() -> None:
    sink = Gathered()

    async def outer(count: int) -> int:
        async with Session(fed, target="inline", trace=sink) as inner:
            return len(await (await inner.execute(doubles, {"count": count})).collect())

    home = type(fed)("outer")
    call = home.site("home").operation(outer)
    pipeline = pipeline_of(call, "count")
    async with Session(home, target="inline", trace=sink) as session:
        assert await first_value(session, pipeline, {"count": 2}) == 2
    tree = sink.tree
    outer_execution, inner_execution = tree.of("dfm.execute")
    assert tree.root is outer_execution
    assert tree.parent(inner_execution).attributes["dfm.operation"] == "outer"


async def test_untraced_job_has_spans_that_do_nothing(connect: Connect) -> None:
    async with connect(fed) as session:
        assert await all_values(session, doubles, {"count": 3}) == [0, 2, 4]


class Broken(Gathered):
    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, spans: list[Span]) -> None:
        super().write(spans)
        self.written.set()
        raise RuntimeError("no more")


async def test_sink_that_raises_is_logged_once_and_jobs_run(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    sink = Broken()
    with caplog.at_level(logging.ERROR, "dfm_async.telemetry"):
        async with connect(fed, trace=sink) as session:
            for _ in range(2):
                await (await session.execute(doubles, {"count": 1}))
                await sink.written.wait()
                sink.written.clear()
    (record,) = caplog.records
    assert "Broken" in record.getMessage()
    assert len({span.trace_id for span in sink.spans}) == 2
