"""A pipeline as a graph of work: what depends on what, how much has to be sent, and what can be chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dfm_async.federation.operation import Adapter
from dfm_async.language import expressions as ex
from dfm_async.language import statements as st
from dfm_async.model.policies import Cost
from dfm_async.model.resources import SendCost
from dfm_async.planning.profile import ELEMENTS, PARAMETER_BYTES, Costs, bytes_of
from dfm_async.planning.structure import Spot, Structure, outer_nodes

Leader: TypeAlias = int | str
"""What decides the site of a statement: a call, by its id, or a site, by its name."""

Rates: TypeAlias = tuple[float, float, float, float]
"""Seconds, seconds per byte of input, bytes, bytes per byte of input."""

LARGEST: Final = 1e15
"""The most bytes or seconds of one item, so that sums of products stay finite."""
_MOST_RUNS: Final = 10**9
_NOTHING: Rates = (0.0, 0.0, 0.0, 1.0)
_SEEN_ONLY = frozenset({"until", "cond", "key", "times"})
"""Expressions that are not part of the value of a statement."""


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
    """The work whose site it decides."""


@dataclass(slots=True)
class Dependency:
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
        choice: what decides its site, by its number.
        rates: what it costs, by option.
        inputs: what it needs.
        constant: bytes of input that are in the plan itself.
    """

    key: int | None
    choice: int
    rates: list[Rates]
    inputs: list[Dependency] = field(default_factory=list)
    constant: float = 0.0


@dataclass(slots=True)
class WorkGraph:
    """All work of a pipeline, in an order in which it can be done, and what can be chosen."""

    sites: list[str]
    works: list[Work] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    """The choice of each call."""
    links: list[list[tuple[float, float]]] = field(default_factory=list)
    """What sending costs from one site to another: seconds, and seconds per byte."""
    readers: list[list[tuple[int, Dependency]]] = field(default_factory=list)
    """Who needs the output of each piece of work."""

    def seal(self) -> WorkGraph:
        """Fill in what follows from the rest."""
        self.readers = [[] for _ in self.works]
        for number, work in enumerate(self.works):
            self.choices[work.choice].works.append(number)
            for edge in work.inputs:
                self.readers[edge.source].append((number, edge))
        return self


def link_rates(cost: SendCost) -> tuple[float, float]:
    """Return what sending costs: seconds, and seconds per byte."""
    per_byte = 0.0 if cost.bandwidth is None else min(1.0 / cost.bandwidth, LARGEST)
    return min(cost.fixed_time, LARGEST), per_byte


def work_rates(cost: Cost, times: float) -> Rates:
    """Return what a number of runs cost, one after the other. Sizes are those of one run."""
    per_byte = 0.0 if cost.throughput is None else min(times / cost.throughput, LARGEST)
    seconds = min(times * cost.fixed_time, LARGEST)
    return seconds, per_byte, min(cost.fixed_size, LARGEST), min(cost.output_factor, LARGEST)


