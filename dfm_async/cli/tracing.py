"""``dfm-async trace``: the timeline of a trace, in the terminal, as figures, or as a page."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from dfm_async.cli.pictures import write_text
from dfm_async.cli.program import complain, safe, safe_json
from dfm_async.cli.terminal import terminal
from dfm_async.cli.timeline import Figures, Lane, Row, Timeline, read_timeline
from dfm_async.cli.timeline_page import MOST_SPANS, timeline_page

__all__ = ["figures_data", "show_trace"]

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_SHOWN: Final = 40
"""How many rows of a process are shown in a terminal."""
_JOBS: Final = 5


def show_trace(path: Path, *, job: str | None, as_json: bool, html: Path | None, opening: bool) -> None:
    """Shows the timeline of a trace.

    Args:
        path: the file.
        job: only what belongs to this job.
        as_json: whether only the figures of each span name are written, as JSON lines.
        html: where to write a page with the timeline to.
        opening: whether such a page is opened, if there is a desktop to do so.

    Raises:
        BadInput: the file is no trace, or the page cannot be written.
    """
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
        complain(f"the timeline is in {page}")
        if desktop:
            webbrowser.open(page.resolve().as_uri())


def figures_data(name: str, figures: Figures) -> dict[str, Any]:
    """The figures of one span name, in seconds."""
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
    """Whether somebody sits in front of a screen that pages can be opened on."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _temporary() -> Path:
    # It has to be there when the browser reads it, which is after we have ended.
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
    for lane in timeline.ordered_lanes():
        _add_lane(table, lane, timeline.length)
    console.print(table)


def _headline(timeline: Timeline) -> str:
    jobs = ", ".join(name for name, _ in timeline.jobs.most_common(_JOBS))
    more = len(timeline.jobs) - _JOBS
    told = [f"{timeline.count:,} spans in {duration(timeline.length)}"]
    if timeline.errors:
        told.append(f"{timeline.errors:,} went wrong")
    if jobs:
        told.append(f"job{'s' * (len(timeline.jobs) > 1)} {jobs}" + (f" and {more:,} more" if more > 0 else ""))
    return "; ".join(told)


def _add_lane(table: Table, lane: Lane, length: int) -> None:
    rows = sorted(lane.rows.values(), key=lambda row: row.first)
    for number, row in enumerate(rows[:_SHOWN]):
        p50, p95 = row.figures.percentiles(50, 95)
        count = len(row.figures.durations)
        times = [duration(nanoseconds) for nanoseconds in (row.figures.total, p50, p95)]
        table.add_row(
            Text(safe(lane.process) if not number else "", "bold"),
            safe(row.label),
            _bar(row, length),
            f"{count:,}",
            *times,
            duration(row.figures.waited) if row.figures.waited else "",
            Text(f"{row.figures.errors:,}", "bold red") if row.figures.errors else "",
        )
    if len(rows) > _SHOWN:
        table.add_row("", f"and {len(rows) - _SHOWN:,} more")


def _bar(row: Row, length: int) -> Text:
    """How busy each piece of the time was; the fullest piece of a row that overlaps itself is full."""
    piece = max(1, length // len(row.busy), max(row.busy))
    bar = Text()
    for busy, failed in zip(row.busy, row.failed, strict=True):
        level = 0 if not busy else max(1, round(busy / piece * (len(_LEVELS) - 1)))
        bar.append("✗" if failed else _LEVELS[level], "bold red" if failed else "cyan")
    return bar


def duration(nanoseconds: float) -> str:
    """Writes a duration as people do."""
    for limit, unit, digits in ((1e3, "ns", 0), (1e6, "µs", 0), (1e9, "ms", 1), (60e9, "s", 2)):
        if nanoseconds < limit:
            return f"{nanoseconds / {'ns': 1, 'µs': 1e3, 'ms': 1e6, 's': 1e9}[unit]:.{digits}f} {unit}"
    minutes, seconds = divmod(nanoseconds / 1e9, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{seconds:02.0f} h" if hours else f"{minutes}:{seconds:02.0f} min"
