"""Placements without a proof: a greedy rule, and local search that improves a placement choice by choice."""

from __future__ import annotations

import heapq
from typing import Final

from dfm_async.planning.estimate import Estimate, estimate
from dfm_async.planning.work_graph import LARGEST, Dependency, WorkGraph

_EFFORT: Final = 60_000
"""How many pieces of work are estimated again, at least."""
_PASSES: Final = 16
"""How many times all pieces of work, if that is more."""
_MARGIN: Final = 1e-12
"""By which part a change must be better: less is rounding."""


class _Improvement:
    def __init__(self, graph: WorkGraph, start: Estimate) -> None:
        self.graph = graph
        self.options = list(start.options)
        self.at = [choice.sites[option] for choice, option in zip(graph.choices, start.options, strict=True)]
        self.ends = list(start.ends)
        self.sizes = list(start.sizes)
        self.last = [number for number, readers in enumerate(graph.readers) if not readers]
        self.total = start.total
        self.latest = self._latest()
        """The work without readers that is done last; usually one piece."""
        self.left = max(_EFFORT, _PASSES * len(graph.works))

    def _latest(self) -> set[int]:
        limit = self.total * (1 - _MARGIN)
        return {number for number in self.last if self.ends[number] >= limit}

    def sweep(self, base: Estimate) -> bool:
        """Try the other options of each critical choice once; return whether anything has become better."""
        better = False
        for number, choice in enumerate(self.graph.choices):
            if len(choice.sites) > 1 and any(base.critical(work) for work in choice.works):
                for option in range(len(choice.sites)):
                    if self.left <= 0:
                        return better
                    if option != self.options[number]:
                        better = self._try(number, option) or better
        return better

    def _try(self, choice: int, option: int) -> bool:
        """Change one choice, if that is better."""
        graph = self.graph
        before = self.options[choice], self.at[choice]
        self.options[choice], self.at[choice] = option, graph.choices[choice].sites[option]
        touched = self._compute(choice)
        if touched is None or not self.latest <= touched.keys():
            self.options[choice], self.at[choice] = before
            return False
        for number, (end, size) in touched.items():
            self.ends[number], self.sizes[number] = end, size
        self.total = max(self.ends[number] for number in self.last)
        self.latest = self._latest()
        return True

    def _compute(self, choice: int) -> dict[int, tuple[float, float]] | None:
        """The ends and sizes that change with a choice; None as soon as it is clear that nothing becomes better."""
        graph, at, works = self.graph, self.at, self.graph.works
        limit = self.total * (1 - _MARGIN)
        waiting = list(graph.choices[choice].works)
        queued = set(waiting)
        found: dict[int, tuple[float, float]] = {}
        while waiting:
            number = heapq.heappop(waiting)
            work = works[number]
            self.left -= 1
            here, latest, given = at[work.choice], 0.0, work.constant
            for edge in work.inputs:
                source = edge.source
                end, size = found[source] if source in found else (self.ends[source], self.sizes[source])
                token = edge.share * size
                fixed, per_byte = graph.links[at[works[source].choice]][here]
                arrival = end + edge.times * (fixed + token * per_byte)
                if arrival > latest:
                    latest = arrival
                if edge.counts:
                    given += token
            seconds, rate, least, factor = work.rates[self.options[work.choice]]
            end, size = latest + seconds + rate * given, min(least + factor * given, LARGEST)
            if end >= limit:
                return None
            if work.choice == choice or end != self.ends[number] or size != self.sizes[number]:
                found[number] = (end, size)
                for reader, _ in graph.readers[number]:
                    if reader not in queued:
                        queued.add(reader)
                        heapq.heappush(waiting, reader)
        return found


def improved(graph: WorkGraph, start: Estimate) -> Estimate:
    """Return a placement that no change of a single choice makes better; or as good as it became with some effort."""
    work = _Improvement(graph, start)
    base = start
    while work.left > 0 and work.sweep(base):
        base = estimate(graph, list(work.options))
    return estimate(graph, work.options) if work.options != base.options else base


