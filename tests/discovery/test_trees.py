"""Trees of advice: how they grow, and what they tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dfm_async import Advise
from dfm_async.discovery import (
    AdviceContext,
    AdvisedDateRange,
    AdvisedDict,
    AdvisedError,
    AdvisedLiteral,
    AdvisedOneOf,
    AdvisedSubsetOf,
    AdvisedValue,
    BranchFieldAdvice,
    Discovery,
    ErrorFieldAdvice,
    FieldAdvice,
    Okay,
    PartialFieldAdvice,
    SingleFieldAdvice,
    build_advice,
    field_advisor,
)
from dfm_async.discovery.advice import Edge, found_of, single_text
from dfm_async.discovery.advisors import Advisor
from dfm_async.discovery.growth import MOST_BRANCHES, Fields, Growth, failed
from dfm_async.errors import PartialError

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "b", "déjà"])
LISTS = st.lists(SCALARS, max_size=3)


def advised(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    options, flag = st.lists(SCALARS | inner, max_size=3), st.booleans()
    return st.one_of(
        st.builds(AdvisedOneOf, options, flag, flag),
        st.builds(AdvisedSubsetOf, options, flag, flag),
        st.builds(AdvisedDict, st.dictionaries(st.sampled_from("xyz"), SCALARS | inner, max_size=2), flag, flag),
    )


LEAVES = st.one_of(
    st.builds(AdvisedLiteral, SCALARS | LISTS, st.booleans()),
    st.builds(AdvisedDateRange, st.just("2026-01-01"), st.just("2026-12-31"), st.booleans()),
    st.builds(AdvisedError, st.sampled_from(["no", "never"])),
    st.just(Okay()),
)
ADVICE = st.recursive(LEAVES, advised, max_leaves=5)


class Raises:
    """An advisor that raises, in a table of answers."""


TABLES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(ADVICE | st.just(Raises()) | st.just(3), min_size=1, max_size=3)
)


def grow(table: dict[str, list[Any]], values: dict[str, Any]) -> Growth:
    """Grows a tree whose advisors give other answers from time to time."""
    growth = Growth([Advisor(name, 0, name, lambda *_: None) for name in sorted(table)], Fields(given=values))
    asked = 0
    while questions := growth.questions():
        answers = []
        for question in questions:
            for before in sorted(table):
                question.context.get(before, None)
            answer = table[question.advisor.field][asked % len(table[question.advisor.field])]
            answers.append(failed(RuntimeError("raised")) if isinstance(answer, Raises) else answer)
            asked += 1
        growth.answer(answers)
    return growth


def edges(advice: Edge, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Edge]]:
    if isinstance(advice, FieldAdvice):
        for value, edge in advice.options():
            yield (*path, advice.field), value, edge
            yield from edges(edge, (*path, advice.field))


@given(TABLES, st.dictionaries(st.sampled_from("abcd"), SCALARS, max_size=2))
def test_any_answers_of_advisors_give_a_complete_tree(table: dict[str, list[Any]], values: dict[str, Any]) -> None:
    tree = grow(table, values).tree()
    found = list(edges(tree))
    for path, value, edge in found:
        assert list(path) == sorted(set(path)), "a field comes once, in the order of its advisors"
        assert path[-1] not in values or isinstance(edge, ErrorFieldAdvice), "what is given is said only if it is wrong"
        assert not isinstance(edge, BranchFieldAdvice) or len(edge.branches) > 1
        json.dumps(value)
    assert found_of(msgspec.to_builtins(tree)) == tree
    discovery = Discovery("p", {"s": {"n": tree}})
    assert Discovery.from_json(discovery.to_json()) == discovery
    messages = [edge.msg for _, _, edge in found if isinstance(edge, ErrorFieldAdvice)]
    assert [error.message for error in discovery.errors()] == messages
    text = str(discovery)
    for message in messages:
        assert message in text
    assert discovery._repr_html_().count("<li>") == discovery._repr_html_().count("</li>")
    if tree is not None:
        assert {m for found in tree.collect_error_messages().values() for m in found} == set(messages)
        ends = [edge for _, _, edge in found if edge is None or isinstance(edge, PartialFieldAdvice)]
        assert tree.has_good_options() == bool(ends)
        assert bool(list(tree)) <= tree.has_good_options()


@given(TABLES)
@example({"a": [AdvisedOneOf([None, None], False, True)], "b": [AdvisedOneOf([1]), Raises()]})
def test_every_good_value_can_be_selected(table: dict[str, list[Any]]) -> None:
    def follow(advice: FieldAdvice) -> None:
        for value in advice:
            try:
                behind = advice.select(value)
            except PartialError:
                continue  # it is good, as far as anybody knows
            if behind is not None:
                assert behind.has_good_options()
                follow(behind)

    tree = grow(table, {}).tree()
    if tree is not None:
        follow(tree)


class Shop:
    """Advisors of several orders."""

    asked: list[str]

    def __init__(self) -> None:
        self.asked = []

    @property
    def closed(self) -> bool:
        raise AssertionError("looking for advisors runs no code")

    def _note(self, name: str) -> AdvisedValue:
        self.asked.append(name)
        return AdvisedLiteral(name)

    @field_advisor("last")
    async def a_last(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return self._note("last")

    @field_advisor("before", order=-2)
    def z_before(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return self._note("before")

    @field_advisor("second", order=10_500)
    async def second(self, value: Any, context: AdviceContext) -> AdvisedValue:
        return self._note("second")

    @field_advisor("first", order=0)
    @staticmethod
    def first(value: Any, context: AdviceContext) -> AdvisedValue:
        return AdvisedOneOf([isinstance(value, Advise), context.get("given", None)])


async def test_positive_orders_come_first_and_negative_ones_last() -> None:
    shop = Shop()
    tree = await build_advice(shop, given=7)
    assert shop.asked == ["second", "before", "last"]
    assert isinstance(tree, SingleFieldAdvice)
    assert (tree.field, tree.value) == ("first", [True, 7])


async def test_an_override_that_is_not_marked_is_not_an_advisor() -> None:
    class Quiet(Shop):
        async def second(self, value: Any, context: AdviceContext) -> AdvisedValue:
            raise AssertionError

    shop = Quiet()
    await build_advice(shop)
    assert shop.asked == ["before", "last"]


async def test_an_unknown_field_is_an_error_with_a_hint() -> None:
    class Curious:
        @field_advisor("x")
        async def x(self, value: Any, context: AdviceContext) -> AdvisedValue:
            return AdvisedLiteral(context.get("y"))

    tree = await build_advice(Curious())
    assert tree is not None
    (message,) = tree.collect_error_messages()["x"]
    assert "nothing is known of field 'y'" in message
    assert "order=" in message


async def test_a_tree_that_would_be_too_large_ends_with_an_error() -> None:
    class Many:
        @field_advisor("x", order=0)
        async def x(self, value: Any, context: AdviceContext) -> AdvisedValue:
            return AdvisedOneOf(range(MOST_BRANCHES + 5), split_on_advice=True)

    tree = await build_advice(Many())
    assert isinstance(tree, BranchFieldAdvice)
    assert len(tree.branches) == MOST_BRANCHES + 1
    assert "more than 10,000" in next(iter(tree.collect_error_messages()["x"]))
    assert "and 9,951 more" in str(Discovery(None, {"s": {"n": tree}}))


def test_selecting_a_wrong_value_names_what_is_possible() -> None:
    tree = BranchFieldAdvice(
        field="city",
        branches=(
            ("Rome", SingleFieldAdvice(field="day", value=["mon", "tue"], form="one of")),
            ("Oslo", ErrorFieldAdvice("it is dark")),
            ("Bari", PartialFieldAdvice()),
        ),
    )
    assert list(tree) == ["Rome", "Bari"]
    day = tree.select("Rome")
    assert day is not None
    assert list(day) == ["mon", "tue"]
    assert day.select("tue") is None
    with pytest.raises(ValueError, match=r"day='wed' is not advised; it may be: 'mon', 'tue'"):
        day.select("wed")
    with pytest.raises(ValueError, match="it is dark"):
        tree.select("Oslo")
    with pytest.raises(ValueError, match="not advised"):
        tree.select("Paris")
    with pytest.raises(PartialError, match="discover again with city='Bari'"):
        tree.select("Bari")


@pytest.mark.parametrize(
    "data", ["{}", "[]", '{"pipeline": null, "sites": {"s": {"n": {"kind": "partial"}}}}', b"\xff"]
)
def test_other_data_is_not_a_discovery(data: Any) -> None:
    with pytest.raises(ValueError, match=r"advice|discovery"):
        Discovery.from_json(data)


def test_advice_of_dfm_itself_counts_as_ours() -> None:
    # Classes of the same names and with the same attributes, as its package has them.
    theirs = {
        name: type(name, (), {"__module__": "nv_dfm_core.exec.discovery._advised_values"})
        for name in ("AdvisedOneOf", "AdvisedLiteral", "AdvisedDict")
    }

    def make(name: str, **attributes: Any) -> Any:
        found = theirs[name]()
        vars(found).update({f"_{key}": value for key, value in attributes.items()}, _break_on_advice=False)
        return found

    literal = make("AdvisedLiteral", value=2)
    options = [1, literal, make("AdvisedDict", dictionary={"k": literal}, allow_extras=False)]
    growth = Growth([Advisor("x", 0, "x", lambda *_: None, foreign=True)], Fields())
    growth.questions()
    growth.answer([make("AdvisedOneOf", values=options, split_on_advice=False)])
    assert growth.tree() == SingleFieldAdvice(field="x", value=[1, 2, {"k": 2}], form="one of")


def test_ranges_of_dates_look_the_same_wherever_they_are() -> None:
    days = AdvisedDateRange("2026-01-01", "2026-01-31").as_pydantic_value()
    texts = {
        "date range": (days, "from 2026-01-01 to 2026-01-31"),
        "dict": (
            {"day": days, "at": ["é", days]},
            '{"day": from 2026-01-01 to 2026-01-31, "at": ["é", from 2026-01-01 to 2026-01...',
        ),
        "one of": ([1, days], "one of 1, from 2026-01-01 to 2026-01-31"),
        "subset of": ([days], "some of from 2026-01-01 to 2026-01-31"),
    }
    for form, (value, text) in texts.items():
        assert single_text(SingleFieldAdvice(field="day", value=value, form=cast(Any, form))) == text
    branch = BranchFieldAdvice(field="day", branches=((days, None), ({"day": days, "n": True}, None)))
    assert str(Discovery(None, {"lab": {"node": branch}})).splitlines()[-2:] == [
        "      ├─ from 2026-01-01 to 2026-01-31",
        '      └─ {"day": from 2026-01-01 to 2026-01-31, "n": true}',
    ]


def test_messages_of_several_lines_and_for_terminals_stay_in_their_line_of_the_tree() -> None:
    message = "2 errors\n  first: wrong\n\x1b[31m  second: wrong"
    tree = SingleFieldAdvice(field="city", value=None, edge=ErrorFieldAdvice(message, ""))
    text = str(Discovery(None, {"lab": {"look#0": tree, "look#1": ErrorFieldAdvice(message, "")}}))
    shown = r"2 errors first: wrong \x1b[31m second: wrong"
    assert text.splitlines() == ["Discovery", "lab", "├─ look#0", f"│  └─ city  ✗ {shown}", f"└─ look#1  ✗ {shown}"]
