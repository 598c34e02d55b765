"""The metrics of a session: one table for OpenTelemetry, Prometheus and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from dfm_async.model.stats import LaneStats, LimitStats, SessionStats, SiteStats

S = TypeVar("S")

Sample: TypeAlias = tuple[dict[str, str], float | None]
"""Labels and a value; None if the value is not known."""
Read: TypeAlias = Callable[[S], Iterable[Sample]]
"""Reads the values of a metric."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One metric.

    Attributes:
        kind: whether it is a current value, or a count that only grows.
        name: the name in OpenTelemetry; None if OpenTelemetry does not get it.
        prometheus: the name in Prometheus; None if Prometheus does not get it.
        unit: the unit, as OpenTelemetry writes it.
        about: what it is.
        read: returns its values. Labels have the prefix ``dfm.`` in OpenTelemetry.
    """

    kind: Literal["gauge", "counter"]
    name: str | None
    prometheus: str | None
    unit: str
    about: str
    read: Read[S]


def gauge(name: str | None, prometheus: str | None, unit: str, about: str, read: Read[S]) -> Metric[S]:
    """Return the metric of a current value."""
    return Metric("gauge", name and f"dfm.{name}", prometheus and f"dfm_{prometheus}", unit, about, read)


def counter(name: str | None, prometheus: str | None, unit: str, about: str, read: Read[S]) -> Metric[S]:
    """Return the metric of a count that only grows."""
    return Metric("counter", name and f"dfm.{name}", prometheus and f"dfm_{prometheus}", unit, about, read)


def value_of(read: Callable[[S], float | None]) -> Read[S]:
    """Return a reader of one value without labels."""
    return lambda source: [({}, read(source))]


def _by_site(read: Callable[[SiteStats], float | None]) -> Read[SessionStats]:
    return lambda stats: [({"site": name}, read(site)) for name, site in stats.sites.items()]


def _by_limit(read: Callable[[LimitStats], float | None]) -> Read[SessionStats]:
    return lambda stats: [
        ({"site": name, "limit": limit.limit, "operation": limit.operation or ""}, read(limit))
        for name, site in stats.sites.items()
        for limit in site.limits
    ]


def _by_lane(read: Callable[[LaneStats], float | None]) -> Read[SessionStats]:
    return lambda stats: [({"lane": str(number)}, read(lane)) for number, lane in enumerate(stats.lanes)]


def _ended(stats: SessionStats) -> list[Sample]:
    return [({"status": status}, count) for status, count in sorted(stats.ended.items())]


def _unresponsive(site: SiteStats) -> int:
    return sum(worker.unresponsive for worker in site.workers)


def _lags(stats: SessionStats) -> Iterator[Sample]:
    yield {"process": "application"}, stats.lag
    for name, site in stats.sites.items():
        yield {"process": name}, site.lag


# Names are written without their prefix: dfm. in OpenTelemetry, dfm_ in Prometheus.
METRICS: Final[tuple[Metric[SessionStats], ...]] = (
    gauge("jobs.running", "jobs_running", "{job}", "Jobs that have a slot.", value_of(lambda s: s.running)),
    gauge("jobs.waiting", "jobs_waiting", "{job}", "Jobs that wait for a slot.", value_of(lambda s: s.waiting)),
    gauge(
        "jobs.remembered",
        "jobs_remembered",
        "{job}",
        "Jobs that are known, ended ones included.",
        value_of(lambda s: s.remembered),
    ),
    counter("jobs.ended", "jobs_ended_total", "{job}", "Jobs that have ended, by status.", _ended),
    gauge("log.events", "log_events", "{event}", "Events in the logs of all jobs.", value_of(lambda s: s.results)),
    gauge("log.size", "log_bytes", "By", "Values in the logs of all jobs.", value_of(lambda s: s.result_bytes)),
    counter(
        "results", "results_total", "{result}", "Results received from sites.", value_of(lambda s: s.yielded.count)
    ),
    counter(
        "results.size", "result_bytes_total", "By", "Results received from sites.", value_of(lambda s: s.yielded.bytes)
    ),
    counter("tokens", "tokens_total", "{token}", "Values sent between sites.", value_of(lambda s: s.tokens.count)),
    counter("tokens.size", "token_bytes_total", "By", "Values sent between sites.", value_of(lambda s: s.tokens.bytes)),
    gauge("loop.lag", None, "s", "Delay of the event loops, by process.", _lags),
    gauge(None, "loop_lag_seconds", "s", "Delay of the event loop of the application.", value_of(lambda s: s.lag)),
    gauge(None, "site_lag_seconds", "s", "Delay of the slowest event loop of a site.", _by_site(lambda s: s.lag)),
    gauge("memory", "memory_bytes", "By", "Memory of the application.", value_of(lambda s: s.memory)),
    gauge("lane.jobs", "lane_jobs", "{job}", "Jobs on a lane.", _by_lane(lambda s: s.jobs)),
    gauge("lane.alive", "lane_alive", "1", "1 if all workers of a lane are present.", _by_lane(lambda s: s.alive)),
    gauge("site.workers", "site_workers", "{worker}", "Workers of a site.", _by_site(lambda s: len(s.workers))),
    gauge("site.jobs", "site_jobs", "{job}", "Jobs on the workers of a site.", _by_site(lambda s: s.jobs)),
    counter(
        "site.restarts", "site_restarts_total", "{worker}", "Workers lost and replaced.", _by_site(lambda s: s.restarts)
    ),
    counter(
        "site.tokens", "site_tokens_total", "{token}", "Values sent by a site.", _by_site(lambda s: s.tokens.count)
    ),
    counter(
        "site.tokens.size", "site_token_bytes_total", "By", "Values sent by a site.", _by_site(lambda s: s.tokens.bytes)
    ),
    gauge("site.memory", "site_memory_bytes", "By", "Memory of the workers of a site.", _by_site(lambda s: s.memory)),
    gauge(
        "site.unresponsive",
        "site_unresponsive_workers",
        "{worker}",
        "Workers that do not respond.",
        _by_site(_unresponsive),
    ),
    gauge(
        "site.limit.used", "site_limit_used", "1", "Used of a limit of a site, by limit.", _by_limit(lambda s: s.used)
    ),
    gauge("site.limit", "site_limit", "1", "Size of a limit of a site, by limit.", _by_limit(lambda s: s.capacity)),
    gauge(
        "site.limit.waiting",
        "site_limit_waiting_calls",
        "{call}",
        "Calls that wait for a limit of a site, by limit.",
        _by_limit(lambda s: s.waiting),
    ),
)


def prometheus_text(metrics: Iterable[Metric[S]], source: S) -> str:
    """Return metrics in the text format of Prometheus; metrics without a known value are left out."""
    lines: list[str] = []
    for metric in metrics:
        samples = [(labels, value) for labels, value in metric.read(source) if value is not None]
        if metric.prometheus is not None and samples:
            lines.append(f"# HELP {metric.prometheus} {metric.about}\n")
            lines.append(f"# TYPE {metric.prometheus} {metric.kind}\n")
            lines.extend(f"{metric.prometheus}{_labels(labels)} {_number(value)}\n" for labels, value in samples)
    return "".join(lines)


def _labels(labels: dict[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if labels else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
