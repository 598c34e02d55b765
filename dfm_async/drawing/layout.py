"""The positions of everything in a drawing. Boxes are laid out from the inside out, each by itself, in layers.

Lines run down in the columns between nodes, and change columns only in the gaps between layers. So they cannot run
through a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from dfm_async.drawing.boxes import Box, Line, LineEnd, Piece, boxes
from dfm_async.drawing.graph import Graph
from dfm_async.drawing.layers import columns, neighbours, order, rank

_SIDE, _TOP, _WORD, _BOTTOM = 14.0, 12.0, 26.0, 12.0
_GAP, _STEEPEST, _HIGHEST = 26.0, 0.12, 84.0
_BESIDE, _LINES = 22.0, 12.0
_LANDING = 7.0
"""A line ends straight, so that its arrow can be seen."""
_MANY_BENDS, _LONG, _LANES, _LANE = 20_000, 12, 24, 6.0

Size: TypeAlias = Callable[[LineEnd], tuple[float, float]]
"""Returns the width and the height of a node, a head or a foot."""


class Rect(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """Halfway between left and right."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The lower border."""
        return self.y + self.height


class StraightRun(NamedTuple):
    """A part of a line that goes straight down."""

    x: float
    top: float
    bottom: float


@dataclass(slots=True)
class Layout:
    """A drawing: where nodes, heads, feet and boxes are, and how lines run."""

    width: float
    height: float
    ends: dict[LineEnd, Rect] = field(default_factory=dict)
    frames: list[tuple[Box, Rect]] = field(default_factory=list)
    """An outer box before those in it."""
    lines: list[tuple[Line, list[StraightRun]]] = field(default_factory=list)


def lay_out(graph: Graph, size: Size) -> Layout:
    """Lay a graph out. Does the same for the same graph, always."""
    found, lines = boxes(graph)
    done: dict[int, _Inside] = {}
    for number in range(len(found) - 1, -1, -1):
        done[number] = _Inside(found[number], done, size)
    whole = done[0]
    layout = Layout(whole.width, whole.height)
    origins = {0: (0.0, 0.0)}
    for number, box in enumerate(found):
        x, y = origins[number]
        inside = done[number]
        if number:
            layout.frames.append((box, Rect(x, y, inside.width, inside.height)))
        for member, rect in zip(box.members, inside.rects, strict=True):
            if isinstance(member, int):
                origins[member] = (x + rect.x, y + rect.y)
            else:
                layout.ends[member] = Rect(x + rect.x, y + rect.y, rect.width, rect.height)
    for line in lines:
        runs: list[StraightRun] = []
        for number, piece in line.pieces:
            x, y = origins[number]
            for run in done[number].runs(piece):
                _append(runs, StraightRun(run.x + x, run.top + y, run.bottom + y))
        layout.lines.append((line, runs))
    return layout


def _append(runs: list[StraightRun], run: StraightRun) -> None:
    """Add a run, or make the last one longer."""
    last = runs[-1] if runs else None
    if last is not None and abs(last.x - run.x) < 0.001 and run.bottom > last.bottom - 0.5:
        runs[-1] = StraightRun(last.x, last.top, max(last.bottom, run.bottom))
    else:
        runs.append(run)


