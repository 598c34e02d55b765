"""Requests of a web service are the beginning of the traces of their jobs, or a part of their callers'."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from dfm_async.telemetry.current import Position, read_traceparent
from dfm_async.web import Service
from tests.telemetry.rig import Gathered, Tree
from tests.telemetry.test_otel import plain
from tests.web.rig import new_service, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


def service(sink: Gathered | Path | None) -> Service:
    return new_service(trace=sink)


async def test_a_request_is_the_beginning_of_the_trace_of_its_job() -> None:
    sink = Gathered()
    async with serving(service(sink)) as server:
        await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}})
        await server.client.get("/jobs")  # only looks
    tree = sink.tree
    assert tree.root.name == "dfm.request"
    assert tree.root.attributes == {
        "http.request.method": "POST",
        "http.route": "/pipelines/{name}/jobs",
        "http.response.status_code": 201,
    }
    assert tree.parents("dfm.execute") == {"dfm.request": 1}
    assert len(tree.of("dfm.operation")) == 1


async def test_request_belongs_to_the_trace_of_its_caller() -> None:
    sink = Gathered()
    async with serving(service(sink)) as server:
        await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}}, headers={"traceparent": HEADER})
    assert {span.trace_id for span in sink.spans} == {TRACE}
    (request,) = [span for span in sink.spans if span.name == "dfm.request"]
    assert request.parent_id == PARENT


async def test_refused_request_is_recorded_as_refused() -> None:
    sink = Gathered()
    async with serving(service(sink)) as server:
        response = await server.client.post("/pipelines/nothing/jobs", json={})
        assert response.status_code == 404
        response = await server.client.post("/pipelines/squares/jobs", json={"params": {"x": "three"}})
        assert response.status_code == 422
    first, second = sorted((span for span in sink.spans if span.name == "dfm.request"), key=lambda span: span.start)
    assert (first.status, first.attributes["http.response.status_code"]) == ("error", 404)
    assert (second.status, second.attributes["exception.type"]) == ("error", "ParameterError")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    found, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return found


async def test_the_sdk_gets_the_request_as_a_span_of_a_server(exporter: InMemorySpanExporter) -> None:
    async with serving(service(None)) as server:
        await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}}, headers={"traceparent": HEADER})
    spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans if span.context is not None} == {int(TRACE, 16)}
    (request,) = [span for span in spans if span.name == "dfm.request"]
    assert request.kind is SpanKind.SERVER
    assert request.parent is not None
    assert request.parent.span_id == int(PARENT, 16)


async def test_unsampled_caller_gets_no_trace_from_the_sdk(exporter: InMemorySpanExporter) -> None:
    async with serving(service(None)) as server:
        header = HEADER.removesuffix("1") + "0"
        await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}}, headers={"traceparent": header})
    assert exporter.get_finished_spans() == ()


async def test_there_is_no_second_span_for_a_request_that_has_one(exporter: InMemorySpanExporter) -> None:
    found = service(None)
    app = Starlette(lifespan=found.lifespan, routes=[Mount("/dfm", found.app)])
    async with serving(found, Instrumented(app)) as server:
        await server.client.post("/pipelines/squares/jobs", json={"params": {"x": 3}})
    tree = Tree(map(plain, exporter.get_finished_spans()))
    assert tree.root.name == "theirs"
    assert tree.of("dfm.request") == []
    assert tree.parents("dfm.execute") == {"theirs": 1}


class Instrumented:
    """What an instrumentation of a web framework comes to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        with trace.get_tracer("theirs").start_as_current_span("theirs", kind=SpanKind.SERVER):
            await self._app(scope, receive, send)


# the header


@pytest.mark.parametrize("text", [HEADER, f" {HEADER} ", f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-more"])
def test_valid_traceparent_names_a_trace(text: str) -> None:
    assert read_traceparent(text) == Position(TRACE, int(PARENT, 16))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        HEADER.upper(),
        HEADER + "-more",
        HEADER[:-1],
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-0g",
        f"cc-{TRACE}-{PARENT}-01-" + "x" * 10_000,
        f"{HEADER},{HEADER}",
        "00-" + "\u0661" * 32 + f"-{PARENT}-01",
    ],
)
def test_invalid_traceparent_is_ignored(text: str | None) -> None:
    assert read_traceparent(text) is None


@given(st.text())
def test_random_traceparent_never_raises(text: str) -> None:
    assert read_traceparent(text) is None