class _Greedy:
    """The greedy rule of DFM: the most expensive leaf first, the cheapest of its replicas, and backwards from there.

    It is the baseline: a placement is never worse than what this rule finds. It adds up the times of inputs, as if they
    arrived one after the other; its result is estimated like any other placement.
    """

    def __init__(self, graph: WorkGraph) -> None:
        self.graph = graph
        self.picked: list[int | None] = [0 if len(choice.sites) == 1 else None for choice in graph.choices]
        self.costs: list[list[tuple[float, float]]] = [[] for _ in graph.works]
        """The time and the size of each option, with everything that leads to it."""
        self.ways: list[list[list[int]]] = [[] for _ in graph.works]
        """Which option of each input that takes."""
        self.selected: set[int] = set()
        self.heap: list[tuple[float, float, int]] = []

    def run(self) -> list[int]:
        graph = self.graph
        for number in range(len(graph.works)):
            self._compute(number)
        self.heap = [self._rank(number) for number, readers in enumerate(graph.readers) if not readers]
        heapq.heapify(self.heap)
        while self.heap:
            rank = heapq.heappop(self.heap)
            leaf = rank[2]
            if leaf not in self.selected and rank == self._rank(leaf):  # else there is a newer entry in the heap
                self._select(leaf)
        return [option or 0 for option in self.picked]

    def _options(self, number: int) -> range | tuple[int]:
        choice = self.graph.works[number].choice
        known = self.picked[choice]
        return range(len(self.graph.choices[choice].sites)) if known is None else (known,)

    def _rank(self, number: int) -> tuple[float, float, int]:
        """Order leaves: the one with the most expensive replica first."""
        time, size = max(self.costs[number][option] for option in self._options(number))
        return -time, -size, number

    def _compute(self, number: int) -> bool:
        """Compute the cost of all replicas; return whether anything has changed."""
        work = self.graph.works[number]
        width = len(work.rates)
        costs = [(float("inf"), 0.0)] * width
        ways: list[list[int]] = [[] for _ in range(width)]
        for option in self._options(number):
            time, given = 0.0, work.constant
            for edge in work.inputs:
                cheapest, size, source = self._cheapest(number, option, edge)
                ways[option].append(source)
                time += cheapest
                if edge.counts:
                    given += size
            seconds, rate, least, factor = work.rates[option]
            costs[option] = (time + seconds + rate * given, min(least + factor * given, LARGEST))
        same = costs == self.costs[number]
        self.costs[number], self.ways[number] = costs, ways
        return not same

    def _cheapest(self, number: int, option: int, edge: Dependency) -> tuple[float, float, int]:
        graph = self.graph
        work, source = graph.works[number], graph.works[edge.source]
        here = graph.choices[work.choice].sites[option]
        sites = graph.choices[source.choice].sites
        options = (option,) if source.choice == work.choice else self._options(edge.source)
        found: tuple[float, float, int] | None = None
        for other in options:
            time, size = self.costs[edge.source][other]
            token = edge.share * size
            fixed, per_byte = graph.links[sites[other]][here]
            way = (time + edge.times * (fixed + token * per_byte), token, other)
            if found is None or way < found:
                found = way
        assert found is not None  # noqa: S101 - every choice has an option
        return found

    def _select(self, leaf: int) -> None:
        graph = self.graph
        stack = [(leaf, min(self._options(leaf), key=lambda option: (*self.costs[leaf][option], option)))]
        decided: set[int] = set()
        while stack:
            number, option = stack.pop()
            if number in self.selected:
                continue
            self.selected.add(number)
            choice = graph.works[number].choice
            chosen = self.picked[choice]
            if chosen is None:
                chosen = self.picked[choice] = option
                decided.update(graph.choices[choice].works)
            for edge, source in zip(graph.works[number].inputs, self.ways[number][chosen], strict=True):
                stack.append((edge.source, source))
        self._refresh(decided)

    def _refresh(self, decided: set[int]) -> None:
        """Compute again what depends on choices that were made."""
        waiting = list(decided)
        heapq.heapify(waiting)
        queued = set(waiting)
        while waiting:
            number = heapq.heappop(waiting)
            queued.discard(number)
            if self._compute(number):
                readers = self.graph.readers[number]
                if not readers and number not in self.selected:
                    heapq.heappush(self.heap, self._rank(number))
                for reader, _ in readers:
                    if reader not in queued:
                        queued.add(reader)
                        heapq.heappush(waiting, reader)


def greedy(graph: WorkGraph) -> list[int]:
    """Return the option of each choice that the greedy rule selects."""
    return _Greedy(graph).run()
