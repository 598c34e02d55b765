"""Everything that is wrong with a pipeline is reported at once, each problem with its statement."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

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
    RetryPolicy,
    TryFromCache,
    Yield,
    collect,
    gather,
)
from dfm_async.language.expressions import Constant, Ref
from dfm_async.language.statements import (
    CacheStatement,
    CallStatement,
    ChoiceStatement,
    CollectStatement,
    ForEachStatement,
    GatherStatement,
    IfStatement,
    RepeatStatement,
    Statement,
    YieldStatement,
)
from dfm_async.planning.prepare import prepare

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


def statements(pipeline: Pipeline) -> list[str]:
    """The statements that have problems."""
    return [statement for statement, _ in problems(pipeline)]


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
        fast(1, provider="cpu")
    found = problems(p)
    for statement, message in [
        ("number#0", "no site 'nowhere'.*a, b"),
        ("words#1", "text: Input should be a valid string"),
        ("number#2", r"x is declared int, but words#1 returns list\[str\]"),
        ("Repeat#3", "neither times nor until"),
        ("number#5", r"inside Repeat#3.*collect"),
        ("fast#8", "provider 'cpu'"),
        ("api_version", "9.0.*2.1"),
    ]:
        matches = [m for s, m in found if s == statement and re.search(message, m)]
        assert len(matches) == 1, (statement, found)
    assert len(found) == 7


# operations and sites


ONE = Constant(value=1)


@pytest.mark.parametrize(
    ("body", "statement", "message"),
    [
        ([call(0, "nmber")], "nmber#0", "no operation 'nmber' in federation 'problems'.*fast, number, numbers"),
        ([call(0, y=ONE)], "number#0", "operation 'number' has no parameter 'y'"),
        ([call(0, "words", times=ONE)], "words#0", "parameter 'text' of operation 'words' is missing"),
        ([call(0, "words", text=Constant(value=3))], "words#0", "text: Input should be a valid string, not 3"),
        ([call(0, "words", text=Constant(value="x"), times=Constant(value="many"))], "words#0", "times: .*integer"),
        ([call(0, "words", text=Constant(value=None))], "words#0", "text: .*string, not None"),
        ([call(0, x=Ref(node=1)), call(1)], "number#0", "x refers to number#1, which is defined later"),
        ([call(0, x=Ref(node=0))], "number#0", "refers to itself"),
        ([call(0, x=Ref(node=7))], "number#0", "refers to n7, which does not exist"),
        ([call(0), CollectStatement(id=1, node=9)], "collect#1", "n9, which does not exist"),
        ([IfStatement(id=0, cond=ONE, body=(call(1),)), out(2, Ref(node=0))], "Yield#2", "If#0, which has no value"),
        ([out(0, ONE), call(1, x=Ref(node=0))], "number#1", "Yield#0, which has no value"),
        ([call(0), call(0)], "number#0", "id 0 is used twice"),
    ],
)
def test_a_pipeline_from_a_file_is_checked(body: list[Statement], statement: str, message: str) -> None:
    only(written(*body), statement, message)


def cached(site: str) -> None:
    with TryFromCache("k", site=site) as found:
        found.store(number())


def only_at(*sites: str) -> dict[str, Any]:
    return {"restrict_to_sites": list(sites)}


@pytest.mark.parametrize(
    ("write", "statement", "message", "options"),
    [
        (lambda: number(site="c"), "number#0", "no site 'c'.*a, b", {}),
        (lambda: number(site=BestOf(["a", "c"])), "number#0", "BestOf names site 'c'", {}),
        (lambda: cached("c"), "TryFromCache#0", "no site 'c'", {}),
        (lambda: number(site=b), "number#0", "site 'b' does not offer operation 'number'.*offered by a", {}),
        (lambda: number(site=BestOf(["b"])), "number#0", "no site among .'b'. offers operation 'number'", {}),
        (
            lambda: fast(1, provider="tpu", site="a"),
            "fast#0",
            "site 'a' does not offer operation 'fast' from provider 'tpu' .offered by a from provider 'gpu'",
            {},
        ),
        (
            lambda: fast(1, provider="tpu"),
            "fast#0",
            "no site offers operation 'fast' from provider 'tpu' .offered by a from provider 'gpu'",
            {},
        ),
        (lambda: words("x"), "words#0", "restricted to", only_at("a")),
        (lambda: words("x", site="b"), "words#0", "restrict_to_sites allows", only_at("a")),
        (lambda: words("x", site="b"), "words#0", "restrict_to_sites allows", {"restrict_to_sites": "homesite"}),
        (lambda: cached("b"), "TryFromCache#0", "restrict", only_at("a")),
        (number, "restrict_to_sites", "'z'.*a, b", only_at("a", "z")),
        (lambda: words(number()), "words#1", "text is declared str, but number#0 returns int", {}),  # type: ignore[call-overload]
    ],
)
def test_a_site_provider_or_type_that_does_not_fit_is_reported(
    write: Callable[[], object], statement: str, message: str, options: dict[str, Any]
) -> None:
    with Pipeline() as p:
        write()
    only(p, statement, message, **options)


def test_a_declared_parameter_that_does_not_fit_its_use_is_reported() -> None:
    @fed.pipeline
    def misfit(v: str) -> Any:
        return number(v)  # type: ignore[call-overload]

    only(misfit, "number#0", "x is declared int, but parameter 'v' is declared str")

    @fed.pipeline
    def nested(v: list[int]) -> None:
        with ForEach([1, 2]):
            Yield(words(text=v))  # type: ignore[call-overload]

    only(nested, "words#1", r"text is declared str, but parameter 'v' is declared list\[int\]")


def test_a_result_of_another_type_than_the_function_declares_is_refused() -> None:
    @fed.pipeline
    def text() -> str:
        return number(1)  # type: ignore[return-value]

    only(text, "Yield#1", "the result is declared str, but number#0 returns int")

    @fed.pipeline
    def literal() -> int:
        return "one"  # type: ignore[return-value]

    only(literal, "Yield#0", "the result: Input should be a valid integer.*not 'one'")

    @fed.pipeline
    def given(v: str) -> int:
        return v  # type: ignore[return-value]

    only(given, "Yield#0", "the result is declared int, but parameter 'v' is declared str")


def test_a_result_that_may_fit_what_the_function_declares_is_accepted() -> None:
    def wider() -> float:
        return number(1)

    def streamed() -> list[int]:
        return numbers(3)

    def collected() -> list[int]:
        with ForEach([1, 2]) as x:
            y = number(x)
        return collect(y)

    def untyped():  # type: ignore[no-untyped-def]
        return number(1)

    def unknown() -> str:
        return fast(1)  # type: ignore[no-any-return]

    def field() -> int:
        return words("a")[0]  # type: ignore[return-value]

    for function in (wider, streamed, collected, untyped, unknown, field):
        assert prepare(fed.pipeline(function), fed, "app").places == ("result",)


def test_a_declared_parameter_that_may_fit_its_use_is_accepted() -> None:
    @a.operation
    def half(x: float | None, y: str = "") -> float:
        return (x or 0) / 2

    @fed.pipeline
    def fitting(whole: int, any_: Any, flag: bool, text: Literal["a"], untyped, some: int | str, parts: dict[str, str]):  # type: ignore[no-untyped-def]
        half(whole, text)
        half(any_, some)  # type: ignore[arg-type]
        half(flag)
        half(untyped)
        half(some)  # type: ignore[arg-type]
        return half(1.0, parts["text"])

    assert prepare(fitting, fed, "app").params


def test_a_class_that_was_defined_again_is_named_with_a_remedy() -> None:
    cells = Federation("cells")
    lab = cells.site("lab")
    again = r"\(class 'Point' was defined again after the operation or pipeline that declares it: run the cell of the"

    def cell() -> Any:
        @dataclasses.dataclass
        class Point:
            a: int

        Point.__qualname__ = "Point"
        return Point

    before, after = cell(), cell()

    def declaring(function: Any, **types: Any) -> Any:
        function.__annotations__ = types
        return function

    make = lab.operation(declaring(lambda: None, **{"return": before}), name="make")
    shift = lab.operation(declaring(lambda x, others: x, x=after, others=list[after]), name="shift")  # type: ignore[valid-type]

    for passed in ([after(1)], [after(1), after(2)]):
        with Pipeline() as p:
            shift(after(1), passed)
        prepare(p, cells, "home")
    for write, message in (
        (lambda: shift(make(), []), rf"x is declared Point, but make#0 returns Point {again}"),
        (lambda: shift(before(3), []), rf"x: Input should be .* Point, not Point\(a=3\) {again}"),
        (lambda: shift(after(3), [before(3)]), rf"others: \[0\]: Input should be .* Point, .* {again}"),
        (lambda: shift(PlaceParam("x", default=before(3)), []), rf"x: the default of .* Point, .* {again}"),
    ):
        with Pipeline() as p:
            write()  # type: ignore[no-untyped-call]
        with pytest.raises(PipelineError, match=message):
            prepare(p, cells, "home")

    shifted = cells.pipeline(name="shifted")(declaring(lambda x: shift(x, []), x=before))
    with pytest.raises(PipelineError, match=rf"but parameter 'x' is declared Point {again}"):
        prepare(shifted, cells, "home")


def test_sites_that_the_restriction_allows_are_accepted() -> None:
    with Pipeline() as p:
        words("x", site="b")
    prepare(p, fed, "app", restrict_to_sites=["b"])
    prepare(p, fed, "b", restrict_to_sites="homesite")
    prepare(p, fed, "app", restrict_to_sites="b")


def test_another_major_version_is_refused_and_another_minor_one_is_not() -> None:
    with Pipeline("v", api_version="1.9") as p:
        number()
    only(p, "api_version", "1.9.*'problems' has 2.1")
    for good in ("2", "2.0", "2.7.3", ""):
        with Pipeline("v", api_version=good) as p:
            number()
        prepare(p, fed, "app")


# parameters and types


def test_edges_that_may_fit_are_accepted() -> None:
    with Pipeline() as p:
        words(words("x")[0])
        number(fast(1))
        fast(words("x"))
        with ForEach(numbers(3)) as element:
            number(element)
            words(element)  # type: ignore[call-overload]
    prepare(p, fed, "app")


def test_retries_of_a_generator_are_refused() -> None:
    with Pipeline() as p:
        numbers(3, retry=RetryPolicy())
        numbers(3, deadline=5.0)
    assert statements(p) == ["numbers#0", "numbers#1"]


# references


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


def test_a_statement_cannot_use_the_block_that_it_is_a_part_of() -> None:
    inside = call(1, x=Ref(node=0))
    cache = CacheStatement(id=0, key=Constant(value="k"), store=Ref(node=1), body=(inside,))
    only(written(cache), "number#1", "TryFromCache#0, which it is a part of")
    loop = ForEachStatement(id=0, seq=Ref(node=0), body=(call(1),))
    assert statements(written(loop)) == ["ForEach#0"]


def test_order_after_what_is_inside_a_closed_loop_is_refused() -> None:
    with Pipeline() as p:
        with ForEach([1]) as element:
            inner = number(element)
        number(after=inner)
        number(after=element)
    assert statements(p) == ["number#2", "number#3"]


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
    assert statements(p) == ["collect#5", "collect#6", "collect#7"]


# names


def test_places_and_parameters_can_be_used_twice_with_or_without_multiuse() -> None:
    for first, second in ((False, False), (True, False), (False, True), (True, True)):
        with Pipeline() as p:
            Yield([PlaceParam("x", multiuse=first)] * 2, place="a", multiuse=first)
            Yield(PlaceParam("x", multiuse=second), place="a", multiuse=second)
        plan = prepare(p, fed, "app")
        assert (plan.params, plan.places) == (("x",), ("a",))


def test_defaults_are_checked_as_literals_are() -> None:
    with Pipeline() as p:
        number(PlaceParam("x", default="3"))
        number(PlaceParam("y", default=1))
        words("a", PlaceParam("y", default=2))
        Yield([PlaceParam("z", default=threading.Lock())])
    found = problems(p)
    assert found == [
        ("number#0", "x: the default of PlaceParam('x'): expected int, not '3'"),
        ("PlaceParam('y')", "has different defaults, 1 and 2: give it one default"),
        ("PlaceParam('z')", found[-1][1]),
    ]
    assert re.match("default: .*lock.*cannot be sent", found[-1][1])
    with Pipeline() as p, pytest.raises(PipelineError, match=r"default= must be known when the pipeline is built"):
        PlaceParam("x", default=[number(1)])


def test_fallbacks_are_checked_as_literals_are() -> None:
    with Pipeline() as p:
        number(1, fallback="3")
        fast(1, provider="gpu", fallback=threading.Lock())
        numbers(1, fallback=[])
    found = problems(p)
    assert found[1:3] == [("number#0", "fallback: expected int, not '3'"), ("fast#1", found[2][1])]
    assert found[0] == ("numbers#2", "fallback: the operation must return a value; this one is a generator")
    assert re.match("fallback: .*lock.*cannot be sent", found[2][1])
    with Pipeline() as p:
        x = number(1)
        with pytest.raises(PipelineError, match="fallback= must be known"):
            number(1, fallback=x)
        with ForEach([1]) as x, pytest.raises(PipelineError, match="errors must be 'fail', 'skip' or 'keep'"):
            collect(x, errors="ignore")  # type: ignore[call-overload]


def test_values_of_branches_are_used_by_their_branch() -> None:
    with Pipeline() as p:
        before = number(1)
        with If(before > 1) as branch:
            a = number(2)
            with pytest.raises(PipelineError, match="comes after the If block"):
                branch.value(a, 1)
        with branch.otherwise():
            b = number(3)
        with ForEach([1]), pytest.raises(PipelineError, match="in the same block as its If"):
            branch.value(a, b)
        number(branch.value(a, b))
        number(branch.value(b, before))
        number(a)
        with pytest.raises(PipelineError, match="used twice"):
            branch.otherwise()
    assert problems(p) == [
        ("If.value#7", "value refers to number#3, which is inside If#1: use it in that branch, or after it as "
         "branch.value(a, b), with a value for either branch"),
        ("number#9", "x refers to number#2, which is inside If#1: use it in that branch, or after it as "
         "branch.value(a, b), with a value for either branch"),
    ]  # fmt: skip
    with Pipeline() as p, If(number(1) > 1) as branch:
        pass
    with Pipeline() as p:
        with If(number(1) > 1) as branch:
            pass
        branch.value(1, 2)
        with pytest.raises(PipelineError, match="must come before value"):
            branch.otherwise()
    choice = ChoiceStatement(id=1, branch=0, value=ONE, otherwise=ONE)
    only(written(call(0), choice), "If.value#1", "must be after an If, in the same block")
    branch_only = IfStatement(id=0, cond=ONE, body=(call(2),))
    only(written(choice, branch_only), "If.value#1", "must be after an If, in the same block")


def test_gather_takes_calls_that_return() -> None:
    with Pipeline() as p:
        a, b = number(1), fast({"k": 1}, provider="gpu")
        refused: list[tuple[Any, dict[str, Any], str]] = [
            (a, {}, "takes a list of calls, not a node"),
            ([1], {}, "takes a node of this pipeline, not 1"),
            ([b["k"]], {}, "not fields of them"),
            ([a, b], {"at_least": 3}, "at_least must be a number from 0 to 2, the number of calls, not 3"),
            ([a], {"at_least": True}, "at_least must be a number"),
            ([a], {"within": 0}, "within must be a number of seconds, not 0"),
            ([a], {"within": float("inf")}, "within must be a number of seconds, not inf"),
        ]
        for wrong, options, message in refused:
            with pytest.raises(PipelineError, match=message):
                gather(wrong, **options)
        with Repeat(1, times=2) as x:
            x.next(number(x))
        gather([a, a, x])
        gather([numbers(3)])
    assert sorted(problems(p)) == [
        ("gather#11", "has the same call twice"),
        ("gather#11", "takes calls of operations, not Repeat#9"),
        ("numbers#12", "gather: the operation must return a value; this one is a generator"),
    ]
    only(
        written(call(0), GatherStatement(id=1, calls=(0,), at_least=2)), "gather#1", "at_least is 2, but it has 1 calls"
    )


def test_one_default_is_enough_and_null_is_one() -> None:
    with Pipeline() as p:
        Yield([PlaceParam("x"), PlaceParam("x", default=None), PlaceParam("x", default=None), PlaceParam("y")])
    assert prepare(p, fed, "app").defaults == {"x": None}


# blocks


def test_blocks_from_a_file_that_pass_nothing_on_are_refused() -> None:
    repeat = RepeatStatement(id=0, carry=Constant(value=1), times=Constant(value=1), body=(call(1),))
    cache = CacheStatement(id=2, key=Constant(value=1), body=(call(3),))
    assert statements(written(repeat, cache)) == ["Repeat#0", "TryFromCache#2"]


def test_an_empty_pipeline_is_refused() -> None:
    only(Pipeline("empty"), "", "no statements")


def test_blocks_that_are_nested_without_end_are_refused() -> None:
    body: tuple[Statement, ...] = (call(0),)
    for depth in range(1, 120):
        body = (ForEachStatement(id=depth, seq=Constant(value=[1]), body=body),)
    only(Pipeline("deep", body=body), "", "nested more than 100 deep")
