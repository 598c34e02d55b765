"""The greedy rule of DFM: the most expensive leaf first, the cheapest of its replicas, and backwards from there.

It is a yardstick: a placement is never worse than what this rule finds. It adds up the times of inputs, as if they came
one after the other; what it finds is judged like any other placement.
"""

from __future__ import annotations

import heapq

from dfm_async.planner.graph import LARGEST, Edge, Graph

__all__ = ["greedy"]


class _Greedy:
    def __init__(self, graph: Graph) -> None:
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
            self._reckon(number)
        self.heap = [self._rank(number) for number, readers in enumerate(graph.readers) if not readers]
        heapq.heapify(self.heap)
        while self.heap:
            rank = heapq.heappop(self.heap)
            leaf = rank[2]
            if leaf not in self.selected and rank == self._rank(leaf):  # else it stands elsewhere in the heap, too
                self._select(leaf)
        return [option or 0 for option in self.picked]

    def _options(self, number: int) -> range | tuple[int]:
        choice = self.graph.works[number].choice
        known = self.picked[choice]
        return range(len(self.graph.choices[choice].sites)) if known is None else (known,)

    def _rank(self, number: int) -> tuple[float, float, int]:
        """Orders leaves: the one with the most expensive replica first."""
        time, size = max(self.costs[number][option] for option in self._options(number))
        return -time, -size, number

    def _reckon(self, number: int) -> bool:
        """Reckons the cost of all replicas; tells whether anything has changed."""
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

    def _cheapest(self, number: int, option: int, edge: Edge) -> tuple[float, float, int]:
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
        """Reckons anew what depends on choices that were made."""
        waiting = list(decided)
        heapq.heapify(waiting)
        queued = set(waiting)
        while waiting:
            number = heapq.heappop(waiting)
            queued.discard(number)
            if self._reckon(number):
                readers = self.graph.readers[number]
                if not readers and number not in self.selected:
                    heapq.heappush(self.heap, self._rank(number))
                for reader, _ in readers:
                    if reader not in queued:
                        queued.add(reader)
                        heapq.heappush(waiting, reader)


def greedy(graph: Graph) -> list[int]:
    """The option of each choice that the greedy rule selects."""
    return _Greedy(graph).run()
