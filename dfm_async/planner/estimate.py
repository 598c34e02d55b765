"""What a placement costs: when each piece of work is done, what is sent, and what one change would make of it."""

from __future__ import annotations

from dataclasses import dataclass

from dfm_async.planner.graph import LARGEST, Graph

__all__ = ["Estimate", "changed", "estimate", "sending"]


@dataclass(slots=True)
class Estimate:
    """A placement, reckoned through. Lists are by the number of the work.

    Attributes:
        options: the option of each choice.
        total: when everything is done, and the results are at the homesite.
        ready: when all inputs are there.
        ends: when it is done.
        given: the bytes of its input.
        sizes: the bytes of its output.
        tails: how long it takes from its end to the end of all that depends on it.
    """

    options: list[int]
    total: float
    ready: list[float]
    ends: list[float]
    given: list[float]
    sizes: list[float]
    tails: list[float]

    def critical(self, number: int) -> bool:
        """Whether all would be done sooner if this work were."""
        return self.ends[number] + self.tails[number] >= self.total * (1 - 1e-12)


def sending(graph: Graph, source: int, target: int, size: float, times: float) -> float:
    """How long it takes to send so many values from site to site."""
    fixed, per_byte = graph.links[source][target]
    return times * (fixed + size * per_byte)


def estimate(graph: Graph, options: list[int]) -> Estimate:
    """Reckons a placement through."""
    works, links = graph.works, graph.links
    at = [choice.sites[option] for choice, option in zip(graph.choices, options, strict=True)]
    count = len(works)
    ready, ends, given, sizes, tails = ([0.0] * count for _ in range(5))
    total = 0.0
    for number, work in enumerate(works):
        here, latest, size = at[work.choice], 0.0, work.constant
        for edge in work.inputs:
            source = edge.source
            token = edge.share * sizes[source]
            fixed, per_byte = links[at[works[source].choice]][here]
            arrival = ends[source] + edge.times * (fixed + token * per_byte)
            if arrival > latest:
                latest = arrival
            if edge.counts:
                size += token
        seconds, rate, least, factor = work.rates[options[work.choice]]
        ready[number], given[number] = latest, size
        sizes[number] = min(least + factor * size, LARGEST)
        end = ends[number] = latest + seconds + rate * size
        if end > total:
            total = end
    for number in range(count - 1, -1, -1):
        work = works[number]
        later = tails[number] + ends[number] - ready[number]
        here = at[work.choice]
        for edge in work.inputs:
            source = edge.source
            way = later + sending(graph, at[works[source].choice], here, edge.share * sizes[source], edge.times)
            if way > tails[source]:
                tails[source] = way
    return Estimate(options, total, ready, ends, given, sizes, tails)


def changed(graph: Graph, base: Estimate, choice: int, option: int) -> float | None:
    """The total if one choice were different and all others the same. None: that takes an estimate of its own.

    It looks only at the neighbours, which is exact if the size of the output stays the same, and the choice is that of
    one piece of work.
    """
    found = graph.choices[choice]
    if len(found.works) != 1:
        return None
    number = found.works[0]
    work = graph.works[number]
    seconds, rate, least, factor = work.rates[option]
    given = base.given[number]
    if min(least + factor * given, LARGEST) != base.sizes[number]:
        return None
    here = found.sites[option]
    at = [0.0]
    for edge in work.inputs:
        there = _site(graph, base, edge.source)
        size = edge.share * base.sizes[edge.source]
        at.append(base.ends[edge.source] + sending(graph, there, here, size, edge.times))
    tail = 0.0
    for reader, edge in graph.readers[number]:
        size = edge.share * base.sizes[number]
        way = sending(graph, here, _site(graph, base, reader), size, edge.times)
        tail = max(tail, way + base.ends[reader] - base.ready[reader] + base.tails[reader])
    through = max(at) + seconds + rate * given + tail
    if through >= base.total or not base.critical(number):
        return max(through, base.total)
    return None


def _site(graph: Graph, base: Estimate, number: int) -> int:
    choice = graph.works[number].choice
    return graph.choices[choice].sites[base.options[choice]]
