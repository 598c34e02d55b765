"""Where each node runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from dfm_async.federation.federation import Federation
from dfm_async.language.expressions import Expression, Ref, references
from dfm_async.language.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    GatherStatement,
    SleepStatement,
    WaitStatement,
    YieldStatement,
    walk_statements,
)
from dfm_async.model.ids import Location
from dfm_async.model.pool_size import fewest_workers
from dfm_async.planning.candidates import Candidates
from dfm_async.planning.estimate import Alternative, Estimate, NodeCost, PlacementCosts, PlanCost, estimate
from dfm_async.planning.heuristics import greedy, improved
from dfm_async.planning.profile import Costs
from dfm_async.planning.search import search
from dfm_async.planning.structure import Spot, Structure
from dfm_async.planning.work_graph import Leader, Option, WorkGraph, work_graph_of


class Placement(msgspec.Struct, frozen=True):
    """Where a node runs, and why; for a call also with which provider, what it costs, and what else there was."""

    location: Location
    why: str
    provider: str | None = None
    cost: NodeCost | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(slots=True)
class _Following:
    """Places statements that are not calls: next to the values that they need."""

    found: Structure
    candidates: Candidates
    homesite: str
    lanes: int
    options: dict[int, list[Option]]
    next: dict[int, tuple[Leader, str]] = field(default_factory=dict)
    """The statement or site that each of them follows, and why."""
    roots: dict[int, Leader] = field(default_factory=dict)
    """The call or site that decides it in the end."""
    needed: dict[int, int] = field(default_factory=dict)
    """The first call that needs each value, if there is a ``gather``."""

    def resolve(self) -> None:
        """Find the call or site that decides where each statement runs."""
        for key, spot in self.found.spots.items():
            if not isinstance(spot.statement, CallStatement):
                self.next[key] = self._near(spot)
        for key in self.found.spots:
            trail: list[int] = []
            step: Leader = key
            while isinstance(step, int) and step in self.next and step not in self.roots:
                if step in trail:
                    step = self.homesite  # it follows itself
                    break
                trail.append(step)
                step = self.next[step][0]
            root = self.roots.get(step, step) if isinstance(step, int) else step
            for passed in trail or [key]:
                self.roots[passed] = root

    def _near(self, spot: Spot) -> tuple[Leader, str]:
        statement = spot.statement
        if isinstance(statement, CacheStatement) and statement.site is not None:
            self._check_cache(spot, statement.site)
            return statement.site, "whose cache it is"
        if isinstance(statement, GatherStatement):
            return self._of_readers(spot)
        if isinstance(statement, (WaitStatement, SleepStatement)):
            return self.homesite, "where events come to"
        if isinstance(statement, CollectStatement) and statement.errors != "fail":
            # Not where its values are made: it goes on if that site is lost.
            return self.found.loops[self.found.scope_of_value(statement.node) - 1], "where its loop is driven"
        if isinstance(statement, YieldStatement):
            for _, ref, _ in spot.references:
                source = self.found.spots.get(ref.node) if isinstance(ref, Ref) else None
                called = source.statement if source is not None else None
                if source is not None and isinstance(called, CallStatement) and called.fallback is not None:
                    return self._of_caller(source)
        anchor = statement.anchor
        near, why = (self.homesite, "") if anchor is None else self._value(anchor, spot)
        if isinstance(statement, CacheStatement):
            why = "whose cache it is"
        elif isinstance(statement, CollectStatement):
            why = "site of its inputs"
        return near, why

    def _of_readers(self, spot: Spot) -> tuple[Leader, str]:
        """Return where the first call runs that needs a value: one of its sources may be lost."""
        if not self.needed:
            for key, reader in self.found.spots.items():
                if isinstance(reader.statement, CallStatement):
                    for _, ref, _ in reader.references:
                        if isinstance(ref, Ref):
                            self.needed.setdefault(ref.node, key)
        if spot.statement.id in self.needed:
            return self.needed[spot.statement.id], "where its value is needed"
        calls = spot.statement.calls if isinstance(spot.statement, GatherStatement) else ()
        return self._of_caller(next((self.found.spots[key] for key in calls if key in self.found.spots), spot))

    def _of_caller(self, spot: Spot) -> tuple[Leader, str]:
        """Return where the inputs of a call come from: that site goes on if the site of the call is lost."""
        sites = self._sites(spot)
        for _, ref, _ in spot.references:
            if isinstance(ref, Ref) and ref.node in self.found.spots:
                source = self.found.spots[ref.node]
                if isinstance(source.statement, CallStatement) and self._sites(source) == sites and len(sites) == 1:
                    return self._of_caller(source)
                return ref.node, "where the inputs of its call come from"
        for key, _ in reversed(spot.path):
            if self.found.spots[key].statement.is_loop:
                return key, "where its loop is driven"
        return self.homesite, "nothing ties it to another site"

    def _sites(self, spot: Spot) -> set[str]:
        return {option.site for option in self.options.get(spot.statement.id, ())}

    def _value(self, expression: Expression, spot: Spot) -> tuple[Leader, str]:
        for ref in references(expression):
            if isinstance(ref, Ref) and ref.node in self.found.spots:
                return ref.node, "site of its input"
        for key, _ in reversed(spot.path):
            if self.found.spots[key].statement.is_loop:
                return key, "where its loop is driven"
        if isinstance(spot.statement, ForEachStatement) and (site := self._only_site(spot.statement)) is not None:
            return site, "the only site that its calls can run at"
        return self.homesite, "nothing ties it to another site"

    def _only_site(self, loop: ForEachStatement) -> str | None:
        """Return the site of all calls in a loop, if there is only one: its elements need not be sent there singly."""
        calls = [found.id for found in walk_statements(loop.body) if isinstance(found, CallStatement)]
        sites = {option.site for key in calls for option in self.options.get(key, ())}
        return sites.pop() if len(sites) == 1 else None

    def _check_cache(self, spot: Spot, site: str) -> None:
        federation, allowed = self.candidates.federation, self.candidates.allowed
        if site not in federation.sites:
            message = f"no site {site!r} in federation {federation.name!r} ({self.candidates.sites()})"
            self.found.report(spot, message)
        elif allowed is not None and site not in allowed:
            self.found.report(spot, f"uses the cache of site {site!r}; restrict_to_sites allows {sorted(allowed)}")

    def place(self, placed: dict[int, Placement]) -> None:
        """Place what follows calls that are placed."""
        for key in self.found.spots:
            trail: list[int] = []
            step: Leader = key
            while isinstance(step, int) and step not in placed and step not in trail:
                trail.append(step)
                step = self.next[step][0]
            if isinstance(step, int):
                location = placed[step].location if step in placed else Location(self.homesite)
            else:
                location = Location(step)
            for passed in reversed(trail):
                if isinstance(self.found.spots[passed].statement, CacheStatement):
                    location = self._cache(location.site)
                placed[passed] = Placement(location, self.next[passed][1])

    def _cache(self, name: str) -> Location:
        """Return where the cache of a site is: one worker keeps it, so that all workers share it."""
        site = self.candidates.federation.sites.get(name)
        shared = site is not None and (fewest_workers(site.workers) or self.lanes) > 1 and name != self.homesite
        return Location(name, cache=shared)


def best_placement(graph: WorkGraph) -> tuple[Estimate, bool]:
    """Return the best placement that can be found, and whether it is proven to be optimal."""
    if all(len(choice.sites) == 1 for choice in graph.choices):
        return estimate(graph, [0] * len(graph.choices)), True
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
    """Choose a location for every statement. What cannot be placed is added to the structure's problems.

    Gives the locations, and what everything costs, as far as that is known.
    """
    candidates = Candidates(found, federation, restrict_to_sites)
    options: dict[int, list[Option]] = {}
    for key, spot in found.spots.items():
        if isinstance(spot.statement, CallStatement):
            options[key] = candidates.of(spot, spot.statement)
    following = _Following(found, candidates, homesite, lanes, options)
    following.resolve()
    if found.problems:
        return {}, None
    placed: dict[int, Placement] = {}
    account = None
    choosing = any(len(listed) > 1 for listed in options.values())
    if choosing or costs.links_known or _any_cost(options, costs):
        graph = work_graph_of(found, options, following.roots, costs, homesite)
        best, certain = best_placement(graph)
        account = PlacementCosts(graph, best, options, costs, certain)
    for key, listed in options.items():
        statement = found.spots[key].statement
        assert isinstance(statement, CallStatement)  # noqa: S101 - only calls have options
        option = listed[0] if account is None else listed[account.chosen(key)]
        location, why = Location(option.site), _why(statement, listed, account)
        if option.adapter.in_process and option.site != homesite:
            location = Location(option.site, statement.operation)
            why += ", in a process of its own"
        cost = None if account is None else account.cost(key)
        others = () if account is None else account.alternatives(key)
        placed[key] = Placement(location, why, option.adapter.provider, cost, others)
    following.place(placed)
    if account is None:
        return placed, None
    for key, spot in found.spots.items():
        if isinstance(spot.statement, YieldStatement):
            placed[key] = msgspec.structs.replace(placed[key], cost=account.cost(key))
    return placed, account.plan_cost


def _any_cost(options: dict[int, list[Option]], costs: Costs) -> bool:
    return any(costs.known(option.site, option.adapter) for listed in options.values() for option in listed)


def _why(statement: CallStatement, listed: list[Option], account: PlacementCosts | None) -> str:
    if isinstance(statement.site, str) and (len(listed) == 1 or account is None):
        return "fixed by the pipeline"
    if len(listed) == 1 or account is None:
        return "the only site that offers it"
    return account.why(statement.id)
