"""Pipelines and plans as drawings: everything is there, nothing covers anything else."""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import Federation, ForEach, If, Pipeline, PipelineError, PlaceParam, Repeat, TryFromCache, Yield, collect
from dfm_async.drawing import Graph, Node, graph_of, svg
from dfm_async.drawing.boxes import LineEnd
from dfm_async.drawing.layout import Layout, Rect, lay_out
from dfm_async.language.statements import CallStatement
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import prepare
from tests.property.random_pipelines import fed as random_federation
from tests.property.random_pipelines import pipelines
from tests.support.processes import printed_with_hash_seeds

fed = Federation("weather")
archive = fed.site("archive")
lab = fed.site("lab")


@archive.operation
def load(day: Any = None, more: Any = None) -> Any: ...


@lab.operation
def anomaly(value: Any, base: Any = None) -> Any: ...


def every_statement() -> Pipeline:
    with Pipeline("every statement") as pipeline:
        days = load(PlaceParam("month"))
        with ForEach(days) as day:
            with TryFromCache(key=day) as cached:
                cached.store(anomaly(day))
            with If((cached > 35) | (day == 0)) as hot:
                Yield(cached, place="alert")
            with hot.otherwise():
                Yield(day, place="calm")
        every = collect(cached)
        with Repeat(1.0, times=5) as current:
            following = anomaly(current)
            current.next(following)
        Yield([current, every], place="last")
        load(after=every)
    return pipeline


def size(end: LineEnd) -> tuple[float, float]:
    return (22.0, 12.0) if end.part == "foot" else (80.0, 40.0)


def overlap(a: Rect, b: Rect) -> bool:
    return a.x < b.x + b.width and b.x < a.x + a.width and a.y < b.bottom and b.y < a.bottom


def inside(a: Rect, b: Rect) -> bool:
    return b.x <= a.x and b.y <= a.y and a.x + a.width <= b.x + b.width and a.bottom <= b.bottom


