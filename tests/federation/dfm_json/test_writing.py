"""Pipelines become DFM's JSON and come back as they were; what DFM cannot express is reported, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from upath import UPath

from dfm_async import (
    BestOf,
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
from dfm_async.federation.dfm_json.values import is_tagged
from dfm_async.language import expressions as ex
from dfm_async.language import statements
from tests.federation.dfm_json.rig import DATA, minifed

FED = minifed()
Square = FED.operations["deep.math.Square"]
GreetMe = FED.operations["users.GreetMe"]

_names = st.text(min_size=1, max_size=5)
_literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _names,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_names | st.sampled_from(["tag", "id"]), inner, max_size=3)
    ),
    max_leaves=5,
)
_steps = st.one_of(
    st.just(()),
    st.integers(-5, 5).map(lambda key: (ex.Item(key=key),)),
    _names.map(lambda key: (ex.Item(key=key),)),
    st.sampled_from(["x", "name"]).map(lambda name: (ex.Attribute(name=name),)),
)


class _Author:
    """Writes random pipelines that DFM has words for."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw: Any = data.draw
        self._ids = 0
        self._named = 0

    def number(self) -> int:
        self._ids += self._draw(st.integers(1, 3))
        return self._ids

    def unique(self) -> str:
        """A name that is used once, so that DFM does not need multiuse for it."""
        self._named += 1
        return f"{self._draw(_names)}{self._named}"

    def reference(self, known: list[int]) -> ex.Ref:
        return ex.Ref(node=self._draw(st.sampled_from(known)), path=self._draw(_steps))

    def value(self, known: list[int], depth: int = 0) -> ex.Expression:
        kinds = ["constant", "parameter", *(["ref"] if known else []), *(["list", "dict"] if depth < 2 else [])]
        kind = self._draw(st.sampled_from(kinds))
        if kind == "ref":
            return self.reference(known)
        if kind == "parameter":
            return ex.Parameter(name=self.unique(), multiuse=self._draw(st.booleans()))
        if kind == "constant":
            return ex.Constant(value=self._draw(_literals))
        items = [self.value(known, depth + 1) for _ in range(self._draw(st.integers(1, 3)))]
        if all(isinstance(item, ex.Constant) for item in items):
            return ex.Constant(value=[item.value for item in items if isinstance(item, ex.Constant)])
        if kind == "list":
            return ex.Items(type="list", items=tuple(items))
        return ex.Entries(entries=tuple((ex.Constant(value=f"k{index}"), item) for index, item in enumerate(items)))

    def condition(self, known: list[int], depth: int = 0) -> ex.Expression:
        kinds = ["constant", *(["ref"] if known else []), *(["and", "not", "compare"] if depth < 3 else [])]
        kind = self._draw(st.sampled_from(kinds))
        if kind == "ref":
            return self.reference(known)
        if kind == "not":
            return ex.Negation(term=self.condition(known, depth + 1))
        if kind == "and":
            terms = tuple(self.condition(known, depth + 1) for _ in range(self._draw(st.integers(2, 3))))
            return ex.Combination(op=self._draw(st.sampled_from(["and", "or"])), terms=terms)
        if kind == "compare":
            left, right = self.condition(known, depth + 1), self.condition(known, depth + 1)
            return ex.Comparison(
                op=self._draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">="])), left=left, right=right
            )
        return ex.Constant(value=self._draw(_literals.filter(lambda value: not isinstance(value, dict))))

    def block(self, known: list[int], waitable: list[int], depth: int = 0) -> tuple[statements.Statement, ...]:
        known, waitable = list(known), list(waitable)
        return tuple(self.statement(known, waitable, depth) for _ in range(self._draw(st.integers(0, 4))))

    def statement(self, known: list[int], waitable: list[int], depth: int) -> statements.Statement:
        kinds = ["call", "greet", "yield", *(["if"] if depth < 3 else [])]
        kinds += ["loop", "cache"] if depth < 3 and known else []
        kind = self._draw(st.sampled_from(kinds))
        number = self.number()
        after = (self._draw(st.sampled_from(waitable)),) if waitable and self._draw(st.booleans()) else ()
        if kind == "yield":
            value, place = self.value(known), self.unique()
            return statements.YieldStatement(
                id=number, value=value, place=place, multiuse=self._draw(st.booleans()), after=after
            )
        if kind == "if":
            return statements.IfStatement(
                id=number, cond=self.condition(known), body=self.block(known, waitable, depth + 1)
            )
        if kind == "loop":
            seq = self.reference(known)
            return statements.ForEachStatement(
                id=number, seq=seq, body=self.block([*known, number], waitable, depth + 1)
            )
        if kind == "cache":
            key = self.reference(known)
            body = self.block(known, waitable, depth + 1)
            inside = [*known, *(statement.id for statement in body if isinstance(statement, statements.CallStatement))]
            found: statements.Statement = statements.CacheStatement(
                id=number, key=key, store=self.reference(inside), body=body
            )
        else:
            options = self.greet(known) if kind == "greet" else self.square(known)
            found = statements.CallStatement(id=number, after=after, **options)
        known.append(number)
        waitable.append(number)
        return found

    def square(self, known: list[int]) -> dict[str, Any]:
        site = self._draw(st.sampled_from([None, "alpha", "beta", BestOf(["alpha", "beta"]), BestOf([])]))
        return {"operation": "deep.math.Square", "args": {"x": self.value(known)}, "site": site}

    def greet(self, known: list[int]) -> dict[str, Any]:
        args = {"name": self.value(known), "opt": self.value(known)}
        provider = self._draw(st.sampled_from([None, "prov"]))
        if provider is None and self._draw(st.booleans()):
            args["greeting"] = ex.Constant(value=self._draw(_names))
        return {"operation": "users.GreetMe", "args": args, "site": "alpha", "provider": provider}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_pipeline_comes_back_from_dfms_json_as_it_was(data: st.DataObject) -> None:
    body = _Author(data).block([], [])
    version = data.draw(st.sampled_from(["", "0.1.0"]))
    pipeline = Pipeline(data.draw(st.none() | _names), api_version=version, body=body)
    text = json.dumps(FED.pipeline_to_dfm(pipeline))
    assert FED.pipeline_from_dfm(text) == pipeline


