"""Placement by costs, through pipelines and federations; and what calls may pass where."""

from __future__ import annotations

from typing import Any

import pytest

from dfm_async import (
    BestOf,
    Federation,
    ForEach,
    If,
    Pipeline,
    PipelineError,
    PlaceParam,
    Repeat,
    Session,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.federation import Cost, SendCost
from dfm_async.federation.bindings import Const, ExposedParameter, FromParam
from dfm_async.federation.operation import Declaration
from dfm_async.net import spec
from dfm_async.planning import Plan
from dfm_async.planning.prepare import prepare


def federation(**links: SendCost) -> Federation:
    """Three sites; ``a_b=SendCost(...)`` is what sending from a to b costs."""
    fed = Federation("costs")
    for name in ("a", "b", "c"):
        fed.site(name)
    for pair, cost in links.items():
        source, target = pair.split("_")
        fed.sites[source].send_cost[target] = cost
    return fed


def offer(fed: Federation, name: str, **costs: Cost | None) -> Any:
    """An operation that sites offer at these costs."""

    def code(*, x: Any = None, y: Any = None) -> Any:
        return x

    code.__qualname__ = code.__name__ = name
    for site, cost in costs.items():
        operation = fed.sites[site].operation(fed.operations.get(name, code), cost=cost)
    return operation


def sites(pipeline: Pipeline, fed: Federation, homesite: str = "home", **options: Any) -> dict[str, str]:
    return {node.label: str(node.location) for node in prepare(pipeline, fed, homesite, **options).nodes}


FAR = SendCost(fixed_time=0.1, bandwidth=1e6)
NEAR = SendCost(fixed_time=0.001, bandwidth=1e9)


@pytest.mark.parametrize(
    ("links", "costs", "large", "small"),
    [
        pytest.param({"a_b": FAR}, {"a": Cost(fixed_time=10), "b": Cost(fixed_time=1)}, "a", "b", id="slow links"),
        pytest.param(
            {"a_b": NEAR, "a_c": NEAR},
            {"b": Cost(fixed_time=5, throughput=1e9), "c": Cost(fixed_time=0.1, throughput=1e7)},
            "b",
            "c",
            id="throughput",
        ),
    ],
)
def test_the_size_of_inputs_decides(
    links: dict[str, SendCost], costs: dict[str, Cost | None], large: str, small: str
) -> None:
    fed = federation(**links)
    work = offer(fed, "work", **costs)
    with Pipeline() as p:
        work(x=offer(fed, "large", a=Cost(fixed_size=1e9))())
        work(x=offer(fed, "small", a=Cost(fixed_size=1e3))())
    found = sites(p, fed)
    assert (found["work#1"], found["work#3"]) == (large, small)


def test_what_comes_after_a_node_counts_too() -> None:
    fed = federation(a_b=FAR)
    make = offer(fed, "make", a=Cost(fixed_time=1, fixed_size=1e9), b=Cost(fixed_time=2, fixed_size=1e9))
    only_b = offer(fed, "use", b=Cost(fixed_time=1))
    with Pipeline() as p:
        only_b(x=make())
    assert sites(p, fed)["make#0"] == "b", "dearer, but what it makes need not be sent"


def test_results_go_to_the_homesite() -> None:
    fed = federation(a_b=FAR, a_c=FAR, b_c=FAR)
    make = offer(fed, "make", a=Cost(fixed_time=1, fixed_size=1e9), b=Cost(fixed_time=5, fixed_size=1e9))
    with Pipeline() as p:
        Yield(make())
    assert sites(p, fed, "b")["make#0"] == "b"
    assert sites(p, fed, "c")["make#0"] == "a"
    with Pipeline() as p:
        make()
    assert sites(p, fed, "b")["make#0"] == "a"


def test_branches_overlap_so_only_the_longest_path_counts() -> None:
    fed = federation(a_b=SendCost(fixed_time=1), a_c=SendCost(fixed_time=1), b_c=SendCost(fixed_time=1))
    long = offer(fed, "long", a=Cost(fixed_time=10))
    short = offer(fed, "short", b=Cost(fixed_time=1), c=Cost(fixed_time=8))
    join = offer(fed, "join", a=Cost(fixed_time=1))
    with Pipeline() as p:
        join(x=long(), y=short())
    plan = prepare(p, fed, "a")
    assert plan.cost is not None
    assert plan.cost.seconds == pytest.approx(11)
    assert plan.cost.optimal


def test_the_body_of_a_loop_counts_once_per_element() -> None:
    fed = federation(a_b=SendCost(fixed_time=1))
    make = offer(fed, "make", a=Cost())
    work = offer(fed, "work", a=Cost(fixed_time=2), b=Cost(fixed_time=0.5))
    for count in (1, 20):
        with Pipeline() as p:
            once = make()
            with ForEach(list(range(count))):
                work(x=once)
        assert sites(p, fed, "a")["work#2"] == "b", "what comes from outside is sent once"
    with Pipeline() as p, ForEach([1, 2, 3]) as element:
        work(x=element)
    plan = prepare(p, fed, "a")
    assert plan.nodes[1].cost is not None
    assert plan.nodes[1].site == "b"
    assert plan.nodes[1].cost.seconds == pytest.approx(1.5)
    assert plan.nodes[1].cost.transfers[0].seconds == pytest.approx(3)
    with Pipeline() as p, Repeat(1, times=7) as value:
        value.next(work(x=value))
    plan = prepare(p, fed, "a")
    assert plan.nodes[1].cost is not None
    assert plan.nodes[1].cost.seconds == pytest.approx(3.5)


def test_blocks_are_placed_with_their_values() -> None:
    fed = federation(a_b=SendCost(fixed_time=0.1))
    work = offer(fed, "work", a=Cost(fixed_time=5), b=Cost(fixed_time=1))
    with Pipeline() as p:
        value = work()
        with If(value == 1):
            Yield(value, place="one")
        with Repeat(1, times=3) as current:
            current.next(work(x=current))
        with TryFromCache("k") as cached:
            cached.store(work(x=current))
        with ForEach(work(x=cached)) as element:
            inner = work(x=element)
        Yield(collect(inner), place="all")
    assert set(sites(p, fed, "a").values()) == {"b"}


def test_a_loop_over_a_parameter_is_driven_at_the_only_site_of_its_calls() -> None:
    fed = federation()
    here, there = offer(fed, "here", a=None), offer(fed, "there", b=None)
    with Pipeline() as pipeline:
        with ForEach(PlaceParam("one")) as element:
            with If(element > 1):
                here(x=here(x=element))
        with ForEach(PlaceParam("two")) as element:
            there(x=here(x=element))
    found = sites(pipeline, fed)
    assert (found["ForEach#0"], found["ForEach#4"]) == ("a", "home")


def test_without_any_costs_values_stay_where_they_are() -> None:
    fed = federation()
    first = offer(fed, "first", b=None)
    work = offer(fed, "work", a=None, b=None, c=None)
    with Pipeline() as p:
        value = work(x=work(x=first()))
        Yield(value)
        work()
    plan = prepare(p, fed, "home")
    assert [node.site for node in plan.nodes] == ["b", "b", "b", "b", "a"]
    assert plan.cost is None
    assert all(node.cost is None and not node.alternatives for node in plan.nodes)


def test_a_site_without_costs_is_not_assumed_to_be_free() -> None:
    fed = federation()
    work = offer(fed, "work", a=None, b=Cost(fixed_time=3), c=Cost(fixed_time=2))
    with Pipeline() as p:
        work()
    assert sites(p, fed)["work#0"] == "c"


def test_what_is_known_of_one_direction_counts_for_the_other() -> None:
    fed = federation(b_a=NEAR)
    make = offer(fed, "make", a=Cost(fixed_size=1e6))
    work = offer(fed, "work", b=Cost(), c=Cost())
    with Pipeline() as p:
        work(x=make())
    assert sites(p, fed)["work#1"] == "b"


def test_costs_cannot_be_negative() -> None:
    nan, inf = float("nan"), float("inf")
    for name, value in (("throughput", 0), ("fixed_time", inf), ("output_factor", -0.5), ("fixed_size", nan)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            Cost(**{name: value})
    for name, value in (("bandwidth", 0), ("bandwidth", nan), ("fixed_time", -1), ("fixed_time", nan)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            SendCost(**{name: value})


def test_figures_stay_numbers_however_much_sizes_grow() -> None:
    fed = federation(a_b=SendCost(fixed_time=1, bandwidth=1e-300))
    work = offer(
        fed, "work", a=Cost(throughput=1e-300, output_factor=1e300), b=Cost(fixed_time=1e300, fixed_size=1e300)
    )
    with Pipeline() as p:
        value, before = work(), work()
        for _ in range(50):
            value, before = work(x=value, y=before), value
        with Repeat(value, times=10**400) as current:
            current.next(work(x=current))
            with ForEach([1] * 10_000), ForEach([1] * 10_000):
                Yield(work(x=value))
    plan = prepare(p, fed, "home")
    assert plan.cost is not None
    assert 0 < plan.cost.seconds < float("inf")
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan.explain())


# limits to the choice


def test_best_of_and_restrictions_limit_the_choice() -> None:
    fed = federation()
    work = offer(fed, "work", a=Cost(fixed_time=1), b=Cost(fixed_time=2), c=Cost(fixed_time=3))
    with Pipeline() as p:
        work(site=BestOf(["c", "b"]))
        work(site=BestOf())
        work()
    assert list(sites(p, fed).values()) == ["b", "a", "a"]
    assert list(sites(p, fed, restrict_to_sites=["b", "c"]).values()) == ["b", "b", "b"]
    assert list(sites(p, fed, restrict_to_sites="c").values()) == ["c", "c", "c"]


async def test_several_providers_at_a_site_are_alternatives() -> None:
    fed = federation()

    @fed.sites["a"].operation(provider="cpu", cost=Cost(fixed_time=5))
    async def which(x: int) -> str:
        return f"cpu {x}"

    @fed.sites["a"].implements(which, provider="gpu", cost=Cost(fixed_time=1))
    async def which_gpu(x: int) -> str:
        return f"gpu {x}"

    with Pipeline() as p:
        Yield(which(1), place="free")
        Yield(which(2, provider="cpu"), place="cpu")
        Yield(which(3, site="a"), place="at a")
    plan = prepare(p, fed, "home")
    calls = [t.action for net in plan.nets for t in net.transitions if isinstance(t.action, spec.Call)]
    assert [call.provider for call in calls] == ["gpu", "cpu", "gpu"]
    assert [(o.site, o.provider) for o in plan.nodes[0].alternatives] == [("a", "cpu")]
    assert [node.provider for node in plan.nodes if node.kind == "call"] == ["gpu", "cpu", "gpu"]
    assert "which#0  a/gpu" in str(plan.explain())
    async with Session(fed, target="inline") as session:
        job = await session.execute(p)
        assert {result.place: result.value for result in await job.collect()} == {
            "free": "gpu 1", "cpu": "cpu 2", "at a": "gpu 3",
        }  # fmt: skip


# parameters that only some sites take


class Body:
    async def body(self, x: int, level: int = 0) -> Any:
        return x, level


def exposing(**exposed: ExposedParameter | None) -> Federation:
    fed = Federation("exposing")

    def op(x: int) -> Any: ...

    operation = fed.declare("op", op)
    for name, parameter in exposed.items():
        fed.site(name).adapt(operation, Body, bind={"x": FromParam("x"), "level": Const(1, expose_as=parameter)})
    return fed


def problem(pipeline: Pipeline, fed: Federation) -> str:
    with pytest.raises(PipelineError) as caught:
        prepare(pipeline, fed, "home")
    assert len(caught.value.problems) == 1
    return caught.value.problems[0].message


async def test_a_call_that_passes_what_some_sites_expose_runs_at_one_of_them() -> None:
    fed = exposing(a=None, b=ExposedParameter(param="level", type="integer"))
    with Pipeline() as p:
        Yield(fed.operations.op(1), place="plain")
        Yield(fed.operations.op(2, level=7), place="exposed")
    assert sites(p, fed)["op#0"] == "a"
    assert sites(p, fed)["op#2"] == "b"
    async with Session(fed, target="inline") as session:
        job = await session.execute(p)
        found = {result.place: result.value for result in await job.collect()}
    assert found == {"plain": (1, 1), "exposed": (2, 7)}


def test_a_site_that_does_not_take_a_parameter_is_reported() -> None:
    fed = exposing(a=None, b=ExposedParameter(param="level", type="integer"))
    with Pipeline() as p:
        fed.operations.op(2, level=7, site="a")
    assert problem(p, fed) == "level cannot be passed where it may run: a: has no parameter 'level' (taken at b)"
    with Pipeline() as p:
        fed.operations.op(2, level="high")
    assert "integer" in problem(p, fed)

    @fed.sites["a"].operation
    def words() -> str:
        return "high"

    with Pipeline() as p:
        fed.operations.op(2, level=words())
    assert "level is declared int, but words#0 returns str" in problem(p, fed)

    @fed.pipeline
    def declared(text: str) -> Any:
        return fed.operations.op(2, level=text)

    assert "level is declared int, but parameter 'text' is declared str" in problem(declared, fed)
    listed = exposing(a=ExposedParameter(param="level", type=["integer", "array"]))
    with Pipeline() as p:
        listed.operations.op(2, level=[1])
        listed.operations.op(2, level=1)
    prepare(p, listed, "home")


@pytest.mark.parametrize("kind", ["literal", "node", "place"])
def test_an_exposed_parameter_takes_only_what_it_accepts(kind: str) -> None:
    wanted = {f"accepts_{kind}_input": False}
    fed = exposing(a=ExposedParameter(param="level", **wanted))  # type: ignore[arg-type]
    told = {"literal": "a constant", "node": "the value of a node", "place": "a parameter of the pipeline"}
    for other in told:
        with Pipeline() as p:
            value = {"literal": 1, "node": fed.operations.op(1), "place": PlaceParam("x")}[other]
            fed.operations.op(1, level=value)
        if other == kind:
            assert told[kind] in problem(p, fed)
        else:
            assert isinstance(prepare(p, fed, "home"), Plan)


@pytest.mark.parametrize("kind", ["literal", "node", "place"])
@pytest.mark.parametrize("style", ["accepts-{}-input", "accepts_{}_input"])
def test_a_declared_parameter_takes_only_what_it_accepts(kind: str, style: str) -> None:
    fed = Federation("declared")

    def op(x: Any) -> Any: ...

    schema = {"x": {"type": "integer", style.format(kind): False}}
    operation = fed.declare("op", op, declaration=Declaration(parameters=schema))
    fed.site("a").adapt(operation, Body)
    with Pipeline() as other:
        plain = offer(fed, "plain", a=None)
        value = {"literal": 1, "node": plain(), "place": PlaceParam("x")}[kind]
        operation([value, 2] if kind != "literal" else value)
    assert f"accepts-{kind}-input: false" in problem(other, fed)


# explanations


def test_an_explanation_shows_costs_and_rejected_alternatives() -> None:
    fed = federation(a_b=FAR)
    make = offer(fed, "make", a=Cost(fixed_time=1, fixed_size=1e6))
    work = offer(fed, "work", a=Cost(fixed_time=10), b=Cost(fixed_time=1), c=Cost(fixed_time=100))
    with Pipeline("explained") as p:
        Yield(work(x=make()))
    plan = prepare(p, fed, "b")
    assert plan.cost is not None
    assert plan.cost.seconds == pytest.approx(3.1)
    made, worked, sent = plan.nodes
    assert worked.cost is not None
    assert (worked.cost.start, worked.cost.seconds) == (pytest.approx(2.1), 1.0)
    assert [(t.source, t.bytes, t.seconds) for t in worked.cost.transfers] == [("a", 1_000_000, pytest.approx(1.1))]
    assert [(o.site, o.total) for o in worked.alternatives] == [("a", pytest.approx(12.1)), ("c", pytest.approx(103.2))]
    assert all(o.difference == pytest.approx(o.total - 3.1) for o in worked.alternatives)
    assert not made.alternatives
    assert sent.cost is not None
    assert Plan.from_json(plan.to_json()) == plan
    assert prepare(p, fed, "b").hash == plan.hash
    text = str(plan.explain())
    assert "3.1 s in total, the least" in text
    assert "1 MB from a: 1.1 s" in text
    assert "work#1    a     12.1 s    +9 s" in text
    assert "everything waits" in text
    assert 'n1["work#1<br/>1 s"]' in plan.explain().to_mermaid()
    page = plan.explain()._repr_html_()
    assert "12.1 s" in page
    assert "rejected" in page


def test_a_plan_keeps_the_best_alternatives_only() -> None:
    fed = Federation("many")
    for i in range(30):
        fed.site(f"s{i}")
    work = offer(fed, "work", **{f"s{i}": Cost(fixed_time=float(i + 1)) for i in range(30)})
    with Pipeline() as p:
        work()
    found = prepare(p, fed, "home").nodes[0].alternatives
    assert [other.site for other in found] == [f"s{i}" for i in range(1, 9)]
