"""Metrics of sessions, and how they are reported to the OpenTelemetry SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dfm_async import LocalOptions, Session
from dfm_async.telemetry.metrics import METRICS
from dfm_async.telemetry.otel_metrics import ObservedSession
from tests.conftest import Connect
from tests.support.processes import ROOT
from tests.support.waiting import until
from tests.telemetry.rig import doubles, fed, streams

Values = dict[tuple[str, frozenset[tuple[str, Any]]], float]


class Meter:
    """An SDK that the test reads."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def values(self) -> Values:
        data = self._reader.get_metrics_data()
        found: Values = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        found[metric.name, frozenset((point.attributes or {}).items())] = point.value  # type: ignore[union-attr]
        return found


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    found = Meter()
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", found.provider)
    assert metrics.get_meter_provider() is found.provider
    yield found
    found.provider.shutdown()


def of(values: Values, name: str, **attributes: str) -> float:
    wanted = {("dfm.federation", "traced"), *((f"dfm.{key}", value) for key, value in attributes.items())}
    return values[name, frozenset(wanted)]


async def test_results_and_tokens_are_counted(connect: Connect) -> None:
    options = LocalOptions(unresponsive_after=0.4)  # a heartbeat every 0.1 s
    async with connect(fed, options=options) as session:
        await (await session.execute(doubles, [{"count": 3}] * 2))
        await (await session.execute(streams, {"count": 50}))
        stats = session.stats()
        assert stats.yielded.count == 56
        assert stats.yielded.bytes >= 56
        await until(lambda: session.stats().tokens.count >= 56)
        stats = session.stats()
        assert stats.tokens.bytes >= 56
        if stats.sites:  # there are workers
            assert stats.sites["lab"].tokens.count >= 56
            assert stats.sites["desk"].tokens.count == 0
            assert stats.lag is not None
            assert 0 <= stats.lag < 30
        else:
            assert stats.lag is None


async def test_tokens_of_a_lost_worker_still_count() -> None:
    async with asyncio.timeout(30), Session(fed, options=LocalOptions(unresponsive_after=0.4)) as session:
        await (await session.execute(doubles, {"count": 5}))
        await until(lambda: session.stats().tokens.count)
        before = session.stats().tokens
        (worker,) = session.target.workers("lab")  # type: ignore[attr-defined] # it is the local target
        worker.kill()
        await worker.ended
        assert session.stats().tokens == before
        assert session.stats().sites["lab"].restarts == 1


def test_documentation_lists_every_metric() -> None:
    table = [
        f"| {f'`{metric.name}`' if metric.name else ''} | {f'`{metric.prometheus}`' if metric.prometheus else ''} "
        f"| {metric.kind} | {metric.unit} | {metric.about} |".replace("|  |", "| |")
        for metric in METRICS
    ]
    page = (ROOT / "docs" / "observability.md").read_text()
    assert "\n".join(table) in page, "the table of metrics must be:\n" + "\n".join(table)


# OpenTelemetry


async def test_otel_counters_keep_the_counts_of_closed_sessions(connect: Connect, meter: Meter) -> None:
    async with connect(fed) as session:
        await (await session.execute(doubles, {"count": 3}))
    assert of(meter.values(), "dfm.results") == 3
    assert of(meter.values(), "dfm.jobs.ended", status="finished") == 1
    async with connect(fed) as session:
        assert of(meter.values(), "dfm.results") == 3
        await (await session.execute(doubles, {"count": 2}))
    assert of(meter.values(), "dfm.results") == 5
    assert of(meter.values(), "dfm.jobs.ended", status="finished") == 2
    assert not any(name == "dfm.jobs.running" for name, _ in meter.values())


async def test_otel_reads_the_metrics_of_a_session(meter: Meter) -> None:
    async with Session(fed, target="inline") as session:
        await (await session.execute(doubles, {"count": 3}))
        values = await asyncio.to_thread(meter.values)
        assert of(values, "dfm.jobs.running") == 0
        assert of(values, "dfm.jobs.ended", status="finished") == 1
        assert of(values, "dfm.results") == 3
        assert of(values, "dfm.results.size") >= 3
        assert of(values, "dfm.tokens") >= 3
        assert of(values, "dfm.log.events") == session.stats().results
    counters = {"dfm.jobs.ended", "dfm.results", "dfm.results.size", "dfm.tokens", "dfm.tokens.size"}
    assert {name for name, _ in meter.values()} == counters  # it is closed


async def test_otel_reads_the_metrics_of_sites_with_workers(meter: Meter) -> None:
    async with Session(fed) as session:
        await (await session.execute(doubles, {"count": 3}))
        values = await asyncio.to_thread(meter.values)
    for site in ("lab", "desk"):
        assert of(values, "dfm.site.workers", site=site) == 1
        assert of(values, "dfm.site.restarts", site=site) == 0


async def test_otel_adds_up_sessions_of_one_federation(meter: Meter) -> None:
    async with Session(fed, target="inline") as one, Session(fed, target="inline") as two:
        for session in (one, two):
            await (await session.execute(doubles, {"count": 2}))
        assert of(await asyncio.to_thread(meter.values), "dfm.results") == 4


async def test_otel_reads_on_the_event_loop_itself(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.telemetry.otel_metrics._MAX_AGE", 0.0)
    async with Session(fed, target="inline") as session:
        await (await session.execute(doubles, {"count": 2}))
        assert of(meter.values(), "dfm.results") == 2


async def test_busy_event_loop_does_not_block_the_reader_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.telemetry.otel_metrics._MAX_AGE", 0.0)
    monkeypatch.setattr("dfm_async.telemetry.otel_metrics._TIMEOUT", 0.01)
    async with Session(fed, target="inline") as session:
        found = ObservedSession("x", session.stats)
        await (await session.execute(doubles, {"count": 2}))
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(found.stats().yielded.count))
        thread.start()
        thread.join()  # the loop does nothing else meanwhile
        assert seen == [0]  # what was known before
        assert (await asyncio.to_thread(found.stats)).yielded.count == 2


def test_closed_event_loop_keeps_the_last_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.telemetry.otel_metrics._MAX_AGE", 0.0)

    async def run() -> ObservedSession:
        async with Session(fed, target="inline") as session:
            return ObservedSession("x", session.stats)

    found = asyncio.run(run())
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(found.stats().running))
    thread.start()
    thread.join()
    assert seen == [0]
