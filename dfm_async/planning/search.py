"""The placement that is done soonest: labels of time and size, and a search over what is shared.

Work whose output has one reader needs no search: for each of its options it is enough to know how soon its output can
be available, and its size. Faster and smaller is better for everything after it, so what is neither can be
forgotten. Where the graph is a tree, this finds the best placement in one pass.

An output with several readers must come from one place for all of them. So the search goes through its options, the
most promising first, and prunes those that cannot beat the best known placement: no placement with an option is done
sooner than if every reader could choose for itself. It ends when nothing is left, or after a certain number of labels;
it counts them instead of using a clock, so that the same pipeline always has the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias, TypeVar

from dfm_async.planning.work_graph import LARGEST, Dependency, Work, WorkGraph

_EFFORT: Final = 60_000
"""How many labels a search visits, at least."""
_PASSES: Final = 2
"""The same as a multiple of the labels of the first pass, if that is more."""
_LABELS: Final = 48
"""How many labels one option of one piece of work has at most."""
_FEW_LABELS: Final = 4
"""The same, if one pass would take too long otherwise."""
_PASS: Final = 400_000
"""How many labels one pass visits, in addition to the necessary ones."""
_DISTINGUISHED: Final = 10_000
"""Up to how many pieces of shared work it is known what depends on which; that takes memory by their square."""
_MARGIN: Final = 1e-9
"""By which part something must be better to be visited: less is rounding."""


class Label(NamedTuple):
    """One possibility to do some work.

    Attributes:
        end: when it is done.
        size: the bytes of its output.
        effort: the seconds that all its parts take together; decides where the end is the same.
        work: the work.
        option: where it is done.
        parts: how its inputs are made; linked, because there may be thousands.
    """

    end: float
    size: float
    effort: float
    work: int
    option: int
    parts: _Parts


_Parts: TypeAlias = tuple[Label, "_Parts"] | None
_Arrival: TypeAlias = tuple[float, float, float, _Parts]
"""Inputs that are there: when, how many bytes, with which effort, and how they were made."""
_Delivery: TypeAlias = tuple[float, float, float, Label]
"""The same of one input."""
_Candidate = TypeVar("_Candidate", _Arrival, _Delivery)


@dataclass(slots=True)
class SearchResult:
    """A placement: the option of each choice. ``proven``: no other is done sooner."""

    options: list[int]
    total: float
    proven: bool


@dataclass(slots=True)
class _WorkOptions:
    """A piece of shared work whose options are gone through."""

    work: int
    rest: list[Label]
    decided: int
    """How many choices were decided before it."""
    blame: int = 0
    """The earlier branches that what came after it failed because of, as bits."""


class _Search:
    def __init__(self, graph: WorkGraph) -> None:
        self.graph = graph
        self.limit = _LABELS
        self.allowed = _PASS + 2 * sum(len(work.rates) * _sources(graph, work) for work in graph.works)
        self.bounds = _Bounds(graph)
        self.bits = {number: 1 << place for place, number in enumerate(sorted(_shared(graph)))}
        """The bit of each piece of shared work."""
        self.above = _above(graph, self.bits)
        """The shared work that each piece of work depends on, as bits."""
        self.fronts: list[list[Label]] = [[] for _ in graph.works]
        """The labels of each piece of work."""
        self.even = [True] * len(graph.works)
        """Whether they all have the same size."""
        self.decided: dict[int, int] = {}
        """The choices that are decided, in the order in which that was done."""
        self.stack: list[_WorkOptions] = []
        self.best = self.goal = float("inf")
        """The least total that is known, and what has to be beaten."""
        self.options: list[int] = []
        self.looked = 0
        self.dropped = False
        """Whether labels were dropped only because there were too many: then nothing is certain."""

    def run(self) -> SearchResult:
        """Run the search."""
        count = len(self.graph.works)
        effort = 0
        at = 0
        while at >= 0:
            if at < count and self._step(at):
                at += 1
                continue
            # Whatever was decided last, if this does not depend on it, then it would fail again.
            blame = self._finished() if at == count else self.above[at]
            effort = effort or max(_EFFORT, _PASSES * self.looked)
            if self.looked > effort:
                break
            at = self._back(blame)
        return SearchResult(self.options, self.best, at < 0 and not self.dropped)

    def _step(self, at: int) -> bool:
        """Find the labels of one piece of work. False: none of them can beat what is known."""
        work = self.graph.works[at]
        self.limit = _LABELS if self.looked * len(self.fronts) <= self.allowed * (at + 1) else _FEW_LABELS
        known = self.decided.get(work.choice)
        options = range(len(work.rates)) if known is None else (known,)
        bound, goal = self.bounds.of, self.goal
        front: list[Label] = []
        for option in options:
            seconds, per_byte, least, factor = work.rates[option]
            for arrived, given, effort, parts in self._arrivals(work, option):
                taken = seconds + per_byte * given
                end = arrived + taken
                size = min(least + factor * given, LARGEST)
                if end + bound(at, option, size) < goal:
                    front.append(Label(end, size, effort + taken, at, option, parts))
        if not front:
            return False
        self.fronts[at] = front
        if at not in self.bits or len(front) == 1:
            size = front[0].size
            self.even[at] = all(label.size == size for label in front)
            if at in self.bits:
                self.decided.setdefault(work.choice, front[0].option)
        else:
            front.sort(key=lambda x: (-x.end - bound(at, x.option, x.size), -x.effort, -x.option))
            self.stack.append(_WorkOptions(at, front, len(self.decided)))
            self._take(self.stack[-1])
        return True

    def _take(self, branch: _WorkOptions) -> None:
        label = branch.rest.pop()
        # Its effort is the same for all readers from here on: counted once, it does not decide anything.
        self.fronts[branch.work] = [label._replace(effort=0.0)]
        self.even[branch.work] = True
        self.decided.setdefault(self.graph.works[branch.work].choice, label.option)

    def _back(self, blame: int) -> int:
        """Go back to the last branch that is to blame and can do better; return the work after it, or -1."""
        stack = self.stack
        while stack:
            branch = stack[-1]
            while len(self.decided) > branch.decided:
                self.decided.popitem()
            bit = self.bits[branch.work]
            if blame & bit:
                branch.blame |= blame & ~bit
                while branch.rest:
                    label = branch.rest[-1]
                    if label.end + self.bounds.of(label.work, label.option, label.size) < self.goal:
                        self._take(branch)
                        return branch.work + 1
                    branch.rest.pop()
                blame = branch.blame | self.above[branch.work]
            stack.pop()
        return -1

    def _arrivals(self, work: Work, option: int) -> list[_Arrival]:
        """Return when all inputs can have arrived, and how large they are; dominated combinations are dropped."""
        found: list[_Arrival] = [(0.0, work.constant, 0.0, None)]
        for edge in work.inputs:
            deliveries = self._deliveries(work, option, edge)
            self.looked += len(found) * len(deliveries)
            joined: list[_Arrival] = [
                (a if a > b else b, x + y, e + f, (made, parts))
                for a, x, e, parts in found
                for b, y, f, made in deliveries
            ]
            found = joined if len(joined) == 1 else self._front(joined)
        return found

    def _deliveries(self, work: Work, option: int, edge: Dependency) -> list[_Delivery]:
        """Return how one input can be brought to an option."""
        graph = self.graph
        labels = self.fronts[edge.source]
        self.looked += len(labels)
        from_choice = graph.works[edge.source].choice
        share = edge.share
        if from_choice == work.choice:
            staying = [x for x in labels if x.option == option]
            return self._front([(x.end, share * x.size if edge.counts else 0.0, x.effort, x) for x in staying])
        here = graph.choices[work.choice].sites[option]
        sites = graph.choices[from_choice].sites
        links, times = graph.links, edge.times
        if self.even[edge.source]:
            size = share * labels[0].size
            soonest, least, chosen = float("inf"), 0.0, labels[0]
            for label in labels:
                fixed, per_byte = links[sites[label.option]][here]
                sending = times * (fixed + size * per_byte)
                at = label.end + sending
                if at < soonest or (at == soonest and label.effort + sending < least):
                    soonest, least, chosen = at, label.effort + sending, label
            return [(soonest, size if edge.counts else 0.0, least, chosen)]
        deliveries: list[_Delivery] = []
        for label in labels:
            fixed, per_byte = links[sites[label.option]][here]
            size = share * label.size
            sending = times * (fixed + size * per_byte)
            deliveries.append((label.end + sending, size if edge.counts else 0.0, label.effort + sending, label))
        return self._front(deliveries)

    def _front(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Return those that nothing else is both as soon and as small as; if they are too many, some of them."""
        if len(candidates) < 2:
            return candidates
        candidates.sort(key=itemgetter(0, 1, 2))
        kept = [candidates[0]]
        for candidate in candidates:
            if candidate[1] < kept[-1][1]:
                kept.append(candidate)
        if len(kept) > self.limit:
            self.dropped = True
            step = (len(kept) - 1) / (self.limit - 1)
            kept = [kept[round(i * step)] for i in range(self.limit)]
        return kept

    def _finished(self) -> int:
        """Take the best labels of the work without readers, and return what the total depends on."""
        graph = self.graph
        total, blame = -1.0, 0
        last: list[Label] = []
        for number, readers in enumerate(graph.readers):
            if not readers:
                label = min(self.fronts[number], key=lambda found: (found.end, found.effort, found.option))
                last.append(label)
                if label.end > total:
                    total, blame = label.end, self.above[number]
        if total < self.goal:
            self.best, self.goal = total, total * (1 - _MARGIN)
            self.options = self._traced(last)
        return blame

    def _traced(self, labels: list[Label]) -> list[int]:
        """Return the options that labels are made of."""
        options = [0] * len(self.graph.choices)
        seen = set()
        while labels:
            label = labels.pop()
            if label.work not in seen:  # what is shared has one label for all its readers
                seen.add(label.work)
                options[self.graph.works[label.work].choice] = label.option
                parts = label.parts
                while parts is not None:
                    made, parts = parts
                    labels.append(made)
        for choice, option in self.decided.items():
            options[choice] = option
        return options


