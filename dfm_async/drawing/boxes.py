"""The boxes of a drawing, one within the other, and what each of them has to lay out.

A statement with a block is a box with a *head* at its top, and a *foot* at its bottom if it hands a value out. A branch
with an ``otherwise`` has two boxes more, one per block. A line from one box to another is cut at every border that it
crosses: each box gets *ports* at its top and bottom, and lays out its own parts of lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dfm_async.drawing.graph import COMPOUND, FEET, Edge, Graph, Node


class LineEnd(NamedTuple):
    """Where a line begins or ends: at a plain node, or at the head or foot of a box."""

    node: str
    part: Literal["node", "head", "foot"]


class Piece(NamedTuple):
    """A part of a line, in one box: from one of its members to another, or from or to its border (None).

    Lines that begin at the same place share their pieces. ``head``: it ends at the head of the box that it goes to.
    """

    start: LineEnd
    source: int | None
    target: int | None
    head: bool = False


@dataclass(slots=True)
class Line:
    """An edge, and the parts that it is made of, from its source to its target, each with its box.

    Without an edge, it only shows that a branch depends on its condition.
    """

    edge: Edge | None
    start: LineEnd
    end: LineEnd
    pieces: list[tuple[int, Piece]] = field(default_factory=list)


@dataclass(slots=True)
class Box:
    """A box. Its members are numbered in the order of the text; the head is first and the foot last.

    ``node`` is the statement that it belongs to, None for the whole drawing. ``word`` names one of two branches.
    """

    node: Node | None
    outer: int | None
    word: str = ""
    members: list[LineEnd | int] = field(default_factory=list)
    """Plain nodes, the head and the foot; or the number of a box inside."""
    pieces: dict[Piece, None] = field(default_factory=dict)
    """The parts of lines inside, each once."""


def boxes(graph: Graph) -> tuple[list[Box], list[Line]]:
    """Put nodes into boxes and cut edges into pieces. An outer box comes before those in it."""
    found = [Box(None, None)]
    home: dict[str, int] = {}
    """The box of each plain node; for one with a block, its own box."""
    branches: dict[tuple[str, int], int] = {}
    split = {node.block for node in graph.nodes if node.branch}
    kinds = {node.id: node.kind for node in graph.nodes}
    for node in graph.nodes:
        outer = 0 if node.block is None else branches[node.block, node.branch if node.block in split else 0]
        if node.kind not in COMPOUND:
            home[node.id] = outer
            found[outer].members.append(LineEnd(node.id, "node"))
            continue
        own = _add(found, Box(node, outer))
        home[node.id] = branches[node.id, 0] = own
        found[own].members.append(LineEnd(node.id, "head"))
        if node.id in split:
            for branch, word in enumerate(("then", "otherwise")):
                branches[node.id, branch] = _add(found, Box(node, own, word))
    for box in found:
        if box.node is not None and not box.word and box.node.kind in FEET:
            box.members.append(LineEnd(box.node.id, "foot"))
    index = [{member: at for at, member in enumerate(box.members)} for box in found]
    paths = [_path(found, number) for number in range(len(found))]
    lines = [_line(edge, kinds, home, paths) for edge in graph.edges]
    for line in lines:
        _cut(line, index, paths, home)
    for number, box in enumerate(found):
        if box.word and box.node is not None and box.outer is not None:
            head = LineEnd(box.node.id, "head")
            gate = Piece(head, 0, index[box.outer][number])
            lines.append(Line(None, head, head, [(box.outer, gate)]))
    for line in lines:
        for number, piece in line.pieces:
            found[number].pieces[piece] = None
    return found, lines


def _add(found: list[Box], box: Box) -> int:
    assert box.outer is not None  # noqa: S101 - only the whole drawing has none
    found.append(box)
    found[box.outer].members.append(len(found) - 1)
    return len(found) - 1


def _path(found: list[Box], number: int) -> tuple[int, ...]:
    path = [number]
    while (outer := found[path[-1]].outer) is not None:
        path.append(outer)
    return tuple(reversed(path))


def _line(edge: Edge, kinds: dict[str, str], home: dict[str, int], paths: list[tuple[int, ...]]) -> Line:
    start, end = LineEnd(edge.source, "node"), LineEnd(edge.target, "node")
    if kinds[edge.source] in COMPOUND:
        inside = home[edge.source] in paths[home[edge.target]]
        start = LineEnd(edge.source, "foot" if kinds[edge.source] in FEET and not inside else "head")
    if kinds[edge.target] in COMPOUND:
        end = LineEnd(edge.target, "foot" if edge.role == "return" and kinds[edge.target] in FEET else "head")
    return Line(edge, start, end)


def _cut(line: Line, index: list[dict[LineEnd | int, int]], paths: list[tuple[int, ...]], home: dict[str, int]) -> None:
    """Cut a line where it crosses borders."""
    start = line.start
    here, there = paths[home[start.node]], paths[home[line.end.node]]
    shared = sum(1 for a, b in zip(here, there, strict=False) if a == b)
    for at in range(len(here) - 1, shared - 1, -1):
        inner: LineEnd | int = start if at == len(here) - 1 else here[at + 1]
        line.pieces.append((here[at], Piece(start, index[here[at]][inner], None)))
    into = len(there) - 2 if line.end.part == "head" else -1  # the box that holds the box whose head is the end
    source: int | None = index[here[shared - 1]][start if len(here) == shared else here[shared]]
    for at in range(shared - 1, len(there)):
        target = index[there[at]][line.end if at == len(there) - 1 else there[at + 1]]
        line.pieces.append((there[at], Piece(start, source, target, at == into)))
        source = None
