"""Where nodes run, and the plan as data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from dfm_async import (
    BestOf,
    Cost,
    Federation,
    ForEach,
    If,
    Pipeline,
    PipelineError,
    PlaceParam,
    Plan,
    Repeat,
    RetryPolicy,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.net import spec
from dfm_async.net.program import Program
from dfm_async.planner.explain import net_text
from dfm_async.planner.plan import prepare
from tests.property.random_pipelines import fed as random_federation
from tests.property.random_pipelines import pipelines

fed = Federation("places")
a = fed.site("a")
b = fed.site("b", workers=2)
c = fed.site("c")


@a.operation
def at_a(x: Any = None) -> Any:
    return x


@b.operation
def at_b(x: Any = None) -> Any:
    return x


@a.operation(cost=Cost(fixed_time=5))
def anywhere(*, x: Any = None, y: Any = None) -> Any:
    return x


b.operation(anywhere, cost=Cost(fixed_time=2))
c.operation(anywhere, cost=Cost(fixed_time=9))


@b.operation
def equal(x: Any = None) -> Any:
    return x


c.operation(equal)


@a.operation
def free(*, x: Any = None, y: Any = None) -> Any:
    return x


b.operation(free)
c.operation(free)


@c.operation(in_process=True)
def alone(x: Any = None) -> Any:
    return x


@c.operation
def stream(n: int) -> Iterator[int]:
    yield from range(n)


def where(pipeline: Pipeline, homesite: str = "app", **options: Any) -> dict[str, str]:
    plan = prepare(pipeline, fed, homesite, **options)
    return {node.label: node.location for node in plan.nodes}


# placement


def test_a_node_runs_where_the_pipeline_says() -> None:
    with Pipeline() as p:
        anywhere(site="c")
        anywhere(site=a)
    assert where(p) == {"anywhere#0": "c", "anywhere#1": "a"}


def test_a_node_runs_at_the_only_site_that_offers_it() -> None:
    with Pipeline() as p:
        at_a()
        at_b()
    assert where(p) == {"at_a#0": "a", "at_b#1": "b"}


def test_without_inputs_a_node_runs_where_it_is_cheapest() -> None:
    with Pipeline() as p:
        anywhere()
        anywhere(site=BestOf(["a", "c"]))
        anywhere(site=BestOf())
    assert where(p) == {"anywhere#0": "b", "anywhere#1": "a", "anywhere#2": "b"}
    assert where(p, restrict_to_sites=["c", "a"]) == {"anywhere#0": "a", "anywhere#1": "a", "anywhere#2": "a"}


def test_with_equal_costs_the_first_site_of_the_federation_is_taken() -> None:
    with Pipeline() as p:
        equal()
    assert where(p) == {"equal#0": "b"}


def test_a_node_runs_near_most_of_its_inputs() -> None:
    with Pipeline() as p:
        x, y = at_a(), at_a()
        free(x=[x, y], y=at_b())
        free(x=x["field"])
    assert where(p)["free#3"] == "a"
    assert where(p)["free#4"] == "a"


def test_an_adapter_with_a_process_of_its_own_has_a_location_of_its_own() -> None:
    with Pipeline() as p:
        Yield(alone(at_a()))
    plan = prepare(p, fed, "app")
    assert plan.nodes[1].location == "c#alone"
    assert plan.nodes[1].site == "c"
    assert set(plan.locations) == {"a", "c#alone"}
    assert set(plan.sites) == {"a", "c"}
    assert where(p, homesite="c")["alone#1"] == "c"


def test_statements_other_than_calls_stand_where_their_values_are() -> None:
    with Pipeline() as p:
        value = at_b()
        Yield(value, place="v")
        Yield(5, place="five")
        with If(value > 1):
            Yield(1, place="in")
        with ForEach(stream(3)) as element:
            Yield(element, place="e")
            Yield(7, place="seven")
            inner = at_a(element)
        collect(inner)
        with Repeat(1, times=2) as current:
            current.next(at_a(current))
    found = where(p)
    assert found == {
        "at_b#0": "b",
        "Yield#1": "b",
        "Yield#2": "app",
        "If#3": "b",
        "Yield#4": "app",
        "stream#5": "c",
        "ForEach#6": "c",
        "Yield#7": "c",
        "Yield#8": "c",
        "at_a#9": "a",
        "collect#10": "a",
        "Repeat#11": "a",
        "at_a#12": "a",
    }


def test_a_cache_stands_where_its_value_is_made_and_all_workers_of_a_site_share_it() -> None:
    with Pipeline() as p:
        with TryFromCache("k") as found:
            found.store(at_a())
        with TryFromCache("k") as shared:
            shared.store(at_b())
        with TryFromCache("k", site="c") as fixed:
            fixed.store(at_b())
    own, shared_by_workers, elsewhere = (where(p)[f"TryFromCache#{i}"] for i in (0, 2, 4))
    assert (own, elsewhere) == ("a", "c")
    assert shared_by_workers.startswith("b#"), "one location for all workers of the site"


def test_every_node_says_why_it_runs_where_it_does() -> None:
    with Pipeline("why") as p:
        x = at_a()
        anywhere()
        free(x=x)
        equal()
        Yield(at_b(x, site="b"))
        Yield(alone(), place="z")
    plan = prepare(p, fed, "app")
    why = {node.label: node.why for node in plan.nodes}
    assert why["at_a#0"] == "the only site that offers it"
    assert why["anywhere#1"].startswith("cheapest")
    assert why["free#2"].startswith("nearest to its inputs")
    assert why["equal#3"].startswith("the first that offers it")
    assert why["at_b#4"] == "fixed by the pipeline"
    assert why["alone#6"].endswith("in a process of its own")
    text = str(plan.explain())
    for node in plan.nodes:
        assert node.label in text
        assert node.why in text
    assert "why" in text.splitlines()[0]


def test_explanations_draw_every_node_and_edge() -> None:
    with Pipeline("drawn <&>") as p:
        Yield(at_b(at_a()))
    explanation = prepare(p, fed, "app").explain()
    mermaid = explanation.to_mermaid()
    assert 'n0["at_a#0"]' in mermaid
    assert "n0 --> n1" in mermaid
    assert "n1 --> n2" in mermaid
    svg = explanation.to_svg()
    assert svg.startswith("<svg")
    assert svg.endswith("</svg>")
    assert svg.count("<path") == 2
    assert "<table>" in explanation._repr_html_()


def test_a_net_can_be_read_by_people() -> None:
    with Pipeline() as p:
        Yield(at_b(at_a(PlaceParam("x"))))
    plan = prepare(p, fed, "app")
    text = {plan.locations[net.location]: net_text(net) for net in plan.nets}
    assert "param x" in text["a"]
    assert "at_a#0 -> b" in text["a"]
    assert "at_b#1 [scope 0]: call(at_a#0)" in text["b"]


# the plan as data


def rich() -> Pipeline:
    with Pipeline("rich") as p:
        x = PlaceParam("x", multiuse=True)
        value = at_a({"k": (1, b"x", 2.5), "p": x.field[0]})
        at_b(value["k"][True], retry=RetryPolicy(attempts=2, on=("ValueError",)), deadline=1.5, after=value)
        with ForEach(stream(3), concurrency=2) as element, If((element > 1) & ~(x == "no")) as branch:
            inner = at_b([element, value])
            Yield(inner, place="i")
        with branch.otherwise() if False else ForEach([(1, 2)]) as pair:
            Yield(pair[1], place="j")
            second = at_a(pair)
        with Repeat(collect(second), times=3, until=lambda v: v == frozenset({1})) as current:
            current.next(alone(current))
        with TryFromCache(key=("k", current)) as found:
            found.store(at_b(current))
        Yield(found, place="last")
    return p


def test_a_plan_survives_json() -> None:
    plan = prepare(rich(), fed, "app")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert again.to_json() == plan.to_json()
    assert json.loads(plan.to_json())["pipeline"] == "rich"
    assert plan.places == ("i", "j", "last")
    assert plan.params == ("x",)
    assert plan.ordered_places == ("last",)


def test_preparing_twice_gives_the_same_plan_and_another_pipeline_another_hash() -> None:
    assert prepare(rich(), fed, "app") == prepare(rich(), fed, "app")
    hashes = set()
    for literal in (1, 2, "1", (1,), [1], True, 1.0):
        with Pipeline("p") as p:
            Yield(at_a(literal))
        hashes.add(prepare(p, fed, "app").hash)
    assert len(hashes) == 7


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"{}",
        lambda data: b"[1]",
        lambda data: data[:-1],
        lambda data: data.replace(b'"literals":["', b'"literals":["A'),
        lambda data: data.replace(b'"literals":["', b'"literals":["wcHB'),
        lambda data: data.replace(b'"literals":["', b'"literals":[5,"'),
        lambda data: data.replace(b'"kind":"call"', b'"kind":"explode"'),
    ],
    ids=["nothing", "empty", "list", "cut", "no base64", "no value", "a number", "unknown action"],
)
def test_what_is_not_a_plan_is_refused(spoil: Any) -> None:
    with Pipeline("p") as p:
        Yield(at_a("literal"))
    data = prepare(p, fed, "app").to_json()
    spoilt = spoil(data)
    assert spoilt != data
    with pytest.raises(PipelineError, match="cannot be read"):
        Plan.from_json(spoilt)


_PIPELINES = {
    "many sites and names": "Yield(fed.operations['op3'](fed.operations['op1'](1), y=fed.operations['op2']('x')))",
    "a set as a constant": "Yield(fed.operations['op1']({'a', 'b', 'c', 'd', 'e'}))",
    "a set with nodes": "Yield({fed.operations['op1'](1), fed.operations['op2'](2), 'a', 'b', 'c', 'd'})",
    "a dict of frozensets": "Yield({'k': frozenset('abcdef')})",
}


_SCRIPT = """
import sys
from dfm_async import Federation, Pipeline, Yield
from dfm_async.planner.plan import prepare
fed = Federation("seeds")
def op(x=None, y=None):
    return x
