"""Pipelines in DFM's JSON become ours; what is wrong in them is reported with its place, all at once."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Advise, BestOf, ForEach, If, Pipeline, PipelineError, PlaceParam, TryFromCache, Yield
from dfm_async.language.statements import CallStatement, ForEachStatement
from tests.federation.dfm_json.rig import DATA, core, minifed, node, pipeline, ref, square, statement

FED = minifed()


def problems(data: Any) -> dict[str, str]:
    with pytest.raises(PipelineError) as caught:
        FED.pipeline_from_dfm(data)
    return {problem.statement: problem.message for problem in caught.value.problems}


def test_what_nv_dfm_core_writes_is_the_pipeline_that_was_meant() -> None:
    alpha = FED.sites["alpha"].operations
    operations = FED.operations
    with Pipeline("x") as meant:
        a = operations.users.GreetMe(name=PlaceParam("name"), opt=None)
        b = alpha.users.GreetMe(name="x", opt=None, greeting="yo", after=a)
        alpha.users.GreetMe(name=a.x, opt=None, provider="prov")
        operations.deep.math.Square(x=a[0], site=BestOf(["alpha"]))
        Yield([1, {"a": 2}], place="lit")
        Yield([a, b])
        with ForEach(a) as element:
            Yield(element, place="e")
        with If((a == 3) & ~b):
            Yield(a["k"], place="i")
        with TryFromCache(key=a) as cached:
            cached.store(operations.deep.math.Square(x=2.0))
        Yield(cached, place="t")
    found = FED.load_pipeline(DATA / "nv_dfm_core.json")
    renumbered = str(found).replace("n14", "n0").replace("n13", "n12")  # a name and a write have ids there
    assert renumbered == str(meant)
    assert found.api_version == ""


def test_the_older_variant_is_read() -> None:
    with Pipeline(api_version="0.1.0") as meant:
        hello = FED.sites["alpha"].operations.users.GreetMe(name=PlaceParam("name"), greeting="Good day")
        with ForEach(hello) as letter:
            Yield(letter, place="letters")
        Yield(hello)
    found = FED.load_pipeline(DATA / "older.json")
    assert str(found).replace("n4", "n0") == str(meant)


def test_names_are_looked_up_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []

    class Watcher:
        def find_spec(self, name: str, *_: Any) -> None:
            imported.append(name)

    monkeypatch.setattr(sys, "meta_path", [Watcher(), *sys.meta_path])
    FED.load_pipeline(DATA / "nv_dfm_core.json")
    imported.clear()
    names = [
        "antigravity.fly",
        "os.system",
        "nv_dfm_core.api.Pipeline",
        "minifed.lib.Square",
        "dfm.api.Operation",
        "",
        ".",
    ]
    found = problems(pipeline(*(statement(name, number) for number, name in enumerate(names))))
    assert list(found) == [f"/dfm_body/{number}/dfm_class_name" for number in range(len(names))]
    assert imported == []


def test_integers_stay_and_names_get_numbers_of_their_own() -> None:
    found = FED.pipeline_from_dfm(pipeline(square("a"), square(0), square(7), square("b", ref("a")), square(-1)))
    assert [s.id for s in found.body] == [8, 0, 7, 9, 10]


def test_null_for_what_was_left_out_leaves_the_default() -> None:
    keys = {"name": "x", "n": None, "opt": None, "greeting": None}
    found = FED.pipeline_from_dfm(pipeline(statement("minifed.fed.site.alpha.users.GreetMe", 0, **keys)))
    assert str(found).splitlines()[1].strip() == "n0 = users.GreetMe(name='x', opt=None, site='alpha')"


@pytest.mark.parametrize("value", [False, 0, "", [], {}, None, 0.0, "text", [1, [2]], {"tag": "@dfm-other"}, {"id": 5}])
def test_literals_arrive_as_they_are_also_falsy_ones(value: Any) -> None:
    found = FED.pipeline_from_dfm(pipeline(square(0, value), core("Yield", 1, value=value)))
    assert [found.body[0].args["x"].value, found.body[1].value.value] == [value, value]  # type: ignore[union-attr]


def test_references_and_parameters_may_be_nested_in_lists_and_objects() -> None:
    parameter = {"tag": "@dfm-place-param", "place": "p"}
    found = FED.pipeline_from_dfm(pipeline(square(0), square(1, [ref(0), 2, {"k": parameter, "l": [1]}])))
    with Pipeline() as meant:
        first = FED.operations["deep.math.Square"](x=2)
        FED.operations["deep.math.Square"](x=[first, 2, {"k": PlaceParam("p"), "l": [1]}])
    assert found.body == meant.body


def test_what_a_block_waits_for_its_statements_wait_for() -> None:
    inner = core("If", 3, cond=True, dfm_body=[core("Yield", 4, value=1)])
    loop = core("ForEach", 2, seq=ref(1), dfm_body=[inner, square(5)]) | {"dfm_after": node(0)}
    found = FED.pipeline_from_dfm(pipeline(square(0), square(1), loop))
    text = str(found)
    assert text.count("after=[n0]") == 2


def test_waiting_for_a_yield_means_waiting_for_its_value() -> None:
    sends = core("Yield", 2, value=[ref(0), ref(1, 0)]) | {"dfm_after": node(0)}
    inside = [core("Yield", 5, value=[ref(4), ref(0)], place="p"), square(6) | {"dfm_after": node(5)}]
    loop = core("ForEach", 4, seq=ref(0), dfm_body=inside)
    found = FED.pipeline_from_dfm(pipeline(square(0), square(1), sends, square(3) | {"dfm_after": node(2)}, loop))
    outer, block = found.body[3:]
    assert isinstance(outer, CallStatement)
    assert isinstance(block, ForEachStatement)
    inner = block.body[1]
    assert isinstance(inner, CallStatement)
    assert (outer.after, inner.after) == ((0, 1), (0,))


ADVISE = {"tag": "@dfm-advise", "advise": "Field"}


def test_advice_is_asked_for_in_discovery_pipelines_only() -> None:
    greet = statement("minifed.fed.api.users.GreetMe", 1, opt=ADVISE, n=None, site=ADVISE)
    found = FED.pipeline_from_dfm(pipeline(square(0, ADVISE), greet, mode="discovery"))
    with Pipeline(api_version="0.1.0", mode="discovery") as meant:
        FED.operations["deep.math.Square"](x=Advise())
        FED.operations["users.GreetMe"](name="", opt=Advise(), site=Advise())
    assert str(found).replace("opt", "name='', opt") == str(meant)
    assert (
        FED.pipeline_from_dfm(FED.pipeline_to_dfm(Pipeline(mode="discovery", body=found.body[:1]))).body
        == found.body[:1]
    )
    assert problems(pipeline(square(0, ADVISE, site=ADVISE))).keys() == {"/dfm_body/0/x", "/dfm_body/0/site"}
    assert problems(pipeline(square(0, [ADVISE]), mode="discovery")).keys() == {"/dfm_body/0/x/0"}


WRONG: list[tuple[dict[str, Any], str]] = [
    (pipeline(target="local"), "/target"),
    (pipeline(mode="run"), "/mode"),
    (pipeline(api_version=1), "/api_version"),
    (pipeline(name=[]), "/name"),
    (pipeline(dfm_body={}), "/dfm_body"),
    ({"api_version": ""}, ""),
    (pipeline("x"), "/dfm_body/0"),
    (pipeline({}), "/dfm_body/0"),
    (pipeline(square(0), square(0)), "/dfm_body/1"),
    (pipeline(square(True)), "/dfm_body/0/dfm_node_id"),
    (pipeline(square("no name")), "/dfm_body/0/dfm_node_id"),
    (pipeline(square(0, y=1)), "/dfm_body/0/y"),
    (pipeline(square(0, dfm_body=[])), "/dfm_body/0/dfm_body"),
    (pipeline(statement("minifed.fed.api.users.GreetMe", 0)), "/dfm_body/0"),
    (pipeline(statement("minifed.fed.api.users.GreetMe", 0, name="x", greeting="y")), "/dfm_body/0/greeting"),
    (pipeline(statement("minifed.fed.api.users.Nobody", 0)), "/dfm_body/0/dfm_class_name"),
    (pipeline(statement("other.fed.api.users.GreetMe", 0)), "/dfm_body/0/dfm_class_name"),
    (pipeline(statement("minifed.fed.site.beta.users.GreetMe", 0)), "/dfm_body/0/dfm_class_name"),
    (pipeline(statement("minifed.fed.site.alpha.deep.math.Square", 0, x=1, site="beta")), "/dfm_body/0/site"),
    (pipeline(square(0, site=5)), "/dfm_body/0/site"),
    (pipeline(square(0, site={"tag": "@dfm-best-of", "sites": "alpha"})), "/dfm_body/0/site"),
    (pipeline(square(0, provider=5)), "/dfm_body/0/provider"),
    (pipeline(square(0, ref(1)), square(1)), "/dfm_body/0/x"),
    (pipeline(square(0, ref(0))), "/dfm_body/0/x"),
    (pipeline(square(0, ref("x"))), "/dfm_body/0/x"),
    (pipeline(square(0, [{"a~b/c": ref("x")}])), "/dfm_body/0/x/0/a~0b~1c"),
    (pipeline(square(0), square(1, ref(0, sel=1.5))), "/dfm_body/1/x/sel"),
    (pipeline(square(0), square(1, ref(0, sel="__class__", issubs=False))), "/dfm_body/1/x/sel"),
    (pipeline(square(0), square(1, ref(0) | {"more": 1})), "/dfm_body/1/x"),
    (pipeline(square(0, {"tag": "@dfm-place-param"})), "/dfm_body/0/x"),
    (pipeline(square(0, {"tag": "__dfm__pickled__", "value": "gASVAAAAAAAAAC4="})), "/dfm_body/0/x"),
    (pipeline(square(0) | {"dfm_after": node(1)}, square(1)), "/dfm_body/0/dfm_after"),
    (pipeline(square(0) | {"dfm_after": 5}), "/dfm_body/0/dfm_after"),
    (pipeline(core("Yield", 0)), "/dfm_body/0"),
    (pipeline(core("Yield", 0, value=1, place=5)), "/dfm_body/0/place"),
    (pipeline(core("Yield", 0, value=1, multiuse=1)), "/dfm_body/0/multiuse"),
    (pipeline(core("Yield", 0, value=1), square(1, ref(0))), "/dfm_body/1/x"),
    (pipeline(core("ForEach", 0, seq=[1, 2], dfm_body=[])), "/dfm_body/0/seq"),
    (pipeline(square(0), core("ForEach", 1, seq=ref(0), dfm_body=[square(2)]), square(3, ref(2))), "/dfm_body/2/x"),
    (pipeline(square(0), core("ForEach", 1, seq=ref(0), dfm_body=[]), square(2, ref(1))), "/dfm_body/2/x"),
    (pipeline(core("If", 0, cond={"a": 1}, dfm_body=[])), "/dfm_body/0/cond"),
    (pipeline(core("If", 0, cond={"operator": "and", "exp": [1]}, dfm_body=[])), "/dfm_body/0/cond/exp"),
    (pipeline(core("If", 0, cond={"operator": "not"}, dfm_body=[])), "/dfm_body/0/cond"),
    (pipeline(core("If", 0, cond={"operator": "==", "left": ref(9), "right": 1})), "/dfm_body/0/cond/left"),
    (pipeline(core("If", 0, cond={"operator": "~", "left": 1, "right": 1})), "/dfm_body/0/cond"),
    (pipeline(square(0), core("TryFromCache", 1, key=ref(0), dfm_body=[])), "/dfm_body/1"),
    (pipeline(core("TryFromCache", 1, key="k", dfm_body=[])), "/dfm_body/0/key"),
    (pipeline(square(0), core("_WriteToCache", 1, key=ref(0), value=ref(0))), "/dfm_body/1"),
    (
        pipeline(
            square(0),
            square(1),
            core("TryFromCache", 2, key=ref(0), dfm_body=[core("_WriteToCache", 3, key=ref(1), value=ref(1))]),
        ),
        "/dfm_body/2/dfm_body/0/key",
    ),
]


@pytest.mark.parametrize(("data", "place"), WRONG, ids=[f"{n}:{place}" for n, (_, place) in enumerate(WRONG)])
def test_a_mistake_is_reported_with_its_place(data: dict[str, Any], place: str) -> None:
    assert place in problems(data)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    data = pipeline(square("9"), core("Yield", 1, value=ref(5)), statement("a.b", 2), mode="x")
    path.write_text(json.dumps(data))
    with pytest.raises(PipelineError) as caught:
        FED.load_pipeline(path)
    assert caught.value.pipeline == str(path)
    assert [problem.statement for problem in caught.value.problems] == [
        "/mode",
        "/dfm_body/0/dfm_node_id",
        "/dfm_body/1/value",
        "/dfm_body/2/dfm_class_name",
    ]


def test_of_very_many_mistakes_the_first_are_reported() -> None:
    with pytest.raises(PipelineError) as caught:
        FED.pipeline_from_dfm(pipeline(*[{}] * 5000))
    assert len(caught.value.problems) == 101
    assert str(caught.value.problems[-1]) == "and 9900 more"


_numbers = itertools.count()
NESTINGS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "value": (ref(0), lambda inner: [inner], lambda value: pipeline(square(0), square(1, value))),
    "literal": (1, lambda inner: {"k": inner}, lambda value: pipeline(square(0, value))),
    "condition": (
        True,
        lambda inner: {"operator": "not", "exp": inner},
        lambda value: pipeline(core("If", 0, cond=value, dfm_body=[])),
    ),
    "block": ([], lambda inner: [core("If", next(_numbers), cond=True, dfm_body=inner)], lambda body: pipeline(*body)),
}
"""What is innermost, what goes around it, and the pipeline that holds all."""


def _nested(kind: str, depth: int) -> dict[str, Any]:
    value, around, whole = NESTINGS[kind]
    for _ in range(depth):
        value = around(value)
    return whole(value)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", NESTINGS)
@pytest.mark.parametrize("depth", [70, 500])
def test_what_is_nested_too_deep_is_refused(kind: str, depth: int) -> None:
    FED.pipeline_from_dfm(_nested(kind, 60))
    assert any("nested more than 64 deep" in message for message in problems(_nested(kind, depth)).values())


def test_files_of_unbounded_size_and_length_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfm_async.federation.dfm_json.reading.MAX_STATEMENTS", 10)
    monkeypatch.setattr("dfm_async.federation.dfm_json.MAX_BYTES", 2000)
    inner = [core("If", 100, cond=True, dfm_body=[square(number) for number in range(6)])]
    FED.pipeline_from_dfm(pipeline(*inner))
    many = pipeline(*inner, *[square(number) for number in range(10, 14)])
    assert problems(many) == {"/dfm_body": "has more than 10 statements"}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(pipeline()) + " " * 2000)
    with pytest.raises(PipelineError, match="larger than 2,000 bytes"):
        FED.load_pipeline(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"NaN", b'"dfm_body"', b"[]"])
def test_what_is_not_json_of_a_pipeline_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(PipelineError):
        FED.load_pipeline(path)


def test_our_own_json_is_read_as_well(tmp_path: Path) -> None:
    with Pipeline("ours") as ours:
        Yield(FED.operations["deep.math.Square"](x=2))
    ours.save_to_file(tmp_path / "p.json")
    assert FED.load_pipeline(tmp_path / "p.json") == ours


def test_a_pipeline_of_dfm_names_how_to_read_it() -> None:
    for name in ("nv_dfm_core.json", "older.json"):
        with pytest.raises(PipelineError, match=r"federation\.load_pipeline"):
            Pipeline.load_from_file(DATA / name)


def test_reading_leaves_the_data_as_it_was() -> None:
    data = json.loads((DATA / "nv_dfm_core.json").read_text())
    before = copy.deepcopy(data)
    FED.pipeline_from_dfm(data)
    assert data == before
