"""``dfm-async trace``: the timeline of a trace, in the terminal, as figures, or as a page."""

from __future__ import annotations

import heapq
import html
import os
import sys
import tempfile
import webbrowser
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from dfm_async.cli.command_runner import print_message, safe, safe_json
from dfm_async.cli.describe import write_text
from dfm_async.cli.terminal import terminal
from dfm_async.cli.timeline import Figures, Row, Timeline, label_of, lane_order, read_timeline, waited_of
from dfm_async.telemetry.spans import Span

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_SHOWN: Final = 40
"""The maximum number of rows of a process in a terminal."""
_JOBS: Final = 5


def show_trace(path: Path, *, job: str | None, as_json: bool, html: Path | None, opening: bool) -> None:
    """Show the timeline of a trace, or only the figures of each span name; write a page with it, and open that page."""
    desktop = opening and not as_json and _desktop()
    timeline = read_timeline(path, job, MOST_SPANS if html is not None or desktop else 0)
    if as_json:
        for name, figures in sorted(timeline.names.items()):
            typer.echo(safe_json(msgspec.json.encode(figures_data(name, figures))))
    else:
        _print(timeline)
    if html is not None or desktop:
        page = html if html is not None else _temporary()
        write_text(timeline_page(timeline, path.name), page)
        print_message(f"the timeline is in {page}")
        if desktop:
            webbrowser.open(page.resolve().as_uri())


def figures_data(name: str, figures: Figures) -> dict[str, Any]:
    """Return the figures of one span name, in seconds."""
    p50, p95 = figures.percentiles(50, 95)
    return {
        "name": name,
        "count": len(figures.durations),
        "errors": figures.errors,
        "total": figures.total / 1e9,
        "p50": p50 / 1e9,
        "p95": p95 / 1e9,
        "max": max(figures.durations) / 1e9,
        "waited": figures.waited / 1e9,
    }


def _desktop() -> bool:
    """Return whether the user has a screen that pages can be opened on."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _temporary() -> Path:
    # The browser reads it after this program has ended.
    descriptor, path = tempfile.mkstemp(prefix="dfm-trace-", suffix=".html")
    os.close(descriptor)
    return Path(path)


def _print(timeline: Timeline) -> None:
    console = terminal(width=160)
    console.print(Text(safe(_headline(timeline)), "bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("process")
    table.add_column("what", no_wrap=True, overflow="ellipsis")
    table.add_column(f"0 to {duration(timeline.length)}", no_wrap=True, min_width=20)
    for name in ("count", "total", "p50", "p95", "waited", "errors"):
        table.add_column(name, justify="right")
    for process in sorted(timeline.lanes, key=lane_order):
        _add_lane(table, process, timeline)
    console.print(table)


def _headline(timeline: Timeline) -> str:
    jobs = ", ".join(name for name, _ in timeline.jobs.most_common(_JOBS))
    more = len(timeline.jobs) - _JOBS
    parts = [f"{timeline.count:,} spans in {duration(timeline.length)}"]
    if timeline.errors:
        parts.append(f"{timeline.errors:,} failed")
    if jobs:
        parts.append(f"job{'s' * (len(timeline.jobs) > 1)} {jobs}" + (f" and {more:,} more" if more > 0 else ""))
    return "; ".join(parts)


def _add_lane(table: Table, process: str, timeline: Timeline) -> None:
    rows = sorted(timeline.lanes[process].values(), key=lambda row: row.first)
    for number, row in enumerate(rows[:_SHOWN]):
        p50, p95 = row.figures.percentiles(50, 95)
        table.add_row(
            Text(safe(process) if not number else "", "bold"),
            safe(row.label),
            _bar(row, timeline.length),
            f"{len(row.figures.durations):,}",
            *map(duration, (row.figures.total, p50, p95)),
            duration(row.figures.waited) if row.figures.waited else "",
            Text(f"{row.figures.errors:,}", "bold red") if row.figures.errors else "",
        )
    if len(rows) > _SHOWN:
        table.add_row("", f"and {len(rows) - _SHOWN:,} more")


def _bar(row: Row, length: int) -> Text:
    """Return how busy each interval was; the busiest interval of a row with overlapping spans is full.

    Intervals in which calls only waited, such as for a thread, have dots.
    """
    piece = max(1, length // len(row.busy), max(row.busy))
    bar = Text()
    for busy, failed, waiting in zip(row.busy, row.failed, row.waiting, strict=True):
        level = 0 if not busy else max(1, round(busy / piece * (len(_LEVELS) - 1)))
        if waiting and not busy:
            bar.append("·", "dim")
        else:
            bar.append("✗" if failed else _LEVELS[level], "bold red" if failed else "cyan")
    return bar


def duration(nanoseconds: float) -> str:
    """Return a duration as text."""
    for limit, unit, digits in ((1e3, "ns", 0), (1e6, "µs", 0), (1e9, "ms", 1), (60e9, "s", 2)):
        if nanoseconds < limit:
            return f"{nanoseconds / {'ns': 1, 'µs': 1e3, 'ms': 1e6, 's': 1e9}[unit]:.{digits}f} {unit}"
    minutes, seconds = divmod(nanoseconds / 1e9, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{seconds:02.0f} h" if hours else f"{minutes}:{seconds:02.0f} min"


MOST_SPANS: Final = 20_000
"""The maximum number of spans that a page draws; more would make browsers slow."""
_LONGEST_TEXT: Final = 4000


def timeline_page(timeline: Timeline, title: str) -> str:
    """Return a page that draws the longest spans of a timeline, as one file without external resources."""
    template = files("dfm_async.cli").joinpath("timeline.html").read_text(encoding="utf-8")
    data = msgspec.json.encode(_data(timeline)).decode()
    # Nothing in a trace may end the HTML element that contains it.
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", safe)


def _data(timeline: Timeline) -> dict[str, Any]:
    texts: dict[str, int] = {}
    lanes: dict[str, _Packing] = {}
    index = {span.span_id: number for number, span in enumerate(timeline.longest)}
    spans = [
        [
            texts.setdefault(span.process, len(texts)),
            lanes.setdefault(span.process, _Packing()).row(span),
            (span.start - timeline.start) // 1000,
            max(1, (span.end - span.start) // 1000),
            texts.setdefault(label_of(span), len(texts)),
            texts.setdefault(span.name, len(texts)),
            int(span.status == "error"),
            index.get(span.parent_id or "", -1),
            _details(span),
            min(int(waited_of(span)), max(0, span.start - timeline.start)) // 1000,
        ]
        for span in timeline.longest
    ]
    figures = []
    for name, found in sorted(timeline.names.items(), key=lambda item: -item[1].total):
        p50, p95 = found.percentiles(50, 95)
        figures.append([name, len(found.durations), found.errors, found.total, p50, p95, int(min(found.waited, 2**62))])
    return {
        "texts": list(texts),
        "lanes": [[texts[process], lanes[process].rows] for process in sorted(lanes, key=lane_order)],
        "spans": spans,
        "length": timeline.length // 1000 + 1,
        "start": timeline.start // 1_000_000,
        "count": timeline.count,
        "errors": timeline.errors,
        "jobs": len(timeline.jobs),
        "figures": figures,
    }


def _details(span: Span) -> dict[str, Any]:
    parts = {name: value for name, value in span.attributes.items() if name not in ("dfm.site", "dfm.pipeline")}
    if span.message:
        parts["message"] = span.message
    return {
        name.removeprefix("dfm."): value[:_LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in parts.items()
    }


class _Packing:
    """Puts spans into as few rows as overlap at any time. They must be added in the order of their start."""

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
