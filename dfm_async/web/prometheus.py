"""What a service tells to Prometheus, in its text format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.model.stats import SessionStats
from dfm_async.web.state import State
from dfm_async.web.streams import Streams

__all__ = ["MetricHandlers", "metrics_text"]

_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_Sample = tuple[dict[str, str], float | None]


class MetricHandlers:
    """Answers with metrics."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def metrics(self, request: Request, _send: Send) -> Response:
        """Tells what the session and its streams do."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "metrics")
        return Response(metrics_text(state.session.stats(), state.streams), media_type=_TYPE)


def metrics_text(stats: SessionStats, streams: Streams) -> str:
    """Writes metrics in the text format of Prometheus."""
    sites = stats.sites.items()
    lines: list[str] = []

    def tell(name: str, kind: str, about: str, samples: Iterable[_Sample]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# HELP dfm_{name} {about}")
            lines.append(f"# TYPE dfm_{name} {kind}")
            lines.extend(f"dfm_{name}{_labels(labels)} {_number(value)}" for labels, value in known)

    def one(value: float | None) -> list[_Sample]:
        return [({}, value)]

    tell("jobs_running", "gauge", "Jobs that have a slot.", one(stats.running))
    tell("jobs_waiting", "gauge", "Jobs that wait for a slot.", one(stats.waiting))
    tell("jobs_remembered", "gauge", "Jobs that are known, ended ones included.", one(stats.remembered))
    ended = [({"status": status}, float(count)) for status, count in sorted(stats.ended.items())]
    tell("jobs_ended_total", "counter", "Jobs that have ended.", ended)
    tell("log_events", "gauge", "Events in the logs of all jobs.", one(stats.results))
    tell("log_bytes", "gauge", "Bytes of values in the logs of all jobs.", one(stats.result_bytes))
    tell("results_total", "counter", "Results that have come from the sites.", one(stats.yielded.count))
    tell("result_bytes_total", "counter", "Bytes of results that have come.", one(stats.yielded.bytes))
    tell("tokens_total", "counter", "Values that sites have sent to each other.", one(stats.tokens.count))
    tell("token_bytes_total", "counter", "Bytes of values that sites have sent to each other.", one(stats.tokens.bytes))
    tell("loop_lag_seconds", "gauge", "How late the loop of the application is.", one(stats.lag))
    tell("memory_bytes", "gauge", "Memory of the application.", one(stats.memory))
    lanes = [({"lane": str(index)}, lane) for index, lane in enumerate(stats.lanes)]
    tell("lane_jobs", "gauge", "Jobs that run on a lane.", [(labels, lane.jobs) for labels, lane in lanes])
    tell("lane_alive", "gauge", "Whether all workers of a lane are there.", [(at, lane.alive) for at, lane in lanes])
    tell("site_workers", "gauge", "Workers of a site.", [({"site": name}, len(site.workers)) for name, site in sites])
    tell("site_jobs", "gauge", "Jobs on the workers of a site.", [({"site": name}, site.jobs) for name, site in sites])
    restarts = [({"site": name}, site.restarts) for name, site in sites]
    tell("site_restarts_total", "counter", "Workers of a site that were lost and replaced.", restarts)
    tokens = [({"site": name}, site.tokens.count) for name, site in sites]
    tell("site_tokens_total", "counter", "Values that a site has sent to others.", tokens)
    sizes = [({"site": name}, site.tokens.bytes) for name, site in sites]
    tell("site_token_bytes_total", "counter", "Bytes of values that a site has sent to others.", sizes)
    memory = [({"site": name}, site.memory) for name, site in sites]
    tell("site_memory_bytes", "gauge", "Memory of the workers of a site.", memory)
    tell(
        "site_lag_seconds", "gauge", "How late the slowest loop of a site is.", [({"site": n}, s.lag) for n, s in sites]
    )
    silent = [({"site": name}, sum(worker.unresponsive for worker in site.workers)) for name, site in sites]
    tell("site_unresponsive_workers", "gauge", "Workers of a site that do not respond.", silent)
    tell("streams_open", "gauge", "Streams that clients read.", one(len(streams)))
    tell("streams_opened_total", "counter", "Streams that clients have opened.", one(streams.opened))
    tell("streams_stalled_total", "counter", "Streams whose client took nothing for too long.", one(streams.stalled))
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
