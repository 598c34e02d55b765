"""Metrics: what sessions count, and what the OpenTelemetry SDK is told of it."""

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
from dfm_async.telemetry.metrics import ObservedSession
from dfm_async.wire.output import Pulse
from dfm_async.workers.site_worker import SiteWorker
from tests.conftest import Connect
from tests.telemetry.rig import doubles, fed, streams

Values = dict[tuple[str, frozenset[tuple[str, Any]]], float]


class Meter:
    """An SDK that is asked by hand."""

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


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set by each sign of life of a worker."""
    event, take = asyncio.Event(), SiteWorker._pulse

    def pulse(worker: SiteWorker, found: Pulse) -> None:
        take(worker, found)
        event.set()

    monkeypatch.setattr(SiteWorker, "_pulse", pulse)
    return event


async def test_results_and_tokens_are_counted_from_the_beginning(connect: Connect, heard: asyncio.Event) -> None:
    options = LocalOptions(unresponsive_after=0.4)  # a sign of life every 0.1 s
    async with connect(fed, options=options) as session:
        await (await session.execute(doubles, [{"count": 3}] * 2))
        await (await session.execute(streams, {"count": 50}))
        stats = session.stats()
        assert stats.yielded.count == 56
        assert stats.yielded.bytes >= 56
        async with asyncio.timeout(30):
            while session.stats().tokens.count < 56:
                await heard.wait()
                heard.clear()
        stats = session.stats()
        assert stats.tokens.bytes >= 56
        if stats.sites:  # there are workers
            assert stats.sites["lab"].tokens.count >= 56
            assert stats.sites["desk"].tokens.count == 0
            assert stats.lag is not None
            assert 0 <= stats.lag < 30
        else:
            assert stats.lag is None


async def test_what_a_lost_worker_has_sent_still_counts(heard: asyncio.Event) -> None:
    async with asyncio.timeout(30), Session(fed, options=LocalOptions(unresponsive_after=0.4)) as session:
        await (await session.execute(doubles, {"count": 5}))
        while not session.stats().tokens.count:
            await heard.wait()
            heard.clear()
        before = session.stats().tokens
        (worker,) = session.target.workers("lab")  # type: ignore[attr-defined] # it is the local target
        worker.kill()
        await worker.ended
        assert session.stats().tokens == before
        assert session.stats().sites["lab"].restarts == 1


# OpenTelemetry


async def test_counters_do_not_fall_when_a_session_ends(connect: Connect, meter: Meter) -> None:
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


async def test_the_sdk_is_told_how_sessions_are(meter: Meter) -> None:
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


async def test_the_sdk_is_told_of_sites_with_workers(meter: Meter) -> None:
    async with Session(fed) as session:
        await (await session.execute(doubles, {"count": 3}))
        values = await asyncio.to_thread(meter.values)
    for site in ("lab", "desk"):
        assert of(values, "dfm.site.workers", site=site) == 1
        assert of(values, "dfm.site.restarts", site=site) == 0


async def test_sessions_of_one_federation_are_told_together(meter: Meter) -> None:
    async with Session(fed, target="inline") as one, Session(fed, target="inline") as two:
        for session in (one, two):
            await (await session.execute(doubles, {"count": 2}))
        assert of(await asyncio.to_thread(meter.values), "dfm.results") == 4


async def test_whoever_asks_on_the_loop_itself_is_answered(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.telemetry.metrics._FRESH", 0.0)
    async with Session(fed, target="inline") as session:
        await (await session.execute(doubles, {"count": 2}))
        assert of(meter.values(), "dfm.results") == 2


async def test_a_busy_loop_does_not_hold_up_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.telemetry.metrics._FRESH", 0.0)
    monkeypatch.setattr("dfm_async.telemetry.metrics._PATIENCE", 0.01)
    async with Session(fed, target="inline") as session:
        found = ObservedSession("x", session.stats)
        await (await session.execute(doubles, {"count": 2}))
        told: list[int] = []
        thread = threading.Thread(target=lambda: told.append(found.stats().yielded.count))
        thread.start()
        thread.join()  # the loop does nothing else meanwhile
        assert told == [0]  # what was known before
        assert (await asyncio.to_thread(found.stats)).yielded.count == 2


def test_a_loop_that_is_closed_has_told_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.telemetry.metrics._FRESH", 0.0)

    async def run() -> ObservedSession:
        async with Session(fed, target="inline") as session:
            return ObservedSession("x", session.stats)

    found = asyncio.run(run())
    told: list[int] = []
    thread = threading.Thread(target=lambda: told.append(found.stats().running))
    thread.start()
    thread.join()
    assert told == [0]
