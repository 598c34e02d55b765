"""What a placement costs: when each piece of work is done, what is sent, and what one change would make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

from dfm_async.planning.profile import Costs
from dfm_async.planning.work_graph import LARGEST, Option, WorkGraph


@dataclass(slots=True, kw_only=True)
class Estimate:
    """The times and sizes of a placement. Lists are indexed by the number of the work.

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
        """Return whether all would be done sooner if this work were."""
        return self.ends[number] + self.tails[number] >= self.total * (1 - 1e-12)


def sending(graph: WorkGraph, source: int, target: int, size: float, times: float) -> float:
    """Return how long it takes to send ``times`` values of a size from site to site."""
    fixed, per_byte = graph.links[source][target]
    return times * (fixed + size * per_byte)


def estimate(graph: WorkGraph, options: list[int]) -> Estimate:
    """Compute when each piece of work is done, and what is sent, in a placement."""
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
    return Estimate(options=options, total=total, ready=ready, ends=ends, given=given, sizes=sizes, tails=tails)


def changed(graph: WorkGraph, base: Estimate, choice: int, option: int) -> float | None:
    """Return the total if one choice were different and all others the same. None: that takes an estimate of its own.

    It considers only the neighbours, which is exact if the size of the output stays the same, and the choice is that of
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


def _site(graph: WorkGraph, base: Estimate, number: int) -> int:
    choice = graph.works[number].choice
    return graph.choices[choice].sites[base.options[choice]]


_KEPT: Final = 8
"""How many alternatives a plan keeps of each node: the best ones."""
_EXACT: Final = 200_000
"""How much work is estimated for alternatives that change more than their neighbours."""


class Transfer(msgspec.Struct, frozen=True):
    """An input that comes from another site.

    Attributes:
        source: that site.
        bytes: how much is sent.
        seconds: how long that takes.
    """

    source: str
    bytes: int
    seconds: float


class NodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated cost of a call, or of a yield: its time is that of sending results to the homesite.

    In a loop, times are those of all its elements together; sizes of inputs and outputs are those of one.

    Attributes:
        start: after how many seconds its inputs are there.
        seconds: how long it takes.
        bytes_in: the size of its input.
        bytes_out: the size of its output.
        transfers: what is sent for it.
        critical: whether the whole pipeline waits for it.
    """

    start: float
    seconds: float
    bytes_in: int
    bytes_out: int
    transfers: tuple[Transfer, ...] = ()
    critical: bool = False


class Alternative(msgspec.Struct, frozen=True):
    """Where a node could run, too.

    Attributes:
        site: the site.
        provider: the provider there, if it is one's.
        total: after how many seconds everything would be done, if only this were different.
        difference: by how many seconds that is later.
    """

    site: str
    provider: str | None
    total: float
    difference: float


class PlanCost(msgspec.Struct, frozen=True):
    """The estimated time of one parameter set.

    Attributes:
        seconds: until all results are at the homesite.
        optimal: whether it is certain that no other placement is sooner done. Else it is the best that was found.
    """

    seconds: float
    optimal: bool


class PlacementCosts:
    """Reports what a placement costs; ``certain``: it is proven to be optimal."""

    def __init__(
        self, graph: WorkGraph, best: Estimate, options: Mapping[int, list[Option]], costs: Costs, certain: bool
    ) -> None:
        self.graph = graph
        self.best = best
        self.certain = certain
        self._options = options
        self._costs = costs
        self._left = _EXACT
        self._works: dict[int, int] = {}
        for number, work in enumerate(graph.works):
            if work.key is not None:
                self._works.setdefault(work.key, number)

    @cached_property
    def known(self) -> bool:
        """Whether any cost is known: otherwise the figures would only show assumptions."""
        listed = (option for options in self._options.values() for option in options)
        return self._costs.links_known or any(self._costs.known(o.site, o.adapter) is not None for o in listed)

    @property
    def plan_cost(self) -> PlanCost | None:
        """What everything costs; None if nothing is known."""
        return PlanCost(_short(self.best.total), self.certain) if self.known else None

    def chosen(self, call: int) -> int:
        """Return the option of a call that was chosen."""
        return self.best.options[self.graph.calls[call]]

    def cost(self, key: int) -> NodeCost | None:
        """Return what a call or a yield costs; None if nothing is known."""
        if not self.known:
            return None
        graph, best = self.graph, self.best
        number = self._works[key]
        work = graph.works[number]
        here = _site(graph, best, number)
        transfers = []
        for edge in work.inputs:
            there = _site(graph, best, edge.source)
            if there != here:
                size = edge.share * best.sizes[edge.source]
                seconds = sending(graph, there, here, size, edge.times)
                transfers.append(Transfer(graph.sites[there], round(size * edge.times), _short(seconds)))
        return NodeCost(
            start=_short(best.ready[number]),
            seconds=_short(best.ends[number] - best.ready[number]),
            bytes_in=round(best.given[number]),
            bytes_out=round(best.sizes[number]),
            transfers=tuple(transfers),
            critical=best.critical(number),
        )

    def alternatives(self, key: int) -> tuple[Alternative, ...]:
        """Return where else a call could run, the best first; none if nothing is known."""
        if not self.known:
            return ()
        choice = self.graph.calls[key]
        found = []
        for number, option in enumerate(self._options[key]):
            if number != self.best.options[choice]:
                total = self._total(choice, number)
                if total is not None:
                    late = _short(total - self.best.total)
                    found.append(Alternative(option.site, option.adapter.provider, _short(total), late))
        found.sort(key=lambda other: other.total)
        return tuple(found[:_KEPT])

    def _total(self, choice: int, option: int) -> float | None:
        total = changed(self.graph, self.best, choice, option)
        if total is None and self._left > 0:
            self._left -= len(self.graph.works)
            options = list(self.best.options)
            options[choice] = option
            total = estimate(self.graph, options).total
        return total

    def why(self, key: int) -> str:
        """Return why a call with several options runs where it does."""
        options = self._options[key]
        chosen = self.chosen(key)
        number = self._works[key]
        times = [self._seconds(number, option) for option in range(len(options))]
        sends = [self._sending(number, option) for option in range(len(options))]
        names = ", ".join(option.name for option in options)
        if self.known and all(time > times[chosen] for i, time in enumerate(times) if i != chosen):
            listed = ", ".join(f"{o.name} {time:.3g} s" for o, time in zip(options, times, strict=True))
            return f"cheapest: {listed}"
        if all(send == sends[chosen] for send in sends):
            return f"the first that offers it, among {names}"
        if sends[chosen] == min(sends):
            near = "inputs" if self.graph.works[number].inputs else "readers"
            return f"nearest to its {near}, among {names}"
        return f"the earliest finish in total, among {names}"

    def _seconds(self, number: int, option: int) -> float:
        seconds, per_byte, _, _ = self.graph.works[number].rates[option]
        return seconds + per_byte * self.best.given[number]

    def _sending(self, number: int, option: int) -> float:
        """Return how long everything takes together that is sent to and from a call."""
        graph, best = self.graph, self.best
        work = graph.works[number]
        here = graph.choices[work.choice].sites[option]
        total = 0.0
        for edge in work.inputs:
            total += sending(
                graph, _site(graph, best, edge.source), here, edge.share * best.sizes[edge.source], edge.times
            )
        for reader, edge in graph.readers[number]:
            if graph.works[reader].choice != work.choice:
                total += sending(graph, here, _site(graph, best, reader), edge.share * best.sizes[number], edge.times)
        return total


def _short(seconds: float) -> float:
    """Round a time, so that plans are short and do not show how sums were made."""
    return round(seconds, 9)
