"""Random graphs of work, and the best placement of a small one by trying all."""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import strategies as st

from dfm_async.planning.estimate import estimate
from dfm_async.planning.work_graph import Choice, Dependency, Work, WorkGraph

SHAPES = ("in-tree", "out-tree", "tree", "any")


def exhaustive(graph: WorkGraph) -> float:
    """The least total of all placements."""
    options = [range(len(choice.sites)) for choice in graph.choices]
    return min(estimate(graph, list(picked)).total for picked in itertools.product(*options))


def random_graph(
    random: Random, shape: str, works: int, sites: int, *, sized: bool = True, tied: bool = True
) -> WorkGraph:
    """Makes a graph.

    Args:
        random: where its numbers come from.
        shape: one of ``SHAPES``.
        works: how many pieces of work it has.
        sites: how many sites there are.
        sized: whether the size of an output depends on where it is made.
        tied: whether some work must stand where other work does.
    """
    graph = WorkGraph([f"s{i}" for i in range(sites)])
    graph.links = [
        [(0.0, 0.0) if a == b else (random.randrange(5) / 2, random.choice((0, 0.01, 0.1))) for b in range(sites)]
        for a in range(sites)
    ]
    for number in range(works):
        if tied and graph.choices and random.random() < 0.15:
            choice = random.randrange(len(graph.choices))
        else:
            picked = random.sample(range(sites), random.randint(1, sites))
            graph.choices.append(Choice(sorted(picked)))
            choice = len(graph.choices) - 1
        width = len(graph.choices[choice].sites)
        size, factor = random.randrange(40), random.choice((0.0, 0.5, 1.0, 2.0))
        rates = []
        for _ in range(width):
            if sized and random.random() < 0.3:
                size, factor = random.randrange(40), random.choice((0.0, 0.5, 1.0, 2.0))
            rates.append((random.randrange(20) / 4, random.choice((0.0, 0.05, 0.2)), float(size), factor))
        work = Work(number, choice, rates, constant=float(random.randrange(10)))
        for source in _sources(random, shape, graph, number):
            times = float(random.choice((1, 1, 1, 3)))
            work.inputs.append(Dependency(source, random.choice((1.0, 1.0, 0.5, 0.0)), times, random.random() < 0.8))
        graph.works.append(work)
    return graph.seal()


def _sources(random: Random, shape: str, graph: WorkGraph, number: int) -> list[int]:
    if number == 0:
        return []
    used = {edge.source for work in graph.works for edge in work.inputs}
    free = [source for source in range(number) if source not in used]
    if shape == "in-tree":
        return random.sample(free, random.randint(0, len(free)))
    if shape == "out-tree":
        return [random.randrange(number)]
    if shape == "tree":
        picked: list[int] = []
        parts = _parts(graph)
        for source in random.sample(range(number), number):
            if len(picked) < 3 and random.random() < 0.5 and parts[source] not in [parts[p] for p in picked]:
                picked.append(source)
        return picked
    return random.sample(range(number), min(number, random.randint(0, 3)))


def _parts(graph: WorkGraph) -> list[int]:
    """Which pieces of work are linked, whatever the direction: the least number of each part."""
    parts = list(range(len(graph.works)))
    for number, work in enumerate(graph.works):
        for edge in work.inputs:
            a, b = parts[number], parts[edge.source]
            parts = [min(a, b) if part in (a, b) else part for part in parts]
    return parts


@st.composite
def graphs(draw: st.DrawFn, shape: str, *, tied: bool = True) -> WorkGraph:
    """Graphs of up to six pieces of work over up to three sites."""
    random = Random(draw(st.integers(0, 2**32)))
    return random_graph(random, shape, draw(st.integers(1, 6)), draw(st.integers(1, 3)), tied=tied)
