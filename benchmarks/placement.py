"""Placements are as good as can be, on graphs small enough to try everything; and never worse than the greedy rule.

Random graphs of work over three sites, in four shapes: trees whose values flow together, trees that branch out, trees
of both kinds, and graphs of any shape. Small ones (seven pieces of work) are compared with the best of all placements,
larger ones (100) with what the greedy rule of DFM finds: the most expensive leaf first, the cheapest of its replicas,
and backwards from there. That rule is our own reimplementation; both placements are judged by the same estimate, in
which branches overlap. Claimed: on average at most 1.001 times the time of the best placement; and on no graph more
than that of the greedy rule.
"""

from __future__ import annotations

import statistics
from random import Random
from time import process_time

from benchmarks.common import Figure, Options, Target, main
from dfm_async.planning.estimate import estimate
from dfm_async.planning.heuristics import greedy
from dfm_async.planning.placement import best_placement
from dfm_async.planning.work_graph import WorkGraph
from tests.planning.graphs import SHAPES, exhaustive, random_graph

SMALL, LARGE = 7, 100


def _best(graph: WorkGraph) -> float:
    return best_placement(graph)[0].total


def _greedy(graph: WorkGraph) -> float:
    return estimate(graph, greedy(graph)).total


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _small(shape: str, count: int) -> list[Figure]:
    graphs = [random_graph(Random(seed), shape, SMALL, 3, tied=shape == "any") for seed in range(count)]
    least = [exhaustive(graph) for graph in graphs]
    ours = statistics.fmean(_ratio(_best(graph), best) for graph, best in zip(graphs, least, strict=True))
    rule = statistics.fmean(_ratio(_greedy(graph), best) for graph, best in zip(graphs, least, strict=True))
    name = f"{shape}, {SMALL} pieces, {count} graphs, mean by the best of all"
    return [Figure(name, "times", ours, {"greedy": rule}, Target(1.001))]


def _large(shape: str, count: int) -> list[Figure]:
    ratios, certain = [], 0
    for seed in range(count):
        graph = random_graph(Random(seed), shape, LARGE, 3, tied=shape == "any")
        found, sure = best_placement(graph)
        certain += sure
        ratios.append(_ratio(found.total, _greedy(graph)))
    name = f"{shape}, {LARGE} pieces, {count} graphs"
    return [
        Figure(f"{name}, mean by greedy", "times", statistics.fmean(ratios)),
        Figure(f"{name}, worst by greedy", "times", max(ratios), {}, Target(1.0)),
        Figure(f"{name}, certainly the best", "%", 100 * certain / count),
    ]


def _time(works: int, sites: int) -> Figure:
    graph = random_graph(Random(1), "any", works, sites)
    start = process_time()
    best_placement(graph)
    limit = 0.5 if works <= 1000 else 5.0
    return Figure(f"any, {works:,} pieces over {sites} sites", "CPU s", process_time() - start, {}, Target(limit))


async def run(options: Options) -> list[Figure]:
    small, large = options.size(100), options.size(20)
    figures = [figure for shape in SHAPES for figure in (*_small(shape, small), *_large(shape, large))]
    return [*figures, _time(1000, 10), _time(10_000, 10)]


if __name__ == "__main__":
    main("placement", __doc__, run)
