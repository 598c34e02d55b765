"""Layers of a graph without boxes: which vertex stands in which row, and in which order.

Vertices are numbers, in an order that edges follow: every edge goes from a lower number to a higher one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

__all__ = ["Neighbours", "neighbours", "order", "rank"]

Neighbours = tuple[list[list[int]], list[list[int]]]
"""The neighbours of each vertex in the layer above, and in the layer below."""

_ROUNDS = 6


def rank(count: int, edges: Sequence[tuple[int, int]], top: int) -> list[int]:
    """Gives each vertex its layer: below everything that it needs, and a source just above what needs it first.

    Args:
        count: how many vertices there are.
        edges: from a lower number to a higher one.
        top: so many vertices, the first ones, have the first layer for themselves.
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
    """Finds the neighbours of each vertex; segments go from one layer to the next."""
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for source, target in segments:
        down[source].append(target)
        up[target].append(source)
    return up, down


def order(rows: Sequence[Sequence[int]], near: Neighbours) -> list[list[int]]:
    """Orders the vertices of each layer so that few segments cross, with barycentres from above and from below."""
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
    """Sorts a row by the mean position of its neighbours; a vertex without any stays where it is."""
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