for name in ("x", "y", "z"):
    site = fed.site(name)
    for i in range(4):
        site.operation(op, name=f"op{i}")
for statement in sys.argv[1:]:
    with Pipeline("p") as p:
        exec(statement)
    print(prepare(p, fed, "app").hash)
"""


@pytest.fixture(scope="module")
def hashes() -> dict[str, set[str]]:
    """The hashes that each of the pipelines has under several hash seeds."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *_PIPELINES.values()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2", "3")
    ]
    answers = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return {name: set(found) for name, found in zip(_PIPELINES, zip(*answers, strict=True), strict=True)}


@pytest.mark.parametrize("name", _PIPELINES)
def test_a_plan_is_the_same_with_every_hash_seed(name: str, hashes: dict[str, set[str]]) -> None:
    assert len(hashes[name]) == 1


# invariants of nets


def _valid(pipeline: Pipeline) -> Plan:
    try:
        return prepare(pipeline, random_federation, "app")
    except PipelineError as error:
        # The maker collects whatever it finds, and puts statements after the element of their own loop; only that
        # may be refused.
        refused = [p for p in error.problems if "collect" not in p.statement and "it is a part of" not in p.message]
        assert not refused
        assume(False)
        raise


def _outputs(net: spec.Net) -> set[int]:
    """The places that a location fills."""
    found: set[int] = set()
    for transition in net.transitions:
        match transition.action:
            case spec.Call(output=output) | spec.Store(output=output) | spec.Repeat(output=output):
                found.add(output)
                if isinstance(transition.action, spec.Call) and transition.action.ended is not None:
                    found.add(transition.action.ended)
            case spec.Branch(then=first, otherwise=second) | spec.Lookup(found=first, miss=second):
                found |= {first, second}
        if isinstance(transition.action, (spec.Iterate, spec.Repeat)):
            (loop,) = (loop for loop in net.loops if loop.index == transition.action.loop)
            found |= {place for place in (loop.element, loop.enter) if place is not None}
    for loop in net.loops:
        found |= set(loop.collects)
    return found


