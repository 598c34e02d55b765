"""What a placement costs, node by node, and what the alternatives would: plain data for people."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final

import msgspec

from dfm_async.planner.costs import Costs
from dfm_async.planner.estimate import Estimate, changed, estimate, sending
from dfm_async.planner.graph import Graph, Option

__all__ = ["Account", "Alternative", "NodeCost", "PlanCost", "Transfer"]

_KEPT: Final = 8
"""How many alternatives a plan keeps of each node: the best ones."""
_EXACT: Final = 200_000
"""How much work is reckoned through for alternatives that change more than their neighbours."""


class _Data(msgspec.Struct, frozen=True):
    pass


class Transfer(_Data, frozen=True):
    """An input that comes from another site.

    Attributes:
        source: that site.
        bytes: how much is sent.
        seconds: how long that takes.
    """

    source: str
    bytes: int
    seconds: float


class NodeCost(_Data, frozen=True, kw_only=True):
    """What a call is reckoned to cost, or a yield: its time is that of sending results to the homesite.

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


class Alternative(_Data, frozen=True):
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


class PlanCost(_Data, frozen=True):
    """How long one parameter set is reckoned to take.

    Attributes:
        seconds: until all results are at the homesite.
        optimal: whether it is certain that no other placement is sooner done. Else it is the best that was found.
    """

    seconds: float
    optimal: bool


class Account:
    """Tells what a placement costs.

    Args:
        graph: the work.
        best: the placement.
        options: where each call can run.
        costs: what the figures are based on.
        certain: whether it is known that there is no better placement.
    """

    def __init__(
        self, graph: Graph, best: Estimate, options: Mapping[int, list[Option]], costs: Costs, certain: bool
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
        """Whether any cost is known at all: else figures would only tell what was assumed."""
        listed = (option for options in self._options.values() for option in options)
        return self._costs.links_known or any(self._costs.known(o.site, o.adapter) is not None for o in listed)

    @property
    def plan_cost(self) -> PlanCost | None:
        """What everything costs; None if nothing is known."""
        return PlanCost(_short(self.best.total), self.certain) if self.known else None

    def chosen(self, call: int) -> int:
        """The option of a call that was chosen."""
        return self.best.options[self.graph.calls[call]]

    def cost(self, key: int) -> NodeCost | None:
        """What a call or a yield costs; None if nothing is known."""
        if not self.known:
            return None
        graph, best = self.graph, self.best
        number = self._works[key]
        work = graph.works[number]
        here = self._site(number)
        transfers = []
        for edge in work.inputs:
            there = self._site(edge.source)
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
        """Where else a call could run, the best first; none if nothing is known."""
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

    def _site(self, number: int) -> int:
        choice = self.graph.works[number].choice
        return self.graph.choices[choice].sites[self.best.options[choice]]

    def why(self, key: int) -> str:
        """Why a call with several options runs where it does."""
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
        return f"the soonest done in all, among {names}"

    def _seconds(self, number: int, option: int) -> float:
        seconds, per_byte, _, _ = self.graph.works[number].rates[option]
        return seconds + per_byte * self.best.given[number]

    def _sending(self, number: int, option: int) -> float:
        """How long everything takes together that is sent to and from a call."""
        graph, best = self.graph, self.best
        work = graph.works[number]
        here = graph.choices[work.choice].sites[option]
        total = 0.0
        for edge in work.inputs:
            total += sending(graph, self._site(edge.source), here, edge.share * best.sizes[edge.source], edge.times)
        for reader, edge in graph.readers[number]:
            if graph.works[reader].choice != work.choice:
                total += sending(graph, here, self._site(reader), edge.share * best.sizes[number], edge.times)
        return total


def _short(seconds: float) -> float:
    """Rounded, so that plans are short and do not show how sums were made."""
    return round(seconds, 9)