def _sources(graph: WorkGraph, work: Work) -> int:
    """Return how many options there are for the inputs of some work, taken together."""
    return sum(len(graph.works[edge.source].rates) for edge in work.inputs)


def _above(graph: WorkGraph, bits: dict[int, int]) -> list[int]:
    """Return the shared work that each piece of work depends on, by its inputs or its common choice."""
    if len(bits) > _DISTINGUISHED:
        return [(1 << len(bits)) - 1] * len(graph.works)
    above: list[int] = []
    beside: dict[int, int] = {}
    for number, work in enumerate(graph.works):
        found = beside.get(work.choice, 0)
        for edge in work.inputs:
            found |= above[edge.source] | bits.get(edge.source, 0)
        above.append(found)
        if number in bits:
            beside[work.choice] = found | bits[number]
    return above


class _Bounds:
    """How long it takes at least from the end of each piece of work to the end of all.

    As if every reader could choose for itself, and every output were as small as possible.
    """

    def __init__(self, graph: WorkGraph) -> None:
        self.graph = graph
        works = graph.works
        self.sizes: list[float] = []
        given = []
        for work in works:
            size = work.constant + sum(edge.share * self.sizes[edge.source] for edge in work.inputs if edge.counts)
            given.append(size)
            self.sizes.append(min(LARGEST, *(least + factor * size for _, _, least, factor in work.rates)))
        self.least: list[list[float]] = [[] for _ in works]
        """By work and option, for the smallest output."""
        self.rest: list[list[float]] = [[] for _ in works]
        """The same from when all input is there."""
        for number in range(len(works) - 1, -1, -1):
            size, options = self.sizes[number], range(len(works[number].rates))
            later = self.least[number] = [self._behind(number, option, size) for option in options]
            size = given[number]
            self.rest[number] = [
                seconds + per_byte * size + after
                for (seconds, per_byte, _, _), after in zip(works[number].rates, later, strict=True)
            ]

    def of(self, number: int, option: int, size: float) -> float:
        """Return the bound for an output of a certain size."""
        if size <= self.sizes[number]:
            return self.least[number][option]
        return self._behind(number, option, size)

    def _behind(self, number: int, option: int, size: float) -> float:
        graph, works = self.graph, self.graph.works
        choice = works[number].choice
        row = graph.links[graph.choices[choice].sites[option]]
        more = size - self.sizes[number]
        found = 0.0
        for reader, edge in graph.readers[number]:
            work, after, times = works[reader], self.rest[reader], edge.times
            token = edge.share * size
            extra = edge.share * more if edge.counts else 0.0
            if work.choice == choice:
                bound = after[option] + extra * work.rates[option][1]
            elif extra:
                options = zip(graph.choices[work.choice].sites, after, work.rates, strict=True)
                bound = min([times * (row[to][0] + token * row[to][1]) + a + extra * r[1] for to, a, r in options])
            else:
                there = graph.choices[work.choice].sites
                bound = min([times * (row[to][0] + token * row[to][1]) + a for to, a in zip(there, after, strict=True)])
            if bound > found:
                found = bound
        return found


def _shared(graph: WorkGraph) -> set[int]:
    """Return the work to decide before its readers: it has several, or unconnected work shares its choice."""
    shared = {number for number, readers in enumerate(graph.readers) if len(readers) > 1}
    for choice in graph.choices:
        if len(choice.sites) > 1 and len(choice.works) > 1 and not _together(graph, choice.works):
            shared.add(choice.works[0])
    return shared


def _together(graph: WorkGraph, works: list[int]) -> bool:
    """Return whether pieces of work at one site are linked by values that stay there."""
    groups = {number: number for number in works}

    def root(number: int) -> int:
        while groups[number] != number:
            groups[number] = number = groups[groups[number]]
        return number

    for number in works:
        for edge in graph.works[number].inputs:
            if edge.source in groups:
                groups[root(number)] = root(edge.source)
    return len({root(number) for number in works}) == 1


def search(graph: WorkGraph) -> SearchResult:
    """Find the placement that is done soonest; the best that it comes across, if there are too many."""
    return _Search(graph).run()
