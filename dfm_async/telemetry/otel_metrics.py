"""The instruments of OpenTelemetry that tell how sessions are. Made once for each provider of an SDK."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from dfm_async.model.stats import SessionStats
from dfm_async.telemetry.metrics import sessions

__all__ = ["keep", "register"]

_SCOPE: Final = "dfm_async"
_Values = Iterable[tuple[dict[str, str], float | None]]
_Read = Callable[[SessionStats], _Values]
_Key = tuple[tuple[str, str], ...]


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

_registered: Final[weakref.WeakKeyDictionary[Any, list[_Callback]]] = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes the instruments, if an SDK is set up that does not have them."""
    provider = metrics.get_meter_provider()
    # Without an SDK there is a stand-in, which makes instruments when one is set up; there is nobody to wait for it.
    if type(provider).__module__.startswith("opentelemetry.metrics") or provider in _registered:
        return
    meter = provider.get_meter(_SCOPE)
    for name, (unit, about, read) in _GAUGES.items():
        meter.create_observable_gauge(name, [_Callback(read)], unit, about)
    counters = _registered[provider] = []
    for name, (unit, about, read) in _COUNTERS.items():
        counters.append(_Callback(read))
        meter.create_observable_counter(name, [counters[-1]], unit, about)


def keep(federation: str, stats: SessionStats) -> None:
    """A session ends: what it has counted goes on to count. Must be called while nobody asks for the sessions."""
    for counters in list(_registered.values()):
        for counter in counters:
            counter.keep(federation, stats)


class _Callback:
    """Gives one metric of all sessions. Sessions of the same federation are told together."""

    def __init__(self, read: _Read) -> None:
        self._read = read
        self._past: dict[_Key, float] = {}

    def __call__(self, _options: CallbackOptions) -> Iterator[Observation]:
        here, found = sessions(lambda: dict(self._past))
        for session in here:
            self._add(found, session.federation, session.stats())
        for key, value in found.items():
            yield Observation(value, dict(key))

    def keep(self, federation: str, stats: SessionStats) -> None:
        """Keeps what a session has counted."""
        self._add(self._past, federation, stats)

    def _add(self, found: dict[_Key, float], federation: str, stats: SessionStats) -> None:
        for attributes, value in self._read(stats):
            if value is not None:
                key = (("dfm.federation", federation), *attributes.items())
                found[key] = found.get(key, 0) + value
