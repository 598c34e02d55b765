"""How good placements are: against trying all of them, and against the greedy rule."""

from __future__ import annotations

from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async.planning.estimate import changed, estimate
from dfm_async.planning.heuristics import greedy
from dfm_async.planning.placement import best_placement
from dfm_async.planning.search import search
from dfm_async.planning.work_graph import Choice, Dependency, Work, WorkGraph
from tests.planning.graphs import SHAPES, exhaustive, graphs, random_graph


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_placement_of_a_small_graph_is_done_sooner(shape: str, data: st.DataObject) -> None:
    graph = data.draw(graphs(shape))
    found, certain = best_placement(graph)
    assert certain
    assert found.total == pytest.approx(exhaustive(graph))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_search_promises_is_what_the_placement_costs(shape: str) -> None:
    for seed in range(20):
        graph = random_graph(Random(seed), shape, 20, 4)
        found = search(graph)
        assert estimate(graph, found.options).total == pytest.approx(found.total)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_placement_of_a_larger_graph_is_never_worse_than_the_greedy_rule(shape: str, seed: int) -> None:
    graph = random_graph(Random(seed), shape, 60, 4)
    found, _ = best_placement(graph)
    assert found.total <= estimate(graph, greedy(graph)).total


@pytest.mark.parametrize("seed", range(3))
def test_the_placement_of_a_large_tree_is_certain_in_one_pass(seed: int) -> None:
    for shape in ("in-tree", "out-tree"):
        graph = random_graph(Random(seed), shape, 300, 4, sized=False, tied=False)
        _, certain = best_placement(graph)
        assert certain, shape


def test_a_placement_is_not_proven_if_labels_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [random_graph(Random(seed), "in-tree", 60, 6, tied=False) for seed in range(30)]
    certain = [best_placement(tree)[1] for tree in trees]
    monkeypatch.setattr("dfm_async.planning.search._LABELS", 4)
    dropping = [best_placement(tree) for tree in trees]
    assert sum(claim for _, claim in dropping) < sum(certain)
    for tree, (found, _) in zip(trees, dropping, strict=True):
        assert found.total <= estimate(tree, greedy(tree)).total


def test_the_greedy_rule_is_not_always_right() -> None:
    """Else the comparison would prove nothing."""
    worse = 0
    for seed in range(40):
        graph = random_graph(Random(seed), "any", 6, 3)
        worse += estimate(graph, greedy(graph)).total > exhaustive(graph) * 1.001
    assert worse > 5


@settings(max_examples=100, deadline=None)
@given(graphs("any"))
def test_the_estimate_of_one_change_is_that_of_the_whole(graph: WorkGraph) -> None:
    base, _ = best_placement(graph)
    for number, choice in enumerate(graph.choices):
        for option in range(len(choice.sites)):
            quick = changed(graph, base, number, option)
            options = list(base.options)
            options[number] = option
            whole = estimate(graph, options).total
            assert quick is None or quick == pytest.approx(whole)


@settings(max_examples=50, deadline=None)
@given(graphs("any"))
def test_the_same_graph_has_the_same_placement(graph: WorkGraph) -> None:
    assert best_placement(graph)[0].options == best_placement(graph)[0].options


def test_a_graph_of_a_thousand_nodes_is_placed_in_well_under_a_second() -> None:
    graph = random_graph(Random(1), "any", 1000, 10)
    start = process_time()
    best_placement(graph)
    assert process_time() - start < 2  # a machine for tests may be slow


def test_many_sites_that_make_values_of_different_sizes_are_compared_soon() -> None:
    random, sites = Random(1), 10
    graph = WorkGraph([f"s{i}" for i in range(sites)])
    graph.links = [[(float(a != b), 1e-6 * (a != b)) for b in range(sites)] for a in range(sites)]
    for number in range(1000):
        graph.choices.append(Choice(list(range(sites))))
        rates = [(random.random(), 1e-6, 1000.0, 0.5 + random.random()) for _ in range(sites)]
        graph.works.append(Work(number, number, rates, [Dependency(number - 1, 1.0, 1.0, True)] if number else []))
    start = process_time()
    best_placement(graph.seal())
    assert process_time() - start < 4  # a machine for tests may be slow
