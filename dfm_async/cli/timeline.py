"""What a trace tells, in bounded memory: figures by span name, what each process did when, and the longest spans.

Files may be large, so that they are read twice rather than kept.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from os import PathLike
from typing import Final

from dfm_async.cli.exits import BadInput
from dfm_async.telemetry.spans import APPLICATION, Span, iter_trace

__all__ = ["Figures", "Lane", "Row", "Timeline", "label_of", "read_timeline"]

_COLUMNS: Final = 60
"""How many pieces the time is cut into for the rows of a terminal."""
_ROWS: Final = 200
"""How many rows one process has at most; further ones are counted together."""
_LANES: Final = 100
"""How many processes are shown separately; further ones are counted together."""
_LARGEST: Final = 2**63 - 1


@dataclass(slots=True)
class Figures:
    """The durations of spans of one kind, in nanoseconds."""

    durations: array[int] = field(default_factory=lambda: array("q"))
    errors: int = 0
    waited: float = 0.0
    """For how many nanoseconds calls waited before they began, such as for a thread; not a part of the durations."""

    def add(self, span: Span) -> None:
        """Counts a span."""
        self.durations.append(span.end - span.start)
        self.errors += span.status == "error"
        waited = span.attributes.get("dfm.waited")
        if isinstance(waited, float) and 0 < waited < math.inf:
            self.waited += waited * 1e9

    @property
    def total(self) -> int:
        """All of them together."""
        return max(-_LARGEST, min(sum(self.durations), _LARGEST))

    def percentiles(self, *wanted: float) -> list[int]:
        """The durations that so many percent of the spans do not exceed."""
        ordered = sorted(self.durations)
        return [ordered[max(0, math.ceil(len(ordered) * part / 100) - 1)] for part in wanted]


@dataclass(slots=True)
class Row:
    """What one node, hop or span of a user's own did in one process.

    Attributes:
        label: what it is called.
        first: when it began for the first time.
        figures: how long it took.
        busy: for each piece of the time, how many nanoseconds it was busy in it; several at the same time add up.
        failed: for each piece, how many errors there were.
    """

    label: str
    first: int
    figures: Figures = field(default_factory=Figures)
    busy: list[int] = field(default_factory=lambda: [0] * _COLUMNS)
    failed: list[int] = field(default_factory=lambda: [0] * _COLUMNS)


@dataclass(slots=True)
class Lane:
    """What one process did."""

    process: str
    rows: dict[str, Row] = field(default_factory=dict)

    def row(self, span: Span) -> Row:
        """The row that a span belongs to."""
        label = label_of(span)
        found = self.rows.get(label)
        if found is None:
            if len(self.rows) >= _ROWS:
                label = "others"
            found = self.rows.setdefault(label, Row(label, span.start))
        found.first = min(found.first, span.start)
        return found


@dataclass(slots=True)
class Timeline:
    """What a trace tells.

    Attributes:
        start: when the first span began, in nanoseconds since 1970.
        end: when the last one ended.
        count: how many spans there are.
        errors: how many of them went wrong.
        jobs: how many spans belong to each job.
        names: the figures of each span name.
        lanes: what each process did.
        longest: spans to draw one by one: those that went wrong, and the longest of the others, by their beginning.
    """

    start: int = 0
    end: int = 0
    count: int = 0
    errors: int = 0
    jobs: Counter[str] = field(default_factory=Counter)
    names: dict[str, Figures] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    longest: list[Span] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How long it lasted, in nanoseconds; at least one."""
        return max(1, self.end - self.start)

    def ordered_lanes(self) -> list[Lane]:
        """The processes: the application first, then the sites by name."""
        return sorted(self.lanes.values(), key=lambda lane: (lane.process != APPLICATION, lane.process))


def label_of(span: Span) -> str:
    """What a span is called in a drawing."""
    attributes = span.attributes
    if span.name == "dfm.hop":
        return f"{attributes.get('dfm.from', '?')} → {attributes.get('dfm.to', '?')}"
    if span.name in ("dfm.execute", "dfm.job"):
        return f"{span.name.removeprefix('dfm.')} {attributes.get('dfm.pipeline', '')}".rstrip()
    if span.name == "dfm.operation":
        return str(attributes.get("dfm.node") or attributes.get("dfm.operation") or span.name)
    return span.name.removeprefix("dfm.")


def read_timeline(path: str | PathLike[str], job: str | None = None, kept: int = 0) -> Timeline:
    """Reads a trace.

    Args:
        path: the file.
        job: only what belongs to this job.
        kept: how many spans are kept to be drawn one by one.

    Raises:
        BadInput: there is no such file or job, or the file is no trace.
    """
    try:
        return _read(path, job, kept)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def _read(path: str | PathLike[str], job: str | None, kept: int) -> Timeline:
    found = Timeline()
    longest = _Longest(kept)
    for span in iter_trace(path):
        if job is None or span.attributes.get("dfm.job") == job:
            _count(found, span)
            longest.add(span)
    if not found.count:
        raise BadInput(f"{path} has no spans" + ("" if job is None else f" of job {job!r}"))
    limit = found.count  # what is appended between the two readings is not looked at
    for span in iter_trace(path):
        if limit and (job is None or span.attributes.get("dfm.job") == job):
            limit -= 1
            _draw(found, span)
    found.longest = longest.spans()
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
    process = span.process if known else "others"
    lane = found.lanes.setdefault(process, Lane(process))
    row = lane.row(span)
    row.figures.add(span)
    start, end = span.start - found.start, max(span.end, span.start + 1) - found.start
    first = min(_COLUMNS - 1, start * _COLUMNS // found.length)
    last = min(_COLUMNS - 1, (end - 1) * _COLUMNS // found.length)
    for column in range(first, last + 1):
        piece = (column * found.length // _COLUMNS, (column + 1) * found.length // _COLUMNS)
        row.busy[column] += max(1, min(end, piece[1]) - max(start, piece[0]))
    row.failed[last] += span.status == "error"


class _Longest:
    """Keeps the longest spans of many; those that went wrong before the others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[bool, int, int, Span]] = []
        self._number = itertools.count()

    def add(self, span: Span) -> None:
        entry = (span.status == "error", span.end - span.start, next(self._number), span)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, entry)
        elif self._heap:
            heapq.heappushpop(self._heap, entry)

    def spans(self) -> list[Span]:
        return sorted((entry[3] for entry in self._heap), key=lambda span: (span.start, -span.end))
