"""A page with the timeline of a trace: one file that needs nothing else, and asks nobody for anything."""

from __future__ import annotations

import heapq
import html
from importlib.resources import files
from typing import Any, Final

import msgspec

from dfm_async.cli.timeline import Timeline, label_of
from dfm_async.telemetry.spans import APPLICATION, Span

__all__ = ["MOST_SPANS", "timeline_page"]

MOST_SPANS: Final = 20_000
"""How many spans a page draws; a browser with more of them would be slow."""
_LONGEST_TEXT: Final = 4000


def timeline_page(timeline: Timeline, title: str) -> str:
    """Makes the page.

    Args:
        timeline: the trace; its ``longest`` spans are drawn.
        title: what it is called.
    """
    template = files("dfm_async.cli").joinpath("timeline.html").read_text(encoding="utf-8")
    data = msgspec.json.encode(_data(timeline)).decode()
    # Nothing in a trace may end the element that it stands in.
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", safe)


def _data(timeline: Timeline) -> dict[str, Any]:
    texts: dict[str, int] = {}
    lanes: dict[str, _Packing] = {}
    index = {span.span_id: number for number, span in enumerate(timeline.longest)}
    spans = []
    for span in timeline.longest:
        packing = lanes.setdefault(span.process, _Packing())
        row = packing.row(span)
        start = (span.start - timeline.start) // 1000
        spans.append(
            [
                texts.setdefault(span.process, len(texts)),
                row,
                start,
                max(1, (span.end - span.start) // 1000),
                texts.setdefault(label_of(span), len(texts)),
                texts.setdefault(span.name, len(texts)),
                int(span.status == "error"),
                index.get(span.parent_id or "", -1),
                _details(span),
            ]
        )
    order = sorted(lanes, key=lambda process: (process != APPLICATION, process))
    figures = []
    for name, found in sorted(timeline.names.items(), key=lambda item: -item[1].total):
        p50, p95 = found.percentiles(50, 95)
        figures.append([name, len(found.durations), found.errors, found.total, p50, p95])
    return {
        "texts": list(texts),
        "lanes": [[texts[process], lanes[process].rows] for process in order],
        "spans": spans,
        "length": timeline.length // 1000 + 1,
        "start": timeline.start // 1_000_000,
        "count": timeline.count,
        "errors": timeline.errors,
        "jobs": len(timeline.jobs),
        "figures": figures,
    }


def _details(span: Span) -> dict[str, Any]:
    told = {name: value for name, value in span.attributes.items() if name not in ("dfm.site", "dfm.pipeline")}
    if span.message:
        told["message"] = span.message
    return {
        name.removeprefix("dfm."): value[:_LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in told.items()
    }


class _Packing:
    """Puts spans into as few rows as there are at the same time. They have to come by their beginning."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._ends: list[tuple[int, int]] = []
        self.rows = 0

    def row(self, span: Span) -> int:
        while self._ends and self._ends[0][0] <= span.start:
            heapq.heappush(self._free, heapq.heappop(self._ends)[1])
        if self._free:
            row = heapq.heappop(self._free)
        else:
            row, self.rows = self.rows, self.rows + 1
        heapq.heappush(self._ends, (max(span.end, span.start + 1), row))
        return row