def enclosing(end: LineEnd, nodes: dict[str, Node], frames: Container[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The frames that something must stand in."""
    node = nodes[end.node]
    if end.part != "node":
        yield node.id, ""
    while node.block is not None:
        yield node.block, ""
        word = ("then", "otherwise")[node.branch]
        if (node.block, word) in frames:
            yield node.block, word
        node = nodes[node.block]


def check(graph: Graph) -> None:
    layout = lay_out(graph, size)
    assert {end.node for end in layout.ends} == {node.id for node in graph.nodes}
    for (_, a), (_, b) in combinations(layout.ends.items(), 2):
        assert not overlap(a, b)
    nodes = {node.id: node for node in graph.nodes}
    frames = {(box.node.id, box.word): rect for box, rect in layout.frames if box.node is not None}
    for end, rect in layout.ends.items():
        assert inside(rect, Rect(0, 0, layout.width, layout.height))
        around = set(enclosing(end, nodes, frames))
        for key, frame in frames.items():
            assert inside(rect, frame) if key in around else not overlap(rect, frame), (end, key)
    assert_lines_keep_clear(layout)
    drawn = [line.edge for line, _ in layout.lines if line.edge is not None]
    assert drawn == list(graph.edges)


def assert_lines_keep_clear(layout: Layout) -> None:
    for line, runs in layout.lines:
        start, end = layout.ends[line.start], layout.ends[line.end]
        assert (runs[0].x, runs[0].top) == pytest.approx((start.middle, start.bottom))
        if line.edge is not None:
            assert (runs[-1].x, runs[-1].bottom) == pytest.approx((end.middle, end.y), abs=0.01)
        shapes = [Rect(run.x, run.top, 0.01, run.bottom - run.top) for run in runs]
        for a, b in pairwise(runs):  # a curve stays within the rectangle between its ends
            assert a.bottom <= b.top + 0.01
            shapes.append(Rect(min(a.x, b.x), a.bottom, abs(a.x - b.x), b.top - a.bottom))
        for rect in layout.ends.values():
            slim = Rect(rect.x + 0.1, rect.y + 0.1, rect.width - 0.2, rect.height - 0.2)
            assert not any(overlap(shape, slim) for shape in shapes)


def elements(text: str, kind: str) -> Iterator[ElementTree.Element]:
    for element in ElementTree.fromstring(text).iter():
        if kind in element.get("class", "").split():
            yield element


def attributes(text: str, kind: str, *names: str) -> list[tuple[str | None, ...]]:
    return [tuple(element.get(name) for name in names) for element in elements(text, kind)]


@given(pipeline=pipelines())
def test_nothing_covers_anything_else_and_lines_keep_clear_of_nodes(pipeline: Pipeline) -> None:
    check(graph_of(pipeline))


@given(pipeline=pipelines())
def test_a_drawing_is_well_formed_and_has_every_node_and_edge(pipeline: Pipeline) -> None:
    try:
        found: Plan | Pipeline = prepare(pipeline, random_federation, "app")
    except PipelineError:  # the maker collects what it finds; a drawing is there all the same
        found = pipeline
    graph = graph_of(found)
    text = svg(graph)
    nodes = attributes(text, "node", "data-node", "data-site")
    assert sorted(nodes) == sorted((node.id, node.site) for node in graph.nodes)
    assert attributes(text, "edge", "data-from", "data-to") == [(edge.source, edge.target) for edge in graph.edges]
    assert svg(graph_of(found)) == text


def test_a_graph_has_the_labels_of_events_kinds_blocks_and_roles() -> None:
    graph = graph_of(prepare(every_statement(), fed, "app"))
    assert [(node.id, node.kind, node.text, node.site, node.block, node.branch) for node in graph.nodes] == [
        ("PlaceParam('month')", "parameter", "month", "", None, 0),
        ("load#0", "call", "load", "archive", None, 0),
        ("ForEach#1", "for_each", "ForEach", "archive", None, 0),
        ("TryFromCache#2", "try_from_cache", "TryFromCache", "lab", "ForEach#1", 0),
        ("anomaly#3", "call", "anomaly", "lab", "TryFromCache#2", 0),
        ("If#4", "if", "(TryFromCache#2 > 35) | (ForEach#1 == 0)", "lab", "ForEach#1", 0),
        ("Yield#5", "yield", "alert", "lab", "If#4", 0),
        ("Yield#6", "yield", "calm", "archive", "If#4", 1),
        ("collect#7", "collect", "collect", "lab", None, 0),
        ("Repeat#8", "repeat", "Repeat", "lab", None, 0),
        ("anomaly#9", "call", "anomaly", "lab", "Repeat#8", 0),
        ("Yield#10", "yield", "last", "lab", None, 0),
        ("load#11", "call", "load", "archive", None, 0),
    ]
    roles = {(edge.source, edge.target): edge.role for edge in graph.edges}
    assert roles["TryFromCache#2", "collect#7"] == "data"
    assert roles["anomaly#3", "TryFromCache#2"] == "return"
    assert roles["anomaly#9", "Repeat#8"] == "return"
    assert roles["collect#7", "load#11"] == "after"
    assert graph.sites == ("archive", "lab")


def test_a_graph_survives_json() -> None:
    graph = graph_of(every_statement())
    assert msgspec.json.decode(msgspec.json.encode(graph), type=Graph) == graph


def test_a_plan_that_was_stored_draws_the_same() -> None:
    plan = prepare(every_statement(), fed, "app")
    assert graph_of(Plan.from_json(plan.to_json())) == graph_of(plan)


def test_every_node_shows_its_site_as_text_and_colour() -> None:
    text = svg(graph_of(prepare(every_statement(), fed, "app")))
    for element in elements(text, "node"):
        site = element.get("data-site")
        words = "".join(part for found in element.iter() if found.tag.endswith("text") for part in found.itertext())
        if site:
            assert site in words
            assert {"archive": "s0", "lab": "s1"}[site] in element.get("class", "").split()
    legend = ["".join(element.itertext()) for element in elements(text, "key")]
    assert legend == ["archive", "lab"]


def test_a_drawing_is_self_contained_and_has_a_title() -> None:
    text = svg(graph_of(prepare(every_statement(), fed, "app")))
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label") == root[0].text == "Pipeline every statement: 13 nodes at archive, lab"
    assert not re.findall(r"<script|<image|@import|url\(|href|onload", text)
    assert "prefers-color-scheme:dark" in text


HOSTILE = ["</text><script>alert(1)</script>", "\"'&<>", "a\x00b\x1b[0m\ud800", "]]>", "x" * 500, "\u202e名前😀"]


@given(st.text(min_size=1) | st.sampled_from(HOSTILE))
def test_hostile_names_are_only_text(name: str) -> None:
    call = CallStatement(id=9, operation=name, site=name)
    with Pipeline("p") as tail:
        with If(PlaceParam(name) == name):
            Yield(1, place=name)
    text = svg(graph_of(Pipeline(name, body=(call, *tail.body))))
    tags = {element.tag.partition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert tags <= {"svg", "title", "style", "g", "rect", "path", "text", "tspan", "circle"}
    assert len(list(elements(text, "node"))) == 4


def test_a_wrong_pipeline_is_drawn_all_the_same() -> None:
    body = (
        CallStatement(id=0, operation="a", after=(1, 7)),
        CallStatement(id=1, operation="b", after=(0,)),
        CallStatement(id=1, operation="c"),
    )
    graph = graph_of(Pipeline("wrong", body=body))
    assert [(edge.source, edge.target) for edge in graph.edges] == [("b#1", "a#0"), ("a#0", "b#1")]
    assert len(list(elements(svg(graph), "edge"))) == 2


@pytest.mark.parametrize("kind", ["{}", "<{}>"])
def test_an_invalid_plan_is_drawn_all_the_same(kind: str) -> None:
    plan = prepare(every_statement(), fed, "app")
    strange = tuple(
        msgspec.structs.replace(node, block=node.id - 1, branch=7, kind=kind.format(node.kind)) for node in plan.nodes
    )
    text = svg(graph_of(msgspec.structs.replace(plan, nodes=strange)))
    assert len(list(elements(text, "node"))) == len(plan.nodes) + 1


def test_an_empty_pipeline_is_drawn() -> None:
    assert list(elements(svg(graph_of(Pipeline("nothing"))), "node")) == []


def test_the_same_pipeline_gives_the_same_drawing_in_every_process() -> None:
    program = (
        "import sys; from dfm_async import Pipeline; from dfm_async.drawing import graph_of, svg;"
        "sys.stdout.write(svg(graph_of(Pipeline.model_validate_json(sys.stdin.read()))))"
    )
    drawn = printed_with_hash_seeds(program, input=every_statement().model_dump_json())
    assert drawn == {svg(graph_of(every_statement()))}


def chain() -> Pipeline:
    with Pipeline("chain") as pipeline:
        values = [load(PlaceParam("x", multiuse=True))]
        for _ in range(1000):
            values.append(load(values[-1], PlaceParam("x", multiuse=True)))
        Yield(values)
    return pipeline


def farm() -> Pipeline:
    with Pipeline("farm") as pipeline:
        start = load()
        for _ in range(170):
            with ForEach(start) as element:
                value = anomaly(element)
                with If(value > 0):
                    anomaly(value, start)
            load(collect(value))
    return pipeline


def deep() -> Pipeline:
    with Pipeline("deep") as pipeline, ExitStack() as stack:
        value = start = load()
        for _ in range(90):
            value = anomaly(stack.enter_context(ForEach(value)), start)
    return pipeline


@pytest.mark.parametrize("make", [chain, farm, deep])
def test_a_thousand_nodes_are_drawn_within_a_second(make: Any) -> None:
    graph = graph_of(make())
    begun = time.process_time()
    text = svg(graph)
    assert time.process_time() - begun < 1
    assert len(text) < 1000 * len(graph.nodes) + 200_000


@pytest.mark.parametrize("make", [every_statement, deep])
def test_boxes_within_boxes_keep_apart(make: Any) -> None:
    check(graph_of(make()))


def test_lines_in_lanes_keep_clear_of_nodes_too() -> None:
    graph = graph_of(chain())
    layout = lay_out(graph, size)
    column = max(rect.x + rect.width for rect in layout.ends.values())
    assert any(run.x > column for _, runs in layout.lines for run in runs)
    nearby = [line for line in layout.lines if len(line[1]) == 3][:50]
    assert nearby
    assert_lines_keep_clear(Layout(layout.width, layout.height, layout.ends, [], nearby))
