"""Everything that is wrong with a pipeline is told at once, each problem with its statement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from dfm_async import (
    BestOf,
    Federation,
    ForEach,
    If,
    Operation,
    Pipeline,
    PipelineError,
    PlaceParam,
    Repeat,
    RetryPolicy,
    TryFromCache,
    Yield,
    collect,
)
from dfm_async.pipeline.expressions import Constant, Ref
from dfm_async.pipeline.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    IfStatement,
    RepeatStatement,
    Statement,
    YieldStatement,
)
from dfm_async.planner.plan import prepare

fed = Federation("problems", api_version="2.1")
a = fed.site("a")
b = fed.site("b")


@a.operation
def number(x: int = 0) -> int:
    return x


@b.operation
def words(text: str, times: int = 1) -> list[str]:
    return [text] * times


@b.operation
def numbers(n: int) -> Iterator[int]:
    yield from range(n)


@a.operation(provider="gpu")
def fast(x: Any) -> Any:
    return x


def problems(pipeline: Pipeline, **options: Any) -> list[tuple[str, str]]:
    with pytest.raises(PipelineError) as caught:
        prepare(pipeline, fed, "app", **options)
    assert caught.value.pipeline == pipeline.name
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return [(problem.statement, problem.message) for problem in caught.value.problems]


def only(pipeline: Pipeline, statement: str, message: str, **options: Any) -> None:
    found = problems(pipeline, **options)
    assert len(found) == 1, found
    assert found[0][0] == statement
    assert re.search(message, found[0][1]), found[0][1]


def written(*body: Statement) -> Pipeline:
    """A pipeline as it may come from a file."""
    return Pipeline.model_validate_json(Pipeline("written", body=body).model_dump_json())


def call(id: int, operation: str = "number", after: tuple[int, ...] = (), **args: Any) -> CallStatement:  # noqa: A002
    return CallStatement(id=id, operation=operation, args=args, after=after)


def out(id: int, value: Any, place: str = "yield", **options: Any) -> YieldStatement:  # noqa: A002
    return YieldStatement(id=id, value=value, place=place, **options)


def test_all_problems_are_reported_together_with_their_statements() -> None:
    with Pipeline("all", api_version="9.0") as p:
        number(1, site="nowhere")
        text = words(5)  # type: ignore[call-overload]
        number(text)
        with Repeat(1) as current:
            inner = number(current)
            current.next(inner)
        number(inner)
        Yield(PlaceParam("x"))
        Yield(PlaceParam("x"))
        Yield(1, place="x")
        fast(1, provider="cpu")
    found = problems(p)
    for statement, message in [
        ("number#0", "no site 'nowhere'.*a, b"),
        ("words#1", "text: Input should be a valid string"),
        ("number#2", r"x is declared int, but words#1 returns list\[str\]"),
        ("Repeat#3", "neither times nor until"),
        ("number#5", r"inside Repeat#3.*collect"),
        ("PlaceParam('x')", "2 times.*multiuse"),
        ("PlaceParam('x')", "same name as a place"),
        ("Yield(place='yield')", "2 times.*multiuse"),
        ("fast#9", "provider 'cpu'"),
        ("api_version", "9.0.*2.1"),
    ]:
        matches = [m for s, m in found if s == statement and re.search(message, m)]
        assert len(matches) == 1, (statement, found)
    assert len(found) == 10


# operations and sites


def test_an_unknown_operation_is_told_with_those_that_exist() -> None:
    only(written(call(0, "nmber")), "nmber#0", "no operation 'nmber' in federation 'problems'.*fast, number, numbers")


def test_an_unknown_site_is_told_with_those_that_exist() -> None:
    with Pipeline() as p:
        number(site="c")
    only(p, "number#0", "no site 'c'.*a, b")
    with Pipeline() as p:
        number(site=BestOf(["a", "c"]))
    only(p, "number#0", "BestOf names site 'c'")
    with Pipeline() as p, TryFromCache("k", site="c") as found:
        found.store(number())
    only(p, "TryFromCache#0", "no site 'c'")


def test_a_site_that_does_not_offer_the_operation_is_told_with_those_that_do() -> None:
    with Pipeline() as p:
        number(site=b)
    only(p, "number#0", "site 'b' does not offer operation 'number'.*offered by a")
    with Pipeline() as p:
        number(site=BestOf(["b"]))
    only(p, "number#0", "no site among .'b'. offers operation 'number'")


def test_an_unknown_provider_is_refused() -> None:
    with Pipeline() as p:
        fast(1, provider="tpu", site="a")
    only(p, "fast#0", "site 'a' does not offer operation 'fast' from provider 'tpu' .offered by a from provider 'gpu'")
    with Pipeline() as anywhere:
        fast(1, provider="tpu")
    only(anywhere, "fast#0", "no site offers operation 'fast' from provider 'tpu' .offered by a from provider 'gpu'")


def test_sites_outside_the_restriction_are_refused() -> None:
    with Pipeline() as p:
        words("x")
    only(p, "words#0", "restricted to", restrict_to_sites=["a"])
    with Pipeline() as p:
        words("x", site="b")
    only(p, "words#0", "restrict_to_sites allows", restrict_to_sites=["a"])
    only(p, "words#0", "restrict_to_sites allows", restrict_to_sites="homesite")
    prepare(p, fed, "app", restrict_to_sites=["b"])
    prepare(p, fed, "b", restrict_to_sites="homesite")
    prepare(p, fed, "app", restrict_to_sites="b")


def test_an_unknown_site_in_the_restriction_is_refused() -> None:
    with Pipeline() as p:
        number()
    only(p, "restrict_to_sites", "'z'.*a, b", restrict_to_sites=["a", "z"])


def test_a_cache_at_a_site_outside_the_restriction_is_refused() -> None:
    with Pipeline() as p, TryFromCache("k", site="b") as found:
        found.store(number())
    only(p, "TryFromCache#0", "restrict", restrict_to_sites=["a"])


def test_another_major_version_is_refused_and_another_minor_one_is_not() -> None:
    with Pipeline("v", api_version="1.9") as p:
        number()
    only(p, "api_version", "1.9.*'problems' has 2.1")
    for good in ("2", "2.0", "2.7.3", ""):
        with Pipeline("v", api_version=good) as p:
            number()
        prepare(p, fed, "app")


# parameters and types


def test_a_wrong_parameter_name_is_refused() -> None:
    only(written(call(0, y=Constant(value=1))), "number#0", "operation 'number' has no parameter 'y'")


def test_a_missing_parameter_is_refused() -> None:
    only(written(call(0, "words", times=Constant(value=1))), "words#0", "parameter 'text' of operation 'words' is miss")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"text": Constant(value=3)}, "text: Input should be a valid string, not 3"),
        ({"text": Constant(value="x"), "times": Constant(value="many")}, "times: .*integer"),
        ({"text": Constant(value=None)}, "text: .*string, not None"),
    ],
)
def test_a_literal_of_the_wrong_type_is_refused(args: dict[str, Any], message: str) -> None:
    only(written(call(0, "words", **args)), "words#0", message)


def test_an_edge_between_declared_types_that_cannot_fit_is_refused() -> None:
    with Pipeline() as p:
        words(number())  # type: ignore[call-overload]
    only(p, "words#1", "text is declared str, but number#0 returns int")


def test_edges_that_may_fit_are_accepted() -> None:
    with Pipeline() as p:
        words(words("x")[0])
        number(fast(1))
        fast(words("x"))
        with ForEach(numbers(3)) as element:
            number(element)
            words(element)
    prepare(p, fed, "app")


def test_retries_of_a_generator_are_refused() -> None:
    with Pipeline() as p:
        numbers(3, retry=RetryPolicy())
        numbers(3, deadline=5.0)
    assert [statement for statement, _ in problems(p)] == ["numbers#0", "numbers#1"]


# references


def test_a_reference_to_a_later_node_is_refused() -> None:
    only(written(call(0, x=Ref(node=1)), call(1)), "number#0", "x refers to number#1, which stands later")


def test_a_reference_to_itself_or_to_nothing_is_refused() -> None:
    only(written(call(0, x=Ref(node=0))), "number#0", "refers to itself")
    only(written(call(0, x=Ref(node=7))), "number#0", "refers to n7, which does not exist")
    only(written(call(0), CollectStatement(id=1, node=9)), "collect#1", "n9, which does not exist")


def test_a_reference_into_a_closed_loop_is_refused_with_advice() -> None:
    with Pipeline() as p:
        with ForEach([1]) as element:
            inner = number(element)
        Yield(inner, place="a")
        Yield(element, place="b")
    found = problems(p)
    assert [statement for statement, _ in found] == ["Yield#2", "Yield#3"]
    assert all("collect" in message for _, message in found)


def test_a_reference_into_a_branch_is_refused() -> None:
    with Pipeline() as p:
        with If(PlaceParam("x") > 1) as branch:
            inner = number(1)
        with branch.otherwise():
            Yield(inner, place="a")
        Yield(inner, place="b")
    found = problems(p)
    assert [statement for statement, _ in found] == ["Yield#2", "Yield#3"]
    assert all("branch" in message and "If#0" in message for _, message in found)


def test_a_reference_into_a_cache_block_is_refused_with_advice() -> None:
    with Pipeline() as p:
        with TryFromCache("k") as found:
            inner = number(1)
            found.store(inner)
        Yield(inner)
    only(p, "Yield#2", r"store\(")


def test_a_reference_to_what_has_no_value_is_refused() -> None:
    branch = IfStatement(id=0, cond=Constant(value=True), body=(call(1),))
    only(written(branch, out(2, Ref(node=0))), "Yield#2", "If#0, which has no value")
    only(written(out(0, Constant(value=1)), call(1, x=Ref(node=0))), "number#1", "Yield#0, which has no value")


def test_a_statement_cannot_use_the_block_that_it_is_a_part_of() -> None:
    inside = call(1, x=Ref(node=0))
    cache = CacheStatement(id=0, key=Constant(value="k"), store=Ref(node=1), body=(inside,))
    only(written(cache), "number#1", "TryFromCache#0, which it is a part of")
    loop = ForEachStatement(id=0, seq=Ref(node=0), body=(call(1),))
    assert [s for s, _ in problems(written(loop))] == ["ForEach#0"]


def test_order_after_what_is_inside_a_closed_loop_is_refused() -> None:
    with Pipeline() as p:
        with ForEach([1]) as element:
            inner = number(element)
        number(after=inner)
        number(after=element)
    assert [statement for statement, _ in problems(p)] == ["number#2", "number#3"]


@pytest.mark.parametrize(
    "body",
    [
        (call(0, after=(1,)), call(1, after=(0,))),
        (call(0, after=(2,)), call(1, after=(0,)), call(2, after=(1,))),
        (call(0, after=(0,)),),
        (call(5), call(0, after=(5, 1)), call(1, after=(5, 0))),
    ],
    ids=["two", "three", "one", "behind a good one"],
)
def test_a_cycle_of_order_is_refused_and_named(body: tuple[CallStatement, ...]) -> None:
    found = problems(written(*body))
    assert any(s == "after" and "cycle" in m and "number#0" in m for s, m in found), found


def test_collect_goes_level_by_level() -> None:
    with Pipeline() as p:
        outside = number()
        with ForEach([1]), ForEach([2]) as element:
            inner = number(element)
            with ForEach([3]):
                collect(element)
        collect(inner)
        collect(outside)
    assert [statement for statement, _ in problems(p)] == ["collect#5", "collect#6", "collect#7"]


# names


def test_a_place_or_parameter_used_twice_needs_multiuse_on_all_uses() -> None:
    for first, second in ((False, False), (True, False), (False, True)):
        with Pipeline() as p:
            Yield(PlaceParam("x", multiuse=first), place="a", multiuse=first)
            Yield(PlaceParam("x", multiuse=second), place="a", multiuse=second)
        assert sorted(s for s, _ in problems(p)) == ["PlaceParam('x')", "Yield(place='a')"]
    with Pipeline() as p:
        Yield([PlaceParam("x", multiuse=True)] * 2, place="a", multiuse=True)
        Yield(PlaceParam("x", multiuse=True), place="a", multiuse=True)
    assert prepare(p, fed, "app").params == ("x",)


def test_a_parameter_may_not_be_named_like_a_place() -> None:
    with Pipeline() as p:
        Yield(PlaceParam("x"), place="y")
        Yield(PlaceParam("y"), place="z")
    only(p, "PlaceParam('y')", "same name as a place")


def test_an_id_that_is_used_twice_is_refused() -> None:
    only(written(call(0), call(0)), "number#0", "id 0 is used twice")


# blocks


def test_a_repeat_without_an_end_is_refused() -> None:
    with Pipeline() as p, Repeat(1) as current:
        current.next(number(current))
    only(p, "Repeat#0", "neither times nor until")


def test_blocks_from_a_file_that_pass_nothing_on_are_refused() -> None:
    repeat = RepeatStatement(id=0, carry=Constant(value=1), times=Constant(value=1), body=(call(1),))
    cache = CacheStatement(id=2, key=Constant(value=1), body=(call(3),))
    assert [s for s, _ in problems(written(repeat, cache))] == ["Repeat#0", "TryFromCache#2"]


def test_an_empty_pipeline_is_refused() -> None:
    only(Pipeline("empty"), "", "no statements")


def test_blocks_that_are_nested_without_end_are_refused() -> None:
    body: tuple[Statement, ...] = (call(0),)
    for depth in range(1, 120):
        body = (ForEachStatement(id=depth, seq=Constant(value=[1]), body=body),)
    only(Pipeline("deep", body=body), "", "nested more than 100 deep")


def test_a_correct_pipeline_has_no_problems() -> None:
    assert isinstance(number, Operation)
    with Pipeline() as p:
        number(1)
    prepare(p, fed, "app")
