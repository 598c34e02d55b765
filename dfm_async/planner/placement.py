"""Where each node runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dfm_async.federation.federation import Federation, Site
from dfm_async.federation.operation import GENERATORS
from dfm_async.pipeline.expressions import Expression, Ref, references
from dfm_async.pipeline.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    YieldStatement,
)
from dfm_async.planner.structure import Spot, Structure

__all__ = ["Placement", "place"]

_CACHE = "#cache"  # no operation can have this name


@dataclass(slots=True, frozen=True)
class Placement:
    """Where a node runs, and why."""

    location: str
    why: str


class _Placer:
    def __init__(
        self, found: Structure, federation: Federation, homesite: str, allowed: Iterable[str] | None, lanes: int
    ) -> None:
        self.lanes = lanes
        self.found = found
        self.federation = federation
        self.homesite = homesite
        self.allowed = None if allowed is None else frozenset(allowed)
        self.placed: dict[int, Placement] = {}
        self._under_way: set[int] = set()
        self._offers: dict[tuple[str, str | None], list[Site]] = {}

    def offers(self, operation: str, provider: str | None) -> list[Site]:
        """The sites that offer an operation, in the order of the federation."""
        key = (operation, provider)
        if key not in self._offers:
            sites = self.federation.sites.values()
            self._offers[key] = [site for site in sites if site.adapter(operation, provider) is not None]
        return self._offers[key]

    def call(self, spot: Spot, statement: CallStatement) -> None:
        operation = statement.operation
        if operation not in self.federation.operations:
            known = ", ".join(sorted(self.federation.operations)) or "none"
            self.found.report(
                spot, f"no operation {operation!r} in federation {self.federation.name!r} (it has: {known})"
            )
            return
        asked = statement.site
        if isinstance(asked, str):
            self._fixed(spot, statement, asked)
            return
        sites = self.offers(operation, statement.provider)
        if asked is not None and asked.sites is not None:
            for name in asked.sites:
                if name not in self.federation.sites:
                    self.found.report(spot, f"BestOf names site {name!r}, which does not exist ({self._sites()})")
            sites = [site for site in sites if site.name in asked.sites]
        if self.allowed is not None:
            sites = [site for site in sites if site.name in self.allowed]
        if not sites:
            provider = f" from provider {statement.provider!r}" if statement.provider else ""
            among = "" if asked is None or asked.sites is None else f" among {list(asked.sites)}"
            limit = "" if self.allowed is None else f" (restricted to {sorted(self.allowed)})"
            self.found.report(spot, f"no site{among} offers operation {operation!r}{provider}{limit}")
            return
        if len(sites) == 1:
            self._put(spot, statement, sites[0], "the only site that offers it")
            return
        weights = dict.fromkeys((site.name for site in sites), 0)
        for _, ref, _ in spot.references:
            if isinstance(ref, Ref):
                near = self.locate(ref.node).partition("#")[0]
                if near in weights:
                    weights[near] += 1
        costs = {site.name: _fixed_time(site, statement) for site in sites}
        best = min(sites, key=lambda site: (-weights[site.name], costs[site.name]))
        if weights[best.name]:
            why = f"nearest to its inputs, among {', '.join(weights)}"
        elif len(set(costs.values())) > 1:
            why = "cheapest: " + ", ".join(f"{name} {cost:g} s" for name, cost in costs.items())
        else:
            why = f"the first that offers it, among {', '.join(weights)}"
        self._put(spot, statement, best, why)

    def _fixed(self, spot: Spot, statement: CallStatement, name: str) -> None:
        site = self.federation.sites.get(name)
        if site is None:
            self.found.report(spot, f"no site {name!r} in federation {self.federation.name!r} ({self._sites()})")
        elif self.allowed is not None and name not in self.allowed:
            self.found.report(spot, f"is fixed to site {name!r}, but restrict_to_sites allows {sorted(self.allowed)}")
        elif site.adapter(statement.operation, statement.provider) is None:
            offered = [other.name for other in self.offers(statement.operation, statement.provider)]
            provider = f" from provider {statement.provider!r}" if statement.provider else ""
            where = f"offered by {', '.join(offered)}" if offered else "no site offers it"
            self.found.report(
                spot, f"site {name!r} does not offer operation {statement.operation!r}{provider} ({where})"
            )
        else:
            self._put(spot, statement, site, "fixed by the pipeline")

    def _sites(self) -> str:
        return f"it has: {', '.join(self.federation.sites) or 'none'}"

    def _put(self, spot: Spot, statement: CallStatement, site: Site, why: str) -> None:
        adapter = site.adapter(statement.operation, statement.provider)
        assert adapter is not None  # noqa: S101 - only offering sites get here
        retried = statement.retry is not None and statement.retry.tries_again
        if (retried or statement.deadline is not None) and adapter.kind in GENERATORS:
            self.found.report(spot, "retry and deadline need an operation that returns; this one is a generator")
        if adapter.in_process and site.name != self.homesite:
            location = f"{site.name}#{statement.operation}"
            why += ", in a process of its own"
        else:
            location = site.name
        self.placed[spot.statement.id] = Placement(location, why)

    def locate(self, node: int) -> str:
        """The location of a statement; for one that is not a call, near the values it needs."""
        known = self.placed.get(node)
        if known is not None:
            return known.location
        spot = self.found.spots.get(node)
        if spot is None or node in self._under_way:
            return self.homesite
        self._under_way.add(node)
        location, why = self._derive(spot)
        self._under_way.discard(node)
        self.placed[node] = Placement(location, why)
        return location

    def _derive(self, spot: Spot) -> tuple[str, str]:
        match spot.statement:
            case YieldStatement(value=value) | IfStatement(cond=value) | ForEachStatement(seq=value):
                return self._near(value, spot)
            case CollectStatement(node=node):
                return self.locate(node), "where the values are"
            case RepeatStatement(next=following, carry=carry):
                return self._near(carry if following is None else following, spot)
            case CacheStatement(site=site, store=store):
                if site is None:
                    site = self._near(Ref(node=-1) if store is None else store, spot)[0].partition("#")[0]
                elif site not in self.federation.sites:
                    self.found.report(
                        spot, f"no site {site!r} in federation {self.federation.name!r} ({self._sites()})"
                    )
                elif self.allowed is not None and site not in self.allowed:
                    allowed = sorted(self.allowed)
                    self.found.report(spot, f"uses the cache of site {site!r}; restrict_to_sites allows {allowed}")
                found = self.federation.sites.get(site)
                # One worker keeps the cache of a site, so that all of them share it.
                shared = found is not None and (found.workers or self.lanes) > 1 and site != self.homesite
                return (f"{site}#{_CACHE}" if shared else site), "whose cache it is"
            case CallStatement():
                return self.homesite, "nowhere"  # a problem is reported already

    def _near(self, expression: Expression, spot: Spot) -> tuple[str, str]:
        for ref in references(expression):
            if isinstance(ref, Ref) and ref.node >= 0:
                return self.locate(ref.node), "where its value is"
        for statement_id, _ in reversed(spot.path):
            outer = self.found.spots[statement_id].statement
            if isinstance(outer, (ForEachStatement, RepeatStatement)):
                return self.locate(statement_id), "where its loop is driven"
        return self.homesite, "nothing ties it to another site"


def _fixed_time(site: Site, statement: CallStatement) -> float:
    adapter = site.adapter(statement.operation, statement.provider)
    return 0.0 if adapter is None or adapter.cost is None else adapter.cost.fixed_time


def place(
    found: Structure, federation: Federation, homesite: str, restrict_to_sites: Iterable[str] | None, lanes: int
) -> dict[int, Placement]:
    """Chooses a location for every statement. What cannot be placed is added to the structure's problems."""
    placer = _Placer(found, federation, homesite, restrict_to_sites, lanes)
    for spot in found.spots.values():
        if isinstance(spot.statement, CallStatement):
            placer.call(spot, spot.statement)
    for node in found.spots:
        placer.locate(node)
    return placer.placed