class _GraphBuilder(st.DefaultVisitor[Spot, None]):
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
        self.graph = WorkGraph(list(self.site))
        self.fixed: dict[str, int] = {}
        self.params: dict[str, int] = {}
        self.entries: dict[int, int] = {}
        """The work that begins a block: the loop's element, the lookup in the cache, the condition."""
        self.values: dict[int, int] = {}
        """The work that makes the value of a statement."""
        self.runs = [1.0] + [0.0] * len(found.loops)
        """How often each scope runs, in all."""
        self.counts: dict[int, float] = {}

    def build(self) -> WorkGraph:
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
            self.visit(spot.statement, spot)
            if spot.statement.result:
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

    def visit_call(self, statement: st.CallStatement, context: Spot) -> None:
        runs = self.runs[context.scope]
        rates = [work_rates(self.costs.work(o.site, o.adapter), runs) for o in self.options[statement.id]]
        self.values[statement.id] = self._work(context, rates)

    def visit_yield(self, statement: st.YieldStatement, context: Spot) -> None:
        runs, home = self.runs[context.scope], self.site[self.homesite]
        links = (self.graph.links[site][home] for site in self._choice_at(context).sites)
        rates = [(runs * fixed, runs * per_byte, 0.0, 1.0) for fixed, per_byte in links]
        self.values[statement.id] = self._work(context, rates)

    def visit_other(self, statement: st.Statement, context: Spot) -> None:
        self.entries[statement.id] = self.values[statement.id] = self._work(context)

    def visit_for_each(self, statement: st.ForEachStatement | st.RepeatStatement, context: Spot) -> None:
        # The value is made once per run of the scope around it; its elements are passed on one by one.
        self.entries[statement.id] = self.values[statement.id] = self._work(context)
        count = float(min(_count(statement), _MOST_RUNS))
        self.counts[statement.id] = max(count, 1.0)
        runs = min(self.runs[context.scope] * count, float(_MOST_RUNS))
        self.runs[self.found.scope_of_loop(statement.id)] = runs

    visit_repeat = visit_for_each

    def visit_collect(self, statement: st.CollectStatement, context: Spot) -> None:
        scope = self.found.scope_of_value(statement.node)
        element = isinstance(self.found.spots[statement.node].statement, st.ForEachStatement)
        share = 1.0 if element else self.counts[self.found.loops[scope - 1]]
        edge = Dependency(self.values[statement.node], share, self.runs[scope], True)
        choice = self._choice_of(self.leaders[statement.id])
        rates = [_NOTHING] * len(self._choice_at(context).sites)
        self.values[statement.id] = self._add(Work(statement.id, choice, rates, [edge]))

    def _close(self, spot: Spot) -> None:
        """Add the end of a block that makes a value: the last iteration, or what is stored."""
        self.values[spot.statement.id] = self._work(spot, inside=True)

    def _choice_at(self, spot: Spot) -> Choice:
        return self.graph.choices[self._choice_of(self.leaders[spot.statement.id])]

    def _work(self, spot: Spot, rates: list[Rates] | None = None, *, inside: bool = False) -> int:
        """Add the work of a statement, with the expressions that are read before its block or ``inside`` it."""
        statement = spot.statement
        choice = self._choice_of(self.leaders[statement.id])
        work = Work(statement.id, choice, rates or [_NOTHING] * len(self.graph.choices[choice].sites))
        expressions = [(name, part) for name, part, inner in spot.expressions if inner == inside]
        for _, expression in expressions:
            for part in (expression,) if isinstance(expression, ex.Constant) else _constants(expression):
                work.constant += bytes_of(part.value)
        used: dict[int, Dependency] = {}
        for name, expression in expressions:
            for ref in ex.references(expression):
                edge = self._edge(ref, spot, inside)
                if edge is not None and edge.source not in used:
                    edge.counts = name not in _SEEN_ONLY
                    used[edge.source] = edge
        waits: Iterable[int] = statement.after
        if isinstance(statement, st.CacheStatement) and not inside:
            waits = outer_nodes(statement)  # what its body needs is brought to it first
        for node in waits:
            edge = self._edge(ex.Ref(node=node), spot, False)
            if edge is not None and edge.source not in used:
                edge.counts = False
                used[edge.source] = edge
        gate = None if inside else self._gate(spot, used)
        if gate is not None:
            used.setdefault(gate.source, gate)
        work.inputs = list(used.values())
        return self._add(work)

    def _edge(self, ref: ex.Ref | ex.Parameter, spot: Spot, inside: bool) -> Dependency | None:
        if isinstance(ref, ex.Parameter):
            return Dependency(self._param(ref.name), 1.0, 1.0, True)
        target = self.found.spots.get(ref.node)
        if target is None or ref.node not in self.values:
            return None  # a problem is reported already
        if self.found.reads_iteration(spot, ref.node, inside):
            share = 1.0 / self.counts[ref.node] if isinstance(target.statement, st.ForEachStatement) else 1.0
            return Dependency(self.entries[ref.node], share, self.runs[self.found.scope_of_loop(ref.node)], True)
        return Dependency(self.values[ref.node], 1.0, self.runs[target.scope], True)

    def _gate(self, spot: Spot, used: dict[int, Dependency]) -> Dependency | None:
        """Return what a statement of a block waits for, if nothing of the same block is among what it needs."""
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
        return Dependency(entry, 0.0, self.runs[spot.scope], False)


def _constants(expression: ex.Expression) -> Iterator[ex.Constant]:
    return (part for part in ex.walk(expression) if isinstance(part, ex.Constant))


def _count(statement: st.ForEachStatement | st.RepeatStatement) -> int:
    """Return how often a body runs, if the pipeline states it, or else an assumption."""
    match statement:
        case st.ForEachStatement(seq=ex.Items(items=items)):
            return len(items)
        case st.ForEachStatement(seq=ex.Entries(entries=entries)):
            return len(entries)
        case st.ForEachStatement(seq=ex.Constant(value=value)) if hasattr(value, "__len__"):
            return len(value)
        case st.RepeatStatement(times=ex.Constant(value=int() as times)):
            return max(times, 0)
    return ELEMENTS


def work_graph_of(
    found: Structure,
    options: Mapping[int, list[Option]],
    leaders: Mapping[int, Leader],
    costs: Costs,
    homesite: str,
) -> WorkGraph:
    """Make the graph of a checked pipeline. ``leaders``: what decides the site of each statement."""
    return _GraphBuilder(found, options, leaders, costs, homesite).build()