class _Inside:
    """One box, laid out. Everything is measured from its upper left corner.

    Its vertices are numbered so that lines go from lower to higher numbers: the head, ports at the top, the other
    members, the foot, ports at the bottom, and then the bends of long lines.
    """

    width: float
    height: float
    rects: list[Rect]
    """The positions of the members."""

    def __init__(self, box: Box, done: dict[int, _Inside], size: Size) -> None:
        self.box = box
        self._inner = [done[member] if isinstance(member, int) else None for member in box.members]
        self._sizes = [
            size(member) if isinstance(member, LineEnd) else (done[member].width, done[member].height)
            for member in box.members
        ]
        parts = [member.part if isinstance(member, LineEnd) else "node" for member in box.members]
        self._head = 0 if parts and parts[0] == "head" else None
        self._foot = len(parts) - 1 if parts and parts[-1] == "foot" else None
        self._number()
        self._bend()
        self._place()

    # vertices

    def _number(self) -> None:
        box = self.box
        entering = dict.fromkeys(p.start for p in box.pieces if p.source is None and p.target != self._head)
        leaving = dict.fromkeys(p.start for p in box.pieces if p.target is None and p.source != self._foot)
        plain = [at for at in range(len(box.members)) if at not in (self._head, self._foot)]
        numbered: list[int | None] = [] if self._head is None else [self._head]
        self._entries = {start: len(numbered) + i for i, start in enumerate(entering)}
        numbered += [None] * len(entering)
        top = len(numbered)
        numbered += plain
        bottom = len(numbered)
        if self._foot is not None:
            numbered.append(self._foot)
        self._exits = {start: len(numbered) + i for i, start in enumerate(leaving)}
        numbered += [None] * len(leaving)
        self._vertex = {member: vertex for vertex, member in enumerate(numbered) if member is not None}
        self._member = numbered
        self._widths = [0.0 if member is None else self._sizes[member][0] for member in numbered]
        joined = [(self._ends(piece), piece) for piece in box.pieces]
        self._joined = {piece: ends for ends, piece in joined if ends is not None}
        inner = [ends for ends in self._joined.values() if ends[1] < bottom]
        if self._head is not None:
            reached = {target for _, target in inner}
            inner += [(0, vertex) for vertex in range(top, bottom) if vertex not in reached]
        self._layers = rank(bottom, inner, top)
        last = max(self._layers, default=-1) + 1
        self._layers += [last] * (len(numbered) - bottom)

    def _ends(self, piece: Piece) -> tuple[int, int] | None:
        """Return the vertices that a piece joins; None for one that goes straight to the border, or backwards."""
        source = self._entries.get(piece.start) if piece.source is None else self._vertex[piece.source]
        target = self._exits.get(piece.start) if piece.target is None else self._vertex[piece.target]
        return None if source is None or target is None or target <= source else (source, target)

    # bends

    def _bend(self) -> None:
        """Cut lines over several layers into segments. Lines that begin at the same place share their bends.

        If that were too many, long lines run in lanes beside everything: the cost stays in proportion to the graph.
        """
        layers = self._layers
        crowded = sum(layers[target] - layers[source] - 1 for source, target in self._joined.values()) > _MANY_BENDS
        self._lanes: dict[LineEnd, int] = {}
        self._chains: dict[LineEnd, dict[int, int]] = {}
        self._segments: list[tuple[int, int]] = []
        self._offsets: dict[tuple[int, int], tuple[float, float]] = {}
        for piece, (source, target) in self._joined.items():
            span = range(self._layers[source] + 1, self._layers[target])
            if crowded and len(span) > _LONG:
                self._lanes.setdefault(piece.start, len(self._lanes) % _LANES)
                continue
            chain = self._chains.setdefault(piece.start, {})
            previous, leaves = source, self._leaves(piece, source)
            for layer in span:
                bend = chain.get(layer)
                if bend is None:
                    bend = chain[layer] = len(self._layers)
                    self._layers.append(layer)
                    self._widths.append(0.0)
                    self._segment(previous, bend, leaves, 0.0)
                previous, leaves = bend, 0.0
            self._segment(previous, target, leaves, self._enters(piece, target))

    def _segment(self, source: int, target: int, leaves: float, enters: float) -> None:
        self._segments.append((source, target))
        self._offsets.setdefault((source, target), (leaves, enters))

    def _leaves(self, piece: Piece, vertex: int) -> float:
        """Return where a piece leaves its first vertex, from the middle of that."""
        inner = None if piece.source is None else self._inner[piece.source]
        return 0.0 if inner is None else inner.leaving(piece.start) - self._widths[vertex] / 2

    def _enters(self, piece: Piece, vertex: int) -> float:
        inner = None if piece.target is None else self._inner[piece.target]
        return 0.0 if inner is None else inner.entering(piece.start, piece.head) - self._widths[vertex] / 2

    def leaving(self, start: LineEnd) -> float:
        """Return where a line from inside leaves the box."""
        vertex = self._exits.get(start)
        if vertex is None:
            return self.width / 2 if self._foot is None else self.rects[self._foot].middle
        return self._x[vertex]

    def entering(self, start: LineEnd, head: bool) -> float:
        """Return where a line from outside enters the box."""
        vertex = None if head else self._entries.get(start)
        if vertex is None:
            return self.rects[self._head].middle if head and self._head is not None else self.width / 2
        return self._x[vertex]

    # coordinates

    def _place(self) -> None:
        count = len(self._layers)
        rows: list[list[int]] = [[] for _ in range(max(self._layers, default=-1) + 1)]
        for vertex in range(count):
            rows[self._layers[vertex]].append(vertex)
        near = neighbours(count, self._segments)
        rows = order(rows, near)
        slim = [vertex >= len(self._member) or self._member[vertex] is None for vertex in range(count)]
        placed = columns(
            rows,
            near,
            self._widths,
            slim,
            self._offsets,
            lambda a, b: _LINES if slim[a] or slim[b] else _BESIDE,
        )
        side = 0.0 if self.box.node is None else _SIDE
        self._x = [x + side for x in placed]
        right = max((x + w / 2 for x, w in zip(self._x, self._widths, strict=True)), default=side)
        self._right = right + _BESIDE
        lanes = _BESIDE + _LANE * _LANES if self._lanes else 0.0
        self.width = max(right + lanes + side, 60.0 if self.box.node is not None else 0.0)
        self._stack(rows)

    def _stack(self, rows: Sequence[Sequence[int]]) -> None:
        dx = [0.0] * len(rows)
        for (source, target), (leaves, enters) in self._offsets.items():
            at = self._layers[source]
            dx[at] = max(dx[at], abs(self._x[source] + leaves - self._x[target] - enters))
        y = 0.0 if self.box.node is None else _WORD if self.box.word else _TOP
        self._tops: list[float] = []
        self._bottoms: list[float] = []
        self.rects = [Rect(0, 0, 0, 0)] * len(self._sizes)
        for at, row in enumerate(rows):
            members = [(vertex, member) for vertex in row if (member := self._of(vertex)) is not None]
            flat = max((self._sizes[m][1] for _, m in members if self._inner[m] is None), default=0.0)
            height = max((self._sizes[m][1] for _, m in members), default=0.0)
            for vertex, member in members:
                wide, high = self._sizes[member]
                down = (flat - high) / 2 if self._inner[member] is None else 0.0
                self.rects[member] = Rect(self._x[vertex] - wide / 2, y + down, wide, high)
            self._tops.append(y)
            self._bottoms.append(y + height)
            y += height + (min(_GAP + _STEEPEST * dx[at], _HIGHEST) if at + 1 < len(rows) else 0.0)
        self.height = y + (0.0 if self.box.node is None else _BOTTOM)

    def _of(self, vertex: int) -> int | None:
        return self._member[vertex] if vertex < len(self._member) else None

    # lines

    def runs(self, piece: Piece) -> list[StraightRun]:
        """Return how a part of a line runs in this box."""
        ends = self._joined.get(piece)
        if ends is None:
            return self._direct(piece)
        source, target = ends
        first, last = self._layers[source], self._layers[target]
        x = self._x[source] + self._leaves(piece, source)
        runs = [StraightRun(x, 0.0 if piece.source is None else self.rects[piece.source].bottom, self._bottoms[first])]
        lane = self._lanes.get(piece.start)
        if lane is not None and last - first - 1 > _LONG:
            runs.append(StraightRun(self._right + lane * _LANE, self._tops[first + 1], self._bottoms[last - 1]))
        else:
            chain = self._chains[piece.start]
            for layer in range(first + 1, last):
                _append(runs, StraightRun(self._x[chain[layer]], self._tops[layer], self._bottoms[layer]))
        x = self._x[target] + self._enters(piece, target)
        end = self.height if piece.target is None else self.rects[piece.target].y
        _append(runs, StraightRun(x, self._tops[last] - _LANDING, end))
        return runs

    def _direct(self, piece: Piece) -> list[StraightRun]:
        """Return a line between a head or foot and the border, or one that goes back (of an invalid pipeline)."""
        runs = []
        if piece.source is not None:
            rect = self.rects[piece.source]
            leaves = self._leaves(piece, self._vertex[piece.source])
            end = self.height if piece.target is None else rect.bottom
            runs.append(StraightRun(rect.middle + leaves, rect.bottom, end))
        if piece.target is not None:
            rect = self.rects[piece.target]
            enters = self._enters(piece, self._vertex[piece.target])
            runs.append(StraightRun(rect.middle + enters, 0.0 if piece.source is None else rect.y, rect.y))
        return runs