@settings(max_examples=50, deadline=None)
@given(value=_literals)
def test_a_literal_comes_back_or_is_refused_because_it_looks_like_something_else(value: Any) -> None:
    with Pipeline() as pipeline:
        Yield([value, {"tag": value}, {"id": value}])
    if is_tagged([value, {"tag": value}, {"id": value}]):
        with pytest.raises(PipelineError, match="take for something else"):
            FED.pipeline_to_dfm(pipeline)
    else:
        assert FED.pipeline_from_dfm(FED.pipeline_to_dfm(pipeline)) == pipeline


LOOKALIKES: list[Any] = [
    {"tag": "@dfm-place-param", "place": "x"},
    {"tag": "@dfm-advise", "advise": "Field"},
    {"tag": "__dfm__pickled__", "value": ""},
    {"id": {"tag": "@dfm-node", "ident": 0}, "sel": None},
]


@pytest.mark.parametrize("value", LOOKALIKES, ids=str)
def test_a_literal_that_looks_like_a_tagged_value_is_not_written(value: Any) -> None:
    for literal in (value, [1, value], {"k": value}):
        with Pipeline() as pipeline:
            Yield(literal)
        with pytest.raises(PipelineError, match="take for something else"):
            FED.pipeline_to_dfm(pipeline)
    with Pipeline() as hidden:
        Yield(value | {"more": Square(2)})
    with pytest.raises(PipelineError, match="take for something else"):
        FED.pipeline_to_dfm(hidden)


def test_everything_that_dfm_cannot_express_is_reported_at_once() -> None:
    with Pipeline("ours") as pipeline:
        first = Square(x=1, retry=RetryPolicy(attempts=2), deadline=5.0)
        second = Square(x=(1, 2), after=[first, first])
        with Repeat(first, times=2) as current:
            current.next(Square(current["a"]["b"]))
        with ForEach([1, 2], concurrency=3) as element:
            third = Square(element)
        collect(third)
        with If(PlaceParam("p") > 3) as branch:
            Yield(first > 3)
        with branch.otherwise():
            Yield(second[True], place="p")
        with TryFromCache(key="k", site="alpha") as cached:
            cached.store(5)
        GreetMe(name="x", greeting="y")
        GreetMe(name="x", n=None)
        Yield({1: first})
        Yield(PlaceParam("q").x)
        Yield(first._private)
    with pytest.raises(PipelineError) as caught:
        FED.pipeline_to_dfm(pipeline)
    assert caught.value.__notes__ == ["Pipeline.save_to_file writes all of this, in a format of our own."]
    found = [str(problem) for problem in caught.value.problems]
    expected = [
        ("deep.math.Square#0", "retry="),
        ("deep.math.Square#0", "deadline="),
        ("deep.math.Square#1", "waits for 2 nodes"),
        ("deep.math.Square#1", "(1, 2)"),
        ("Repeat#2", "DFM"),
        ("deep.math.Square#3", "n2['a']['b']"),
        ("ForEach#4", "concurrency="),
        ("ForEach#4", "the sequence must be a node"),
        ("collect#6", "DFM"),
        ("If#7", "otherwise()"),
        ("If#7", "PlaceParam('p')"),
        ("Yield#8", "n0 > 3"),
        ("TryFromCache#10", "site="),
        ("TryFromCache#10", "the key must be a node"),
        ("TryFromCache#10", "what is stored must be a node"),
        ("users.GreetMe#11", "not fixed to a site that adds it"),
        ("users.GreetMe#12", "None for 'n'"),
        ("Yield#13", "the key 1 is not a string"),
        ("Yield#14", "PlaceParam('q').x"),
        ("Yield#15", "n0._private"),
        ("PlaceParam('p')", "same name as a place"),
    ]
    assert len(found) == len(expected), found
    for text, (label, part) in zip(found, expected, strict=True):
        assert text.startswith(f"{label}: ")
        assert part in text


def test_an_operation_that_is_not_of_the_federation_is_reported() -> None:
    pipeline = Pipeline(body=(statements.CallStatement(id=0, operation="nothing"),))
    with pytest.raises(PipelineError, match="has no such operation"):
        FED.pipeline_to_dfm(pipeline)


def test_pipelines_are_written_into_new_folders_and_to_urls(tmp_path: Path) -> None:
    pipeline = FED.load_pipeline(DATA / "nv_dfm_core.json")
    url = f"memory://pipelines-{tmp_path.name}/p.json"
    for path in (tmp_path / "new" / "folders" / "p.json", str(tmp_path / "other" / "p.json"), url, UPath(url)):
        FED.save_pipeline(pipeline, path)
        assert FED.load_pipeline(path) == pipeline
    assert UPath(url).exists()
    with Pipeline() as ours:
        Yield((1, 2))
    with pytest.raises(PipelineError):
        FED.save_pipeline(ours, url)
    assert FED.load_pipeline(url) == pipeline, "what cannot be written leaves the file as it was"
    UPath(url).write_bytes(b"[]")
    with pytest.raises(PipelineError, match="memory://pipelines"):
        FED.load_pipeline(url)
