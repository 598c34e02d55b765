"""Layers of a graph without boxes: the row of each vertex, its order in the row, and its horizontal position.

Vertices are numbers, in an order that edges follow: every edge goes from a lower number to a higher one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence

Neighbours = tuple[list[list[int]], list[list[int]]]
"""The neighbours of each vertex in the layer above, and in the layer below."""

_ROUNDS = 6


def rank(count: int, edges: Sequence[tuple[int, int]], top: int) -> list[int]:
    """Return the layer of each vertex: below everything that it needs, and a source just above what needs it first.

    The ``top`` first vertices have the first layer for themselves.
    """
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        above[target].append(source)
        below[source].append(target)
    first = 1 if top else 0
    layers = [0] * count
    for vertex in range(top, count):
        layers[vertex] = max((layers[other] + 1 for other in above[vertex]), default=first)
    for vertex in range(top, count):
        if not above[vertex] and below[vertex]:
            layers[vertex] = max(first, min(layers[other] for other in below[vertex]) - 1)
    return layers


def neighbours(count: int, segments: Iterable[tuple[int, int]]) -> Neighbours:
    """Find the neighbours of each vertex; segments go from one layer to the next."""
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for source, target in segments:
        down[source].append(target)
        up[target].append(source)
    return up, down


def order(rows: Sequence[Sequence[int]], near: Neighbours) -> list[list[int]]:
    """Order the vertices of each layer so that few segments cross, with barycentres from above and from below."""
    up, down = near
    best = [list(row) for row in rows]
    fewest = _crossings(best, down)
    current = [list(row) for row in best]
    for turn in range(_ROUNDS):
        if not fewest:
            break
        downward = turn % 2 == 0
        given = up if downward else down
        places = range(1, len(current)) if downward else range(len(current) - 2, -1, -1)
        for at in places:
            beside = {vertex: index for index, vertex in enumerate(current[at - 1 if downward else at + 1])}
            current[at] = _sorted(current[at], given, beside)
        crossings = _crossings(current, down)
        if crossings < fewest:
            fewest, best = crossings, [list(row) for row in current]
    return best


def _sorted(row: list[int], given: list[list[int]], beside: dict[int, int]) -> list[int]:
    """Sort a row by the mean position of its neighbours; a vertex without any stays where it is."""
    movable = [(sum(beside[n] for n in given[v]) / len(given[v]), i, v) for i, v in enumerate(row) if given[v]]
    movable.sort()
    following = iter(movable)
    return [next(following)[2] if given[vertex] else vertex for vertex in row]


def _crossings(rows: Sequence[Sequence[int]], down: list[list[int]]) -> int:
    total = 0
    for upper, lower in itertools.pairwise(rows):
        beside = {vertex: index for index, vertex in enumerate(lower)}
        seen: list[int] = []
        for vertex in upper:
            ends = sorted(beside[other] for other in down[vertex])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


Ends = Mapping[tuple[int, int], tuple[float, float]]
"""For a segment: where it leaves its upper vertex and where it enters its lower one, from the middle of each."""


def columns(
    rows: Sequence[Sequence[int]],
    near: Neighbours,
    widths: Sequence[float],
    bends: Sequence[bool],
    ends: Ends,
    gap: Callable[[int, int], float],
) -> list[float]:
    """Return the middle of each vertex. The leftmost edge is at 0.

    Args:
        rows: the layers, each in its order.
        near: the neighbours above and below.
        widths: the width of each vertex.
        bends: whether a vertex is only a bend of a long line. Such lines are straight before others are.
        ends: where lines end at their vertices.
        gap: the least space between two neighbouring vertices.
    """
    count = len(widths)
    if not count:
        return []
    conflicts = _conflicts(rows, near, bends)
    found: list[list[float]] = []
    for downward in (True, False):
        for leftward in (True, False):
            turned = [list(row) if leftward else list(reversed(row)) for row in (rows if downward else rows[::-1])]
            given = near[0] if downward else near[1]
            sign = 1 if leftward else -1

            def shift(above: int, vertex: int, downward: bool = downward, sign: int = sign) -> float:
                if downward:
                    leaves, enters = ends[above, vertex]
                else:
                    enters, leaves = ends[vertex, above]
                return sign * (leaves - enters)

            root, shifts = _align(turned, given, conflicts, shift, count)
            places = _compact(turned, root, shifts, widths, gap)
            found.append([sign * place for place in places])
    return _balanced(found, widths)


def _conflicts(rows: Sequence[Sequence[int]], near: Neighbours, bends: Sequence[bool]) -> set[tuple[int, int]]:
    """Return the segments that cross a part of a long line. They are not aligned."""
    conflicts: set[tuple[int, int]] = set()
    up = near[0]
    for upper, lower in itertools.pairwise(rows):
        position = {vertex: index for index, vertex in enumerate(upper)}
        first, begun = 0, 0
        for index, vertex in enumerate(lower):
            inner = next((other for other in up[vertex] if bends[other]), None) if bends[vertex] else None
            if inner is None and index != len(lower) - 1:
                continue
            last = len(upper) if inner is None else position[inner]
            for other in lower[begun : index + 1]:
                for above in up[other]:
                    if (position[above] < first or position[above] > last) and not (bends[above] and bends[other]):
                        conflicts.add((above, other))
            begun, first = index + 1, last
    return conflicts


def _align(
    rows: Sequence[Sequence[int]],
    given: list[list[int]],
    conflicts: set[tuple[int, int]],
    shift: Callable[[int, int], float],
    count: int,
) -> tuple[list[int], list[float]]:
    """Join each vertex with a median neighbour. Gives the first vertex of each run, and the shifts within runs."""
    root = list(range(count))
    shifts = [0.0] * count
    position = {vertex: index for row in rows for index, vertex in enumerate(row)}
    taken = [False] * count
    for row in rows:
        reached = -1
        for vertex in row:
            around = sorted(given[vertex], key=position.__getitem__)
            middle = (len(around) - 1) / 2
            for index in dict.fromkeys((int(middle), int(middle + 0.5))) if around else ():
                other = around[index]
                crossed = (other, vertex) in conflicts or (vertex, other) in conflicts
                if position[other] > reached and not taken[other] and not crossed:
                    taken[other] = True
                    root[vertex] = root[other]
                    shifts[vertex] = shifts[other] + shift(other, vertex)
                    reached = position[other]
                    break
    return root, shifts


def _compact(
    rows: Sequence[Sequence[int]],
    root: list[int],
    shifts: list[float],
    widths: Sequence[float],
    gap: Callable[[int, int], float],
) -> list[float]:
    """Push the runs to the left as far as their neighbours allow, and then back to the right where there is room."""
    after: dict[int, dict[int, float]] = {}
    waiting: dict[int, int] = {}
    for row in rows:
        for left, right in itertools.pairwise(row):
            a, b = root[left], root[right]
            apart = shifts[left] + widths[left] / 2 + gap(left, right) + widths[right] / 2 - shifts[right]
            following = after.setdefault(a, {})
            if b not in following:
                waiting[b] = waiting.get(b, 0) + 1
                following[b] = apart
            else:
                following[b] = max(following[b], apart)
    place: dict[int, float] = {}
    runs = dict.fromkeys(root[vertex] for row in rows for vertex in row)
    ready = [run for run in runs if not waiting.get(run)]
    settled: list[int] = []
    while ready:
        run = ready.pop()
        settled.append(run)
        start = place.setdefault(run, 0.0)
        for other, apart in after.get(run, {}).items():
            place[other] = max(place.get(other, start + apart), start + apart)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    for run in reversed(settled):
        following = after.get(run, {})
        if following:
            place[run] = max(place[run], min(place[other] - apart for other, apart in following.items()))
    return [place[root[vertex]] + shifts[vertex] for vertex in range(len(root))]


def _balanced(found: list[list[float]], widths: Sequence[float]) -> list[float]:
    """Lay the four layouts over the narrowest one, and take the middle."""
    lefts = [min(x - w / 2 for x, w in zip(places, widths, strict=True)) for places in found]
    rights = [max(x + w / 2 for x, w in zip(places, widths, strict=True)) for places in found]
    best = min(range(4), key=lambda i: rights[i] - lefts[i])
    moved = []
    for index, places in enumerate(found):
        by = lefts[best] - lefts[index] if index % 2 == 0 else rights[best] - rights[index]
        moved.append([x + by for x in places])
    middle = []
    for values in zip(*moved, strict=True):
        ordered = sorted(values)
        middle.append((ordered[1] + ordered[2]) / 2)
    left = min(x - w / 2 for x, w in zip(middle, widths, strict=True))
    return [x - left for x in middle]
