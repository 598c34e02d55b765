"""Improves a placement step by step: one choice after the other, as long as everything is done sooner."""

from __future__ import annotations

import heapq
from typing import Final

from dfm_async.planner.estimate import Estimate, estimate
from dfm_async.planner.graph import LARGEST, Graph

__all__ = ["improved"]

_EFFORT: Final = 60_000
"""How many pieces of work are reckoned anew, at least."""
_PASSES: Final = 16
"""How many times all pieces of work, if that is more."""
_MARGIN: Final = 1e-12
"""By which part a change must be better: less is rounding."""


class _Improvement:
    def __init__(self, graph: Graph, start: Estimate) -> None:
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
        """Goes once through the choices that everything waits for; tells whether anything has become better."""
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
        """Changes one choice, if that is better."""
        graph = self.graph
        before = self.options[choice], self.at[choice]
        self.options[choice], self.at[choice] = option, graph.choices[choice].sites[option]
        touched = self._reckon(choice)
        if touched is None or not self.latest <= touched.keys():
            self.options[choice], self.at[choice] = before
            return False
        for number, (end, size) in touched.items():
            self.ends[number], self.sizes[number] = end, size
        self.total = max(self.ends[number] for number in self.last)
        self.latest = self._latest()
        return True

    def _reckon(self, choice: int) -> dict[int, tuple[float, float]] | None:
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


def improved(graph: Graph, start: Estimate) -> Estimate:
    """A placement that no change of a single choice makes better; or as good as it became with some effort."""
    work = _Improvement(graph, start)
    base = start
    while work.left > 0 and work.sweep(base):
        base = estimate(graph, list(work.options))
    return estimate(graph, work.options) if work.options != base.options else base
