"""Summarise a trace in bounded memory: figures by span name, the activity of each process, and the longest spans.

Files may be large, so they are read twice instead of being kept in memory.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Final

from dfm_async.cli.command_runner import BadInput
from dfm_async.telemetry.spans import APPLICATION, Span, iter_trace

_COLUMNS: Final = 60
"""The number of intervals that the time is divided into."""
_ROWS: Final = 200
"""The maximum number of rows of a process; further ones are combined."""
_LANES: Final = 100
"""The maximum number of processes; further ones are combined."""
_LARGEST: Final = 2**63 - 1


@dataclass(slots=True)
class Figures:
    """The durations of spans of one kind, in nanoseconds."""

    durations: array[int] = field(default_factory=lambda: array("q"))
    errors: int = 0
    waited: float = 0.0
    """The nanoseconds that calls waited before they began, such as for a thread; not included in the durations."""

    def add(self, span: Span) -> None:
        """Add a span."""
        self.durations.append(span.end - span.start)
        self.errors += span.status == "error"
        self.waited += waited_of(span)

    @property
    def total(self) -> int:
        """The sum of the durations."""
        return max(-_LARGEST, min(sum(self.durations), _LARGEST))

    def percentiles(self, *wanted: float) -> list[int]:
        """Return the durations that the given percentages of the spans do not exceed."""
        ordered = sorted(self.durations)
        return [ordered[max(0, math.ceil(len(ordered) * part / 100) - 1)] for part in wanted]


@dataclass(slots=True)
class Row:
    """What one node, hop or span of a user's own did in one process.

    Attributes:
        first: when it began first.
        busy: the busy nanoseconds of each interval; overlapping spans add up.
        waiting: whether calls waited in each interval.
        failed: the number of errors in each interval.
    """

    label: str
    first: int
    figures: Figures = field(default_factory=Figures)
    busy: list[int] = field(default_factory=lambda: [0] * _COLUMNS)
    failed: list[int] = field(default_factory=lambda: [0] * _COLUMNS)
    waiting: list[bool] = field(default_factory=lambda: [False] * _COLUMNS)


@dataclass(slots=True)
class Timeline:
    """The summary of a trace.

    Attributes:
        start: when the first span began, in nanoseconds since 1970.
        jobs: the number of spans of each job.
        names: the figures of each span name.
        lanes: what each process did: rows by process and label.
        longest: the spans to draw individually: failed ones first, then the longest; in the order of their start.
    """

    start: int = 0
    end: int = 0
    count: int = 0
    errors: int = 0
    jobs: Counter[str] = field(default_factory=Counter)
    names: dict[str, Figures] = field(default_factory=dict)
    lanes: dict[str, dict[str, Row]] = field(default_factory=dict)
    longest: list[Span] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The duration in nanoseconds; at least 1."""
        return max(1, self.end - self.start)


def lane_order(process: str) -> tuple[bool, str]:
    """Return the sort key of a process: the application first, then the sites by name."""
    return process != APPLICATION, process


def waited_of(span: Span) -> float:
    """Return the nanoseconds that a call waited before its span began, such as for a thread."""
    waited = span.attributes.get("dfm.waited")
    return min(waited * 1e9, _LARGEST) if isinstance(waited, float) and 0 < waited < math.inf else 0.0


def label_of(span: Span) -> str:
    """Return the label of a span in a drawing."""
    attributes = span.attributes
    if span.name == "dfm.hop":
        return f"{attributes.get('dfm.from', '?')} → {attributes.get('dfm.to', '?')}"
    if span.name in ("dfm.execute", "dfm.job"):
        return f"{span.name.removeprefix('dfm.')} {attributes.get('dfm.pipeline', '')}".rstrip()
    if span.name == "dfm.operation":
        return str(attributes.get("dfm.node") or attributes.get("dfm.operation") or span.name)
    return span.name.removeprefix("dfm.")


def read_timeline(path: str | PathLike[str], job: str | None = None, kept: int = 0) -> Timeline:
    """Read a trace, or the spans of one job in it, and keep the longest spans to draw them individually."""
    try:
        return _read(path, job, kept)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def _read(path: str | PathLike[str], job: str | None, kept: int) -> Timeline:
    found = Timeline()

    def spans() -> Iterator[Span]:
        return (span for span in iter_trace(path) if job is None or span.attributes.get("dfm.job") == job)

    def counted() -> Iterator[Span]:
        for span in spans():
            _count(found, span)
            yield span

    longest = heapq.nlargest(max(kept, 1), counted(), key=lambda span: (span.status == "error", span.end - span.start))
    if not found.count:
        raise BadInput(f"{path} has no spans" + ("" if job is None else f" of job {job!r}"))
    for span in itertools.islice(spans(), found.count):  # without what is appended between the two passes
        _draw(found, span)
    found.longest = sorted(longest, key=lambda span: (span.start, -span.end))
    return found


def _count(found: Timeline, span: Span) -> None:
    found.start = span.start if not found.count else min(found.start, span.start)
    found.end = max(found.end, span.end)
    found.count += 1
    found.errors += span.status == "error"
    job = span.attributes.get("dfm.job")
    if job:
        found.jobs[str(job)] += 1
    found.names.setdefault(span.name, Figures()).add(span)


def _draw(found: Timeline, span: Span) -> None:
    known = span.process in found.lanes or len(found.lanes) < _LANES
    rows = found.lanes.setdefault(span.process if known else "others", {})
    label = label_of(span)
    if label not in rows and len(rows) >= _ROWS:
        label = "others"
    row = rows.setdefault(label, Row(label, span.start))
    row.first = min(row.first, span.start)
    row.figures.add(span)
    start, end = span.start - found.start, max(span.end, span.start + 1) - found.start
    first = min(_COLUMNS - 1, start * _COLUMNS // found.length)
    last = min(_COLUMNS - 1, (end - 1) * _COLUMNS // found.length)
    for column in range(first, last + 1):
        piece = (column * found.length // _COLUMNS, (column + 1) * found.length // _COLUMNS)
        row.busy[column] += max(1, min(end, piece[1]) - max(start, piece[0]))
    row.failed[last] += span.status == "error"
    queued = max(0, int(start - waited_of(span))) * _COLUMNS // found.length
    for column in range(queued, first):
        row.waiting[column] = True