quick = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])


@quick
@given(pipelines())
def test_every_token_reaches_every_transition_that_waits_for_it(pipeline: Pipeline) -> None:
    plan = _valid(pipeline)
    outputs = [_outputs(net) for net in plan.nets]
    for here, net in enumerate(plan.nets):
        assert net.location == here
        assert net.locations == plan.locations
        params = {place for _, place in net.params}
        known = {place.index: place for place in net.places}
        for transition in net.transitions:
            for given_input in transition.inputs:
                place = given_input.place
                assert place in known, (transition.label, place)
                if place in params:
                    continue
                sources = [at for at, filled in enumerate(outputs) if place in filled]
                assert len(sources) == 1, f"{transition.label} waits for a place with the sources {sources}"
                if sources[0] == here:
                    continue
                routes = {p.index: p.routes for p in plan.nets[sources[0]].places}
                assert here in routes[place], f"{transition.label} at {plan.locations[here]} never gets {place}"


@quick
@given(pipelines())
def test_tokens_are_sent_only_where_they_are_used_and_once(pipeline: Pipeline) -> None:
    plan = _valid(pipeline)
    reads = [{i.place for t in net.transitions for i in t.inputs} for net in plan.nets]
    for here, net in enumerate(plan.nets):
        for place in net.places:
            assert here not in place.routes
            assert len(set(place.routes)) == len(place.routes)
            assert all(place.index in reads[there] for there in place.routes)
            if place.routes:
                assert place.index in _outputs(net)


