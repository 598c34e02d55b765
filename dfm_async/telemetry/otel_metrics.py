"""The instruments of OpenTelemetry that tell how sessions are. Made once for each provider of an SDK."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from dfm_async.model.stats import SessionStats
from dfm_async.telemetry.metrics import sessions

__all__ = ["register"]

_SCOPE: Final = "dfm_async"
_Values = Iterable[tuple[dict[str, str], float | None]]
_Read = Callable[[SessionStats], _Values]


def _one(read: Callable[[SessionStats], float | None]) -> _Read:
    return lambda stats: [({}, read(stats))]


def _by_site(read: Callable[[Any], float | None]) -> _Read:
    return lambda stats: [({"dfm.site": name}, read(site)) for name, site in stats.sites.items()]


def _ended(stats: SessionStats) -> _Values:
    return [({"dfm.status": status}, count) for status, count in stats.ended.items()]


def _lags(stats: SessionStats) -> _Values:
    yield {"dfm.process": "application"}, stats.lag
    for name, site in stats.sites.items():
        yield {"dfm.process": name}, site.lag


_GAUGES: Final[dict[str, tuple[str, str, _Read]]] = {
    "dfm.jobs.running": ("{job}", "Jobs that have a slot.", _one(lambda s: s.running)),
    "dfm.jobs.waiting": ("{job}", "Jobs that wait for a slot.", _one(lambda s: s.waiting)),
    "dfm.log.events": ("{event}", "Events in the logs of all jobs.", _one(lambda s: s.results)),
    "dfm.log.size": ("By", "Values in the logs of all jobs.", _one(lambda s: s.result_bytes)),
    "dfm.loop.lag": ("s", "How late the slowest loop of a process is.", _lags),
    "dfm.memory": ("By", "Memory of the application.", _one(lambda s: s.memory)),
    "dfm.site.memory": ("By", "Memory of the workers of a site.", _by_site(lambda site: site.memory)),
    "dfm.site.workers": ("{worker}", "Workers of a site.", _by_site(lambda site: len(site.workers))),
}
_COUNTERS: Final[dict[str, tuple[str, str, _Read]]] = {
    "dfm.jobs.ended": ("{job}", "Jobs that have ended.", _ended),
    "dfm.results": ("{result}", "Results that have come from the sites.", _one(lambda s: s.yielded.count)),
    "dfm.results.size": ("By", "Results that have come from the sites.", _one(lambda s: s.yielded.bytes)),
    "dfm.site.restarts": ("{worker}", "Workers that were lost and replaced.", _by_site(lambda site: site.restarts)),
    "dfm.tokens": ("{token}", "Values that sites have sent to each other.", _one(lambda s: s.tokens.count)),
    "dfm.tokens.size": ("By", "Values that sites have sent to each other.", _one(lambda s: s.tokens.bytes)),
}

_registered: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def register() -> None:
    """Makes the instruments, if an SDK is set up that does not have them."""
    provider = metrics.get_meter_provider()
    # Without an SDK there is a stand-in, which makes instruments when one is set up; there is nobody to wait for it.
    if type(provider).__module__.startswith("opentelemetry.metrics") or provider in _registered:
        return
    _registered.add(provider)
    meter = provider.get_meter(_SCOPE)
    for name, (unit, about, read) in _GAUGES.items():
        meter.create_observable_gauge(name, [_Callback(read)], unit, about)
    for name, (unit, about, read) in _COUNTERS.items():
        meter.create_observable_counter(name, [_Callback(read)], unit, about)


class _Callback:
    """Gives one metric of all sessions. Sessions of the same federation are told together."""

    def __init__(self, read: _Read) -> None:
        self._read = read

    def __call__(self, _options: CallbackOptions) -> Iterator[Observation]:
        found: dict[tuple[tuple[str, str], ...], float] = {}
        for session in sessions():
            for attributes, value in self._read(session.stats()):
                if value is not None:
                    key = (("dfm.federation", session.federation), *attributes.items())
                    found[key] = found.get(key, 0) + value
        for key, value in found.items():
            yield Observation(value, dict(key))
