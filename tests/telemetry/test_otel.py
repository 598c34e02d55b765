"""The OpenTelemetry SDK that a user has set up gets the spans of jobs, with nothing to configure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace.status import StatusCode

from dfm_async import Federation, JobFailed, Pipeline, Session, Yield, current_context
from dfm_async.telemetry import Span, read_trace
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.processes import run_python
from tests.support.sessions import first_value
from tests.telemetry.rig import Gathered, Tree, breaking, doubles, fed, generators

seen = Federation("seen")
there = seen.site("there")


def current() -> tuple[str, str]:
    place = trace.get_current_span().get_span_context()
    return f"{place.trace_id:032x}", f"{place.span_id:016x}"


@there.operation
async def looks() -> list[tuple[str, str]]:
    """What a library would see that is instrumented with OpenTelemetry."""
    before = current()
    with current_context().span("inner"):
        inner = current()
    return [before, inner, current()]


@there.operation
def looks_in_thread() -> list[tuple[str, str]]:
    with current_context().span("inner"):
        inner = current()
    return [current(), inner, current()]


@there.operation
def generates() -> Iterator[list[tuple[str, str]]]:
    outer = current()
    for _ in range(2):
        with current_context().span("inner"):
            yield [outer, current(), outer]


@there.operation
async def traced() -> bool:
    return current_context().trace is not None


with Pipeline("looking") as looking:
    Yield(looks(), place="loop")
    Yield(looks_in_thread(), place="thread")
    Yield(generates(), place="generator")

asking = pipeline_of(traced)


def plain(span: ReadableSpan) -> Span:
    """The same span in our own words, for checks that are made of all."""
    assert span.context is not None
    return Span(
        name=span.name,
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        start=span.start_time or 0,
        end=span.end_time or 0,
        process=str((span.attributes or {}).get("dfm.site", "application")),
        attributes=dict(span.attributes or {}),  # type: ignore[arg-type] # ours are plain
        status="error" if span.status.status_code is StatusCode.ERROR else "ok",
        message=span.status.description or "",
    )


class Sdk:
    """What a user's set-up comes to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._exporter = InMemorySpanExporter()
        self.provider: Any = None

    def set_up(self, sampler: Sampler | None = None) -> None:
        self.provider = TracerProvider(sampler, Resource({"service.name": "ours"}))
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.use(self.provider)

    def use(self, provider: Any) -> None:
        """As set_tracer_provider, which works only once in the life of a process."""
        self._patch.setattr(trace, "_TRACER_PROVIDER", provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def tree(self) -> Tree:
        return Tree(map(plain, self.spans))


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    found = Sdk(monkeypatch)
    yield found
    if isinstance(found.provider, TracerProvider):
        found.provider.shutdown()


async def test_the_sdk_gets_the_whole_trace(connect: Connect, sdk: Sdk) -> None:
    sdk.set_up()
    async with connect(fed) as session:
        await (await session.execute(doubles, {"count": 3}))
        await (await session.execute(generators, {"count": 2}))
    found = [plain(span) for span in sdk.spans]
    first, second = dict.fromkeys(span.trace_id for span in found)
    tree = Tree(span for span in found if span.trace_id == first)
    assert tree.root.name == "dfm.execute"
    assert tree.parents("dfm.job") == {"dfm.execute": 1}
    assert tree.parents("dfm.site") == {"dfm.job": 2}
    assert tree.parents("dfm.operation") == {"dfm.site": 4}
    assert tree.parents("inner") == {"count": 1}
    assert set(tree.parents("dfm.hop")) == {"dfm.job", "dfm.site"}
    assert Tree(span for span in found if span.trace_id == second).parents("one") == {"all": 4}
    for span in sdk.spans:
        assert span.resource.attributes["service.name"] == "ours"
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "dfm_async"


async def test_a_job_belongs_to_the_span_that_it_was_executed_in(connect: Connect, sdk: Sdk) -> None:
    sdk.set_up()
    async with connect(fed) as session:
        with sdk.provider.get_tracer("mine").start_as_current_span("my work"):
            job = await session.execute(doubles, {"count": 1})
        await job
    tree = sdk.tree
    assert tree.root.name == "my work"
    assert tree.parents("dfm.execute") == {"my work": 1}


async def test_a_file_and_the_sdk_get_the_same_trace(connect: Connect, sdk: Sdk, tmp_path: Path) -> None:
    sdk.set_up()
    path = tmp_path / "trace.jsonl"
    async with connect(fed, trace=path) as session:
        with sdk.provider.get_tracer("mine").start_as_current_span("my work"):
            await (await session.execute(doubles, {"count": 1}))
    ours = {(span.name, span.trace_id, span.span_id, span.parent_id, span.status) for span in read_trace(path)}
    theirs = {
        (span.name, span.trace_id, span.span_id, span.parent_id, span.status)
        for span in map(plain, sdk.spans)
        if span.name != "my work"
    }
    assert ours == theirs


async def test_unsampled_job_is_neither_recorded_nor_sent(connect: Connect, sdk: Sdk) -> None:
    sdk.set_up(ALWAYS_OFF)
    sink = Gathered()
    async with connect(seen, trace=sink) as session:
        assert await first_value(session, asking) is False
    assert sdk.spans == sink.spans == []


async def test_libraries_in_operations_have_the_right_parent(connect: Connect, sdk: Sdk) -> None:
    sdk.set_up()
    async with connect(seen) as session:
        results = await (await session.execute(looking)).collect()
    tree = sdk.tree
    assert len(results) == 4
    for result in results:
        (trace_id, outer), (_, inner), after = result.value
        assert trace_id == tree.root.trace_id
        assert after == (trace_id, outer)
        assert tree.by_id[outer].name == "dfm.operation"
        assert tree.by_id[outer].attributes["dfm.node"] == result.node
        assert tree.by_id[inner].name == "inner"
        assert tree.by_id[inner].parent_id == outer


async def test_errors_are_events_of_their_spans(connect: Connect, sdk: Sdk) -> None:
    sdk.set_up()
    async with connect(fed) as session:
        with pytest.raises(JobFailed):
            await (await session.execute(breaking, {"value": 1}))
    call = next(span for span in sdk.spans if span.name == "dfm.operation")
    assert (call.status.status_code, call.status.description) == (StatusCode.ERROR, "ValueError: one")
    (event,) = call.events
    assert event.name == "exception"
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "ValueError"
    assert 'raise ValueError("one")' in str(event.attributes["exception.stacktrace"])
    assert not any(str(name).startswith("exception.") for name in call.attributes or {})


async def test_failed_execution_is_an_error_in_the_sdk(
    connect: Connect, sdk: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ConnectionError("no")

    sdk.set_up()
    async with connect(fed) as session:
        monkeypatch.setattr(session.target, "submit", refuse)
        with pytest.raises(ConnectionError):
            await session.execute(doubles, {"count": 1})
    root = sdk.tree.root
    assert (root.name, root.status, root.message) == ("dfm.execute", "error", "ConnectionError: no")


async def test_unknown_provider_is_logged_once_and_jobs_run(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    sdk.use(Foreign())
    with caplog.at_level(logging.WARNING, "dfm_async.telemetry"):
        async with Session(seen, target="inline") as session:
            for _ in range(2):
                assert await first_value(session, asking) is False
    (record,) = caplog.records
    assert "tests.telemetry.test_otel.Foreign is not that of opentelemetry-sdk" in record.getMessage()


class Foreign(trace.TracerProvider):
    def get_tracer(self, *_args: Any, **_more: Any) -> trace.Tracer:
        return trace.NoOpTracer()


async def test_sdk_that_was_shut_down_does_not_affect_jobs(sdk: Sdk) -> None:
    sdk.set_up()
    async with Session(fed, target="inline") as session:
        sdk.provider.shutdown()
        await (await session.execute(doubles, {"count": 1}))


async def test_another_sdk_gets_the_jobs_that_come_after_it_was_set_up(sdk: Sdk) -> None:
    async with Session(fed, target="inline") as session:
        await (await session.execute(doubles, {"count": 1}))
        assert sdk.spans == []
        for _ in range(2):
            sdk.set_up()
            await (await session.execute(doubles, {"count": 1}))
    assert len({span.context.trace_id for span in sdk.spans if span.context is not None}) == 2


def test_opentelemetry_is_not_loaded_without_use() -> None:
    code = """
import asyncio, sys
from dfm_async import Session
from tests.telemetry.rig import doubles, fed
async def main():
    async with Session(fed, target="inline", trace=sys.argv[1]) as session:
        await (await session.execute(doubles, {"count": 1}))
asyncio.run(main())
print(*[name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert run_python("-c", code, "/dev/null").stdout.split() == []
