"""What work and sending cost: as the federation says, as measured, and what is assumed where nothing is known."""

from __future__ import annotations

from typing import Any, Final

from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Adapter
from dfm_async.model.policies import Cost
from dfm_async.model.resources import SendCost
from dfm_async.planner.profile import Profile

__all__ = ["ELEMENTS", "PARAMETER_BYTES", "UNKNOWN_LINK", "Costs", "bytes_of"]

UNKNOWN_LINK: Final = SendCost(fixed_time=1.0, bandwidth=1e7)
"""What sending costs between two sites of which nothing is known: so much that values rather stay where they are."""
PARAMETER_BYTES: Final = 1000.0
"""How large a parameter of a pipeline is assumed to be."""
ELEMENTS: Final = 10
"""How often the body of a loop is assumed to run, if the pipeline does not say."""

_FREE: Final = Cost()
_HERE: Final = SendCost()
_MANY: Final = 10_000


class Costs:
    """The costs of a federation, as a planner reckons with them.

    Args:
        federation: the sites; their adapters and ``send_cost`` hold the configured costs.
        measured: costs of real runs, which replace the configured ones.
    """

    def __init__(self, federation: Federation, measured: Profile | None = None) -> None:
        self._federation = federation
        self._measured = measured
        self._links: dict[tuple[str, str], SendCost] = {}
        self._unknown: dict[str, Cost] = {}
        self.links_known = measured is not None or any(site.send_cost for site in federation.sites.values())
        """Whether anything is known about sending."""

    def known(self, site: str, adapter: Adapter) -> Cost | None:
        """What an adapter costs at a site: as measured, or else as configured; None if nobody knows."""
        if self._measured is not None:
            found = self._measured.cost(site, adapter.operation, adapter.provider)
            if found is not None:
                return found
        return adapter.cost

    def work(self, site: str, adapter: Adapter) -> Cost:
        """What an adapter costs at a site. One of unknown cost is reckoned like the worst of the same operation."""
        return self.known(site, adapter) or self._worst(adapter.operation)

    def _worst(self, operation: str) -> Cost:
        found = self._unknown.get(operation)
        if found is None:
            costs = [
                cost
                for site in self._federation.sites.values()
                for (name, _), adapter in site.adapters.items()
                if name == operation and (cost := self.known(site.name, adapter)) is not None
            ]
            found = self._unknown[operation] = _worst_of(costs)
        return found

    def link(self, source: str, target: str) -> SendCost:
        """What sending from one site to another costs. What is known of one direction counts for the other, too."""
        if source == target:
            return _HERE
        pair = (source, target)
        found = self._links.get(pair)
        if found is None:
            found = self._links[pair] = self._find(source, target) or self._find(target, source) or UNKNOWN_LINK
        return found

    def _find(self, source: str, target: str) -> SendCost | None:
        if self._measured is not None:
            found = self._measured.link(source, target)
            if found is not None:
                return found
        site = self._federation.sites.get(source)
        return None if site is None else site.send_cost.get(target)


def _worst_of(costs: list[Cost]) -> Cost:
    if not costs:
        return _FREE
    rates = [cost.throughput for cost in costs if cost.throughput is not None]
    return Cost(
        fixed_time=max(cost.fixed_time for cost in costs),
        throughput=min(rates, default=None),
        fixed_size=max(cost.fixed_size for cost in costs),
        output_factor=max(cost.output_factor for cost in costs),
    )


def bytes_of(value: Any) -> float:
    """Roughly how many bytes a constant has. Looks at no more than some thousands of its parts."""
    total, seen = 0.0, 0
    stack = [value]
    while stack and seen < _MANY:
        seen += 1
        part = stack.pop()
        if isinstance(part, (str, bytes, bytearray, memoryview)):
            total += len(part)
        elif isinstance(part, dict):
            stack.extend(part.keys())
            stack.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            stack.extend(part)
        else:
            size = getattr(part, "nbytes", None)
            total += size if isinstance(size, int) else 8
    return total
