"""Where nodes run, and the plan as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings

from dfm_async import (
    BestOf,
    Federation,
    ForEach,
    If,
    Pipeline,
    PipelineError,
    PlaceParam,
    Repeat,
    RetryPolicy,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.federation import Cost
from dfm_async.model.ids import Location
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet
from dfm_async.planning import Plan
from dfm_async.planning.net_text import net_text
from dfm_async.planning.prepare import prepare
from tests.property.random_pipelines import fed as random_federation
from tests.property.random_pipelines import pipelines
from tests.support.processes import printed_with_hash_seeds

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
    return {node.label: str(node.location) for node in plan.nodes}


# placement


@pytest.mark.parametrize(
    ("write", "sites"),
    [
        pytest.param(lambda: [anywhere(site="c"), anywhere(site=a)], ["c", "a"], id="named by the pipeline"),
        pytest.param(lambda: [at_a(), at_b()], ["a", "b"], id="the only one that offers it"),
        pytest.param(lambda: [anywhere(), anywhere(site=BestOf())], ["b", "b"], id="the cheapest"),
        pytest.param(lambda: anywhere(site=BestOf(["a", "c"])), ["a"], id="the cheapest of some"),
        pytest.param(equal, ["b"], id="the first of equal costs"),
        pytest.param(lambda: free(x=[at_a(), at_a()], y=at_b()), ["a", "a", "b", "a"], id="near most of its inputs"),
        pytest.param(lambda: free(x=at_b()["field"]), ["b", "b"], id="near the node of a field"),
    ],
)
def test_a_call_has_a_site(write: Callable[[], object], sites: list[str]) -> None:
    with Pipeline() as p:
        write()
    assert list(where(p).values()) == sites


def test_an_adapter_with_a_process_of_its_own_has_a_location_of_its_own() -> None:
    with Pipeline() as p:
        Yield(alone(at_a()))
    plan = prepare(p, fed, "app")
    assert plan.nodes[1].location == Location("c", "alone")
    assert plan.nodes[1].site == "c"
    assert set(plan.locations) == {Location("a"), Location("c", "alone")}
    assert set(plan.sites) == {"a", "c"}
    assert where(p, homesite="c")["alone#1"] == "c"


def test_statements_other_than_calls_run_where_their_values_are() -> None:
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


def test_a_cache_is_where_its_value_is_made_and_shared_by_workers() -> None:
    with Pipeline() as p:
        with TryFromCache("k") as found:
            found.store(at_a())
        with TryFromCache("k") as shared:
            shared.store(at_b())
        with TryFromCache("k", site="c") as fixed:
            fixed.store(at_b())
    own, shared_by_workers, elsewhere = (where(p)[f"TryFromCache#{i}"] for i in (0, 2, 4))
    assert (own, elsewhere) == ("a", "c")
    assert shared_by_workers == "b:cache", "one location for all workers of the site"


def test_every_node_explains_why_it_runs_at_its_site() -> None:
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
    assert explanation.to_svg().count("<path") == 2
    assert "<table>" in explanation._repr_html_()


def test_a_net_can_be_read_by_people() -> None:
    with Pipeline() as p:
        Yield(at_b(at_a(PlaceParam("x"))))
    plan = prepare(p, fed, "app")
    text = {plan.sites_at[net.location]: net_text(net) for net in plan.nets}
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


def test_a_plan_of_an_earlier_version_can_be_read() -> None:
    plan = prepare(rich(), fed, "app")
    saved = json.loads(plan.to_json())

    def as_string(location: dict[str, Any]) -> str:
        part = "##cache" if location.get("cache") else "#" + location.get("operation", "")
        return f"{location['site']}{part}".removesuffix("#")

    for holder in (saved, *saved["nets"]):
        holder["locations"] = list(map(as_string, holder["locations"]))
    for node in saved["nodes"]:
        node["location"] = as_string(node["location"])
    assert {"a", "b##cache", "c#alone"} <= set(saved["locations"])
    assert Plan.from_json(json.dumps(saved)) == plan


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


_PIPELINES = [
    "Yield(fed.operations['op3'](fed.operations['op1'](1), y=fed.operations['op2']('x')))",
    "Yield(fed.operations['op1']({'a', 'b', 'c', 'd', 'e'}))",
    "Yield({fed.operations['op1'](1), fed.operations['op2'](2), 'a', 'b', 'c', 'd'})",
    "Yield({'k': frozenset('abcdef')})",
]


_SCRIPT = """
import sys
from dfm_async import Federation, Pipeline, Yield
from dfm_async.planning.prepare import prepare
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
    print(statement, prepare(p, fed, "app").hash)
"""


def test_a_plan_is_the_same_with_every_hash_seed() -> None:
    (printed,) = printed_with_hash_seeds(_SCRIPT, *_PIPELINES)
    assert len(printed.splitlines()) == len(_PIPELINES)


# invariants of nets


def _planned(pipeline: Pipeline) -> Plan:
    try:
        return prepare(pipeline, random_federation, "app")
    except PipelineError as error:
        # The maker collects whatever it finds, and puts statements after the element of their own loop; only that
        # may be refused.
        refused = [p for p in error.problems if "collect" not in p.statement and "it is a part of" not in p.message]
        assert not refused
        reject()


plans = pipelines().map(_planned)


def _outputs(net: spec.Net) -> set[int]:
    """The places that a location fills."""
    found: set[int] = set()
    for transition in net.transitions:
        match transition.action:
            case spec.Call(output=output, ended=ended):
                found |= {output} if ended is None else {output, ended}
            case (
                spec.Store(output=output)
                | spec.Repeat(output=output)
                | spec.Make(output=output)
                | spec.Choose(output=output)
                | spec.Quorum(output=output)
                | spec.Await(output=output)
            ):
                found.add(output)
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
@given(plans)
def test_every_token_is_sent_once_to_each_location_that_waits_for_it(plan: Plan) -> None:
    outputs = [_outputs(net) for net in plan.nets]
    reads = [{i.place for t in net.transitions for i in t.inputs} for net in plan.nets]
    for here, net in enumerate(plan.nets):
        assert net.location == here
        assert net.locations == plan.locations
        for place in net.places:
            assert here not in place.routes
            assert len(set(place.routes)) == len(place.routes)
            assert all(place.index in reads[there] for there in place.routes)
            if place.routes:
                assert place.index in outputs[here]
        assert reads[here] <= {place.index for place in net.places}
        for awaited in reads[here] - {index for _, index in net.params}:
            sources = [at for at, filled in enumerate(outputs) if awaited in filled]
            assert len(sources) == 1, f"{net_text(net)} waits for place {awaited} with the sources {sources}"
            if sources[0] != here:
                routes = {p.index: p.routes for p in plan.nets[sources[0]].places}
                assert here in routes[awaited], f"{plan.locations[here]} never gets {awaited}"


@quick
@given(plans)
def test_every_location_has_the_scopes_around_what_it_does(plan: Plan) -> None:
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
        CompiledNet(net)


@quick
@given(plans)
def test_all_locations_agree_about_their_loops(plan: Plan) -> None:
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
@given(plans)
def test_any_plan_survives_json(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert Plan.from_json(plan.to_json().decode()) == plan
