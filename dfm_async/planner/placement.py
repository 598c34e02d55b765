"""Where each node runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from dfm_async.federation.federation import Federation
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
from dfm_async.planner.account import Account, Alternative, NodeCost, PlanCost
from dfm_async.planner.candidates import Candidates
from dfm_async.planner.costs import Costs
from dfm_async.planner.estimate import Estimate, estimate
from dfm_async.planner.graph import Graph, Leader, Option, graph_of
from dfm_async.planner.greedy import greedy
from dfm_async.planner.improvement import improved
from dfm_async.planner.search import search
from dfm_async.planner.structure import Spot, Structure

__all__ = ["Placement", "best_placement", "place"]

_CACHE: Final = "#cache"  # no operation can have this name


@dataclass(slots=True, frozen=True)
class Placement:
    """Where a node runs, and why; for a call also with which provider, what it costs, and what else there was."""

    location: str
    why: str
    provider: str | None = None
    cost: NodeCost | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(slots=True)
class _Following:
    """Where the statements stand that are not calls: with the values that they need."""

    found: Structure
    candidates: Candidates
    homesite: str
    lanes: int
    next: dict[int, tuple[Leader, str]] = field(default_factory=dict)
    """The statement or site that each of them stands with, and why."""
    roots: dict[int, Leader] = field(default_factory=dict)
    """The call or site that decides it in the end."""

    def resolve(self) -> None:
        """Finds out what decides where each statement stands."""
        for key, spot in self.found.spots.items():
            if not isinstance(spot.statement, CallStatement):
                self.next[key] = self._near(spot)
        for key in self.found.spots:
            trail: list[int] = []
            step: Leader = key
            while isinstance(step, int) and step in self.next and step not in self.roots:
                if step in trail:
                    step = self.homesite  # it stands with itself
                    break
                trail.append(step)
                step = self.next[step][0]
            root = self.roots.get(step, step) if isinstance(step, int) else step
            for passed in trail or [key]:
                self.roots[passed] = root

    def _near(self, spot: Spot) -> tuple[Leader, str]:
        match spot.statement:
            case YieldStatement(value=value) | IfStatement(cond=value) | ForEachStatement(seq=value):
                return self._value(value, spot)
            case RepeatStatement(next=following, carry=carry):
                return self._value(carry if following is None else following, spot)
            case CollectStatement(node=node):
                return (node if node in self.found.spots else self.homesite), "where the values are"
            case CacheStatement(site=site, store=store):
                if site is not None:
                    self._check_cache(spot, site)
                    return site, "whose cache it is"
                near = self.homesite if store is None else self._value(store, spot)[0]
                return near, "whose cache it is"
            case _:
                raise AssertionError(spot)  # calls are not followers

    def _value(self, expression: Expression, spot: Spot) -> tuple[Leader, str]:
        for ref in references(expression):
            if isinstance(ref, Ref) and ref.node in self.found.spots:
                return ref.node, "where its value is"
        for key, _ in reversed(spot.path):
            if isinstance(self.found.spots[key].statement, (ForEachStatement, RepeatStatement)):
                return key, "where its loop is driven"
        return self.homesite, "nothing ties it to another site"

    def _check_cache(self, spot: Spot, site: str) -> None:
        federation, allowed = self.candidates.federation, self.candidates.allowed
        if site not in federation.sites:
            message = f"no site {site!r} in federation {federation.name!r} ({self.candidates.sites()})"
            self.found.report(spot, message)
        elif allowed is not None and site not in allowed:
            self.found.report(spot, f"uses the cache of site {site!r}; restrict_to_sites allows {sorted(allowed)}")

    def place(self, placed: dict[int, Placement]) -> None:
        """Places what follows calls that are placed."""
        for key in self.found.spots:
            trail: list[int] = []
            step: Leader = key
            while isinstance(step, int) and step not in placed and step not in trail:
                trail.append(step)
                step = self.next[step][0]
            here = placed[step].location if isinstance(step, int) and step in placed else step
            location = self.homesite if isinstance(here, int) else here
            for passed in reversed(trail):
                if isinstance(self.found.spots[passed].statement, CacheStatement):
                    location = self._cache(location.partition("#")[0])
                placed[passed] = Placement(location, self.next[passed][1])

    def _cache(self, name: str) -> str:
        """One worker keeps the cache of a site, so that all of them share it."""
        site = self.candidates.federation.sites.get(name)
        shared = site is not None and (site.workers or self.lanes) > 1 and name != self.homesite
        return f"{name}#{_CACHE}" if shared else name


def best_placement(graph: Graph) -> tuple[Estimate, bool]:
    """The best placement that can be found, and whether it is certain that there is no better one."""
    found = search(graph)
    best = estimate(graph, found.options)
    if found.proven:
        return best, True
    other = estimate(graph, greedy(graph))
    if other.total < best.total:
        best = other
    return improved(graph, best), False


def place(
    found: Structure,
    federation: Federation,
    homesite: str,
    restrict_to_sites: Iterable[str] | None,
    lanes: int,
    costs: Costs,
) -> tuple[dict[int, Placement], PlanCost | None]:
    """Chooses a location for every statement. What cannot be placed is added to the structure's problems.

    Gives the locations, and what everything costs, as far as that is known.
    """
    candidates = Candidates(found, federation, restrict_to_sites)
    options: dict[int, list[Option]] = {}
    for key, spot in found.spots.items():
        if isinstance(spot.statement, CallStatement):
            options[key] = candidates.of(spot, spot.statement)
    following = _Following(found, candidates, homesite, lanes)
    following.resolve()
    if found.problems:
        return {}, None
    placed: dict[int, Placement] = {}
    account = None
    choosing = any(len(listed) > 1 for listed in options.values())
    if choosing or costs.links_known or _any_cost(options, costs):
        graph = graph_of(found, options, following.roots, costs, homesite)
        best, certain = best_placement(graph)
        account = Account(graph, best, options, costs, certain)
    for key, listed in options.items():
        statement = found.spots[key].statement
        assert isinstance(statement, CallStatement)  # noqa: S101 - only calls have options
        option = listed[0] if account is None else listed[account.chosen(key)]
        location, why = option.site, _why(statement, listed, account)
        if option.adapter.in_process and option.site != homesite:
            location = f"{option.site}#{statement.operation}"
            why += ", in a process of its own"
        cost = None if account is None else account.cost(key)
        others = () if account is None else account.alternatives(key)
        placed[key] = Placement(location, why, option.adapter.provider, cost, others)
    following.place(placed)
    if account is None:
        return placed, None
    for key, spot in found.spots.items():
        if isinstance(spot.statement, YieldStatement):
            placed[key] = replace(placed[key], cost=account.cost(key))
    return placed, account.plan_cost


def _any_cost(options: dict[int, list[Option]], costs: Costs) -> bool:
    return any(costs.known(option.site, option.adapter) for listed in options.values() for option in listed)


def _why(statement: CallStatement, listed: list[Option], account: Account | None) -> str:
    if isinstance(statement.site, str) and (len(listed) == 1 or account is None):
        return "fixed by the pipeline"
    if len(listed) == 1 or account is None:
        return "the only site that offers it"
    return account.why(statement.id)
