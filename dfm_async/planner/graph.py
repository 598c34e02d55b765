"""A pipeline as a graph of work: what depends on what, how much has to be sent, and what can be chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dfm_async.federation.operation import Adapter
from dfm_async.model.policies import Cost
from dfm_async.model.resources import SendCost
from dfm_async.pipeline.expressions import Constant, Entries, Expression, Items, Parameter, Ref, references, walk
from dfm_async.pipeline.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    YieldStatement,
)
from dfm_async.planner.costs import ELEMENTS, PARAMETER_BYTES, Costs, bytes_of
from dfm_async.planner.structure import Spot, Structure, outer_nodes

__all__ = ["LARGEST", "Choice", "Edge", "Graph", "Leader", "Option", "Work", "graph_of"]

Leader: TypeAlias = int | str
"""What decides where a statement stands: a call, by its id; or a site, by its name."""

Rates: TypeAlias = tuple[float, float, float, float]
"""Seconds, seconds per byte of input, bytes, bytes per byte of input."""

LARGEST: Final = 1e15
"""The most bytes or seconds that one thing is reckoned with, so that sums of products stay numbers."""
_MOST_RUNS: Final = 10**9
_NOTHING: Rates = (0.0, 0.0, 0.0, 1.0)
_SEEN_ONLY = frozenset({"until", "cond", "key", "times"})
"""Expressions that are no part of the value that a statement has."""


@dataclass(slots=True, frozen=True)
class Option:
    """Where a call can run."""

    site: str
    adapter: Adapter

    @property
    def name(self) -> str:
        """The site, and the provider if there is one."""
        provider = self.adapter.provider
        return self.site if provider is None else f"{self.site}/{provider}"


@dataclass(slots=True)
class Choice:
    """Something to be decided: the site of some pieces of work, which stay together."""

    sites: list[int]
    """The site of each option, by its number."""
    works: list[int] = field(default_factory=list)
    """The work that stands there."""


@dataclass(slots=True)
class Edge:
    """A value that one piece of work needs of another.

    Attributes:
        source: the work that makes it, by its number.
        share: how much of the source's output one token has.
        times: how many tokens are sent, one after the other.
        counts: whether it is a part of the reader's input, or only waited for.
    """

    source: int
    share: float
    times: float
    counts: bool


@dataclass(slots=True)
class Work:
    """One piece of work.

    Attributes:
        key: the statement; None for a parameter.
        choice: what decides where it stands, by its number.
        rates: what it costs, by option.
        inputs: what it needs.
        constant: bytes of input that are in the plan itself.
    """

    key: int | None
    choice: int
    rates: list[Rates]
    inputs: list[Edge] = field(default_factory=list)
    constant: float = 0.0


@dataclass(slots=True)
class Graph:
    """All work of a pipeline, in an order in which it can be done, and what can be chosen."""

    sites: list[str]
    works: list[Work] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    """The choice of each call."""
    links: list[list[tuple[float, float]]] = field(default_factory=list)
    """What sending costs from one site to another: seconds, and seconds per byte."""
    readers: list[list[tuple[int, Edge]]] = field(default_factory=list)
    """Who needs the output of each piece of work."""

    def seal(self) -> Graph:
        """Fills in what follows from the rest."""
        self.readers = [[] for _ in self.works]
        for number, work in enumerate(self.works):
            self.choices[work.choice].works.append(number)
            for edge in work.inputs:
                self.readers[edge.source].append((number, edge))
        return self


def link_rates(cost: SendCost) -> tuple[float, float]:
    """What sending costs: seconds, and seconds per byte."""
    per_byte = 0.0 if cost.bandwidth is None else min(1.0 / cost.bandwidth, LARGEST)
    return min(cost.fixed_time, LARGEST), per_byte


def work_rates(cost: Cost, times: float) -> Rates:
    """What so many runs cost, one after the other. Sizes are those of one."""
    per_byte = 0.0 if cost.throughput is None else min(times / cost.throughput, LARGEST)
    seconds = min(times * cost.fixed_time, LARGEST)
    return seconds, per_byte, min(cost.fixed_size, LARGEST), min(cost.output_factor, LARGEST)


class _GraphBuilder:
    def __init__(
        self,
        found: Structure,
        options: Mapping[int, list[Option]],
        leaders: Mapping[int, Leader],
        costs: Costs,
        homesite: str,
    ) -> None:
        self.found = found
        self.options = options
        self.leaders = leaders
        self.costs = costs
        self.homesite = homesite
        names = [homesite, *(option.site for listed in options.values() for option in listed)]
        names += [leader for leader in leaders.values() if isinstance(leader, str)]
        self.site = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.graph = Graph(list(self.site))
        self.fixed: dict[str, int] = {}
        self.params: dict[str, int] = {}
        self.entries: dict[int, int] = {}
        """The work that begins a block: the loop's element, the lookup in the cache, the condition."""
        self.values: dict[int, int] = {}
        """The work that makes the value of a statement."""
        self.runs = [1.0] + [0.0] * len(found.loops)
        """How often each scope runs, in all."""
        self.counts: dict[int, float] = {}

    def build(self) -> Graph:
        graph = self.graph
        graph.links = [
            [link_rates(self.costs.link(source, target)) for target in graph.sites] for source in graph.sites
        ]
        for key, listed in self.options.items():
            graph.calls[key] = self._choice([self.site[option.site] for option in listed])
        open_blocks: list[Spot] = []
        for spot in self.found.spots.values():
            around = {key for key, _ in spot.path}
            while open_blocks and open_blocks[-1].statement.id not in around:
                self._close(open_blocks.pop())
            self._open(spot)
            if isinstance(spot.statement, (RepeatStatement, CacheStatement)):
                open_blocks.append(spot)
        while open_blocks:
            self._close(open_blocks.pop())
        return graph.seal()

    def _choice(self, sites: list[int]) -> int:
        self.graph.choices.append(Choice(sites))
        return len(self.graph.choices) - 1

    def _choice_of(self, leader: Leader) -> int:
        if isinstance(leader, int):
            return self.graph.calls[leader]
        if leader not in self.fixed:
            self.fixed[leader] = self._choice([self.site[leader]])
        return self.fixed[leader]

    def _add(self, work: Work) -> int:
        self.graph.works.append(work)
        return len(self.graph.works) - 1

    def _param(self, name: str) -> int:
        if name not in self.params:
            rates = (0.0, 0.0, PARAMETER_BYTES, 0.0)
            self.params[name] = self._add(Work(None, self._choice_of(self.homesite), [rates]))
        return self.params[name]

    # statements

    def _open(self, spot: Spot) -> None:
        statement = spot.statement
        key = statement.id
        outer = self.runs[spot.scope]
        choice = self._choice_of(self.leaders[key])
        width = len(self.graph.choices[choice].sites)
        outside = [(name, part) for name, part, inside in spot.expressions if not inside]
        match statement:
            case CallStatement():
                rates = [
                    work_rates(self.costs.work(option.site, option.adapter), outer) for option in self.options[key]
                ]
                self.values[key] = self._work(spot, choice, rates, outside)
            case YieldStatement():
                home = self.site[self.homesite]
                links = (self.graph.links[site][home] for site in self.graph.choices[choice].sites)
                rates = [(outer * fixed, outer * per_byte, 0.0, 1.0) for fixed, per_byte in links]
                self.values[key] = self._work(spot, choice, rates, outside)
            case ForEachStatement() | RepeatStatement():
                # the value is made once per run of the scope around it; its elements are passed on one by one
                self.entries[key] = self.values[key] = self._work(spot, choice, [_NOTHING] * width, outside)
                count = float(min(_count(statement), _MOST_RUNS))
                self.counts[key] = max(count, 1.0)
                self.runs[self.found.scope_of_loop(key)] = min(outer * count, float(_MOST_RUNS))
            case IfStatement() | CacheStatement():
                self.entries[key] = self.values[key] = self._work(spot, choice, [_NOTHING] * width, outside)
            case CollectStatement():
                target = self.found.spots[statement.node]
                scope = target.scope
                if isinstance(target.statement, ForEachStatement):
                    scope = self.found.scope_of_loop(statement.node)
                count = self.counts[self.found.loops[scope - 1]]
                source = self.values[statement.node]
                share = 1.0 if isinstance(target.statement, ForEachStatement) else count
                edge = Edge(source, share, self.runs[scope], True)
                self.values[key] = self._add(Work(key, choice, [_NOTHING] * width, [edge]))

    def _close(self, spot: Spot) -> None:
        """Adds the end of a block that makes a value: the last iteration, or what is stored."""
        key = spot.statement.id
        choice = self._choice_of(self.leaders[key])
        width = len(self.graph.choices[choice].sites)
        inside = [(name, part) for name, part, inner in spot.expressions if inner]
        self.values[key] = self._work(spot, choice, [_NOTHING] * width, inside, inside=True)

    def _work(
        self,
        spot: Spot,
        choice: int,
        rates: list[Rates],
        expressions: list[tuple[str, Expression]],
        *,
        inside: bool = False,
    ) -> int:
        work = Work(spot.statement.id, choice, rates)
        for _, expression in expressions:
            for part in (expression,) if isinstance(expression, Constant) else _constants(expression):
                work.constant += bytes_of(part.value)
        used: dict[int, Edge] = {}
        for name, expression in expressions:
            for ref in references(expression):
                edge = self._edge(ref, spot, inside)
                if edge is not None and edge.source not in used:
                    edge.counts = name not in _SEEN_ONLY
                    used[edge.source] = edge
        statement = spot.statement
        waits: Iterable[int] = getattr(statement, "after", ())
        if isinstance(statement, CacheStatement) and not inside:
            waits = outer_nodes(statement)  # what its body needs is brought to it first
        for node in waits:
            edge = self._edge(Ref(node=node), spot, False)
            if edge is not None and edge.source not in used:
                edge.counts = False
                used[edge.source] = edge
        gate = None if inside else self._gate(spot, used)
        if gate is not None:
            used.setdefault(gate.source, gate)
        work.inputs = list(used.values())
        return self._add(work)

    def _edge(self, ref: Ref | Parameter, spot: Spot, inside: bool) -> Edge | None:
        if isinstance(ref, Parameter):
            return Edge(self._param(ref.name), 1.0, 1.0, True)
        target = self.found.spots.get(ref.node)
        if target is None or ref.node not in self.values:
            return None  # a problem is reported already
        statement = target.statement
        if isinstance(statement, (ForEachStatement, RepeatStatement)):
            around = any(block[0] == ref.node for block in spot.path) or (inside and statement is spot.statement)
            if around:
                share = 1.0 / self.counts[ref.node] if isinstance(statement, ForEachStatement) else 1.0
                return Edge(self.entries[ref.node], share, self.runs[self.found.scope_of_loop(ref.node)], True)
        return Edge(self.values[ref.node], 1.0, self.runs[target.scope], True)

    def _gate(self, spot: Spot, used: dict[int, Edge]) -> Edge | None:
        """What a statement of a block waits for, if nothing of the same block is among what it needs."""
        if not spot.path:
            return None
        outer, block = spot.path[-1]
        if outer not in self.entries:
            return None
        entry = self.entries[outer]
        for number in used:
            key = self.graph.works[number].key
            if number == entry or (key is not None and (outer, block) in self.found.spots[key].path):
                return None
        return Edge(entry, 0.0, self.runs[spot.scope], False)


def _constants(expression: Expression) -> Iterator[Constant]:
    return (part for part in walk(expression) if isinstance(part, Constant))


def _count(statement: ForEachStatement | RepeatStatement) -> int:
    """How often a body runs, as far as the pipeline says."""
    match statement:
        case ForEachStatement(seq=Items(items=items)):
            return len(items)
        case ForEachStatement(seq=Entries(entries=entries)):
            return len(entries)
        case ForEachStatement(seq=Constant(value=value)) if hasattr(value, "__len__"):
            return len(value)
        case RepeatStatement(times=Constant(value=int() as times)):
            return max(times, 0)
    return ELEMENTS


def graph_of(
    found: Structure,
    options: Mapping[int, list[Option]],
    leaders: Mapping[int, Leader],
    costs: Costs,
    homesite: str,
) -> Graph:
    """Makes the graph of a checked pipeline.

    Args:
        found: the pipeline.
        options: where each call can run.
        leaders: what decides where each statement stands.
        costs: what everything costs.
        homesite: where parameters come from and results go to.
    """
    return _GraphBuilder(found, options, leaders, costs, homesite).build()