@quick
@given(pipelines())
def test_every_location_has_the_scopes_around_what_it_does(pipeline: Pipeline) -> None:
    plan = _valid(pipeline)
    for here, net in enumerate(plan.nets):
        parents = {scope.index: scope.parent for scope in net.scopes}
        order = [scope.index for scope in net.scopes]
        assert order[0] == 0, "every location takes part in the pipeline itself"
        for scope in net.scopes:
            if scope.parent is not None:
                assert order.index(scope.parent) < order.index(scope.index)
        places = {place.index: place for place in net.places}
        loops = {loop.scope: loop for loop in net.loops}
        for transition in net.transitions:
            around = {transition.scope}
            step: int | None = transition.scope
            while step is not None:
                assert step in parents
                around.add(step)
                step = parents[step]
            assert all(places[i.place].scope in around for i in transition.inputs), "only outer values are visible"
            if transition.scope:
                assert here in loops[transition.scope].members
                assert any(places[i.place].scope == transition.scope for i in transition.inputs), (
                    "something triggers it"
                )
        Program(net)


@quick
@given(pipelines())
def test_all_locations_agree_about_their_loops(pipeline: Pipeline) -> None:
    plan = _valid(pipeline)
    seen: dict[int, spec.Loop] = {}
    for here, net in enumerate(plan.nets):
        scopes = {scope.index for scope in net.scopes}
        for loop in net.loops:
            first = seen.setdefault(loop.index, loop)
            assert (loop.control, loop.members, loop.scope, loop.limit) == (
                first.control, first.members, first.scope, first.limit,
            )  # fmt: skip
            assert (here in loop.members) == (loop.scope in scopes)
        driven = [t.action.loop for t in net.transitions if isinstance(t.action, (spec.Iterate, spec.Repeat))]
        assert sorted(driven) == sorted(loop.index for loop in net.loops if loop.control == here)


@quick
@given(pipelines())
def test_any_plan_survives_json(pipeline: Pipeline) -> None:
    plan = _valid(pipeline)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert Plan.from_json(plan.to_json().decode()) == plan
