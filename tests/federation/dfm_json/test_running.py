"""What nv_dfm_core cannot run runs here, and yields what plain Python says: loops, branches, caches, providers."""

from __future__ import annotations

from typing import Any

import pytest

from dfm_async import Federation
from tests.conftest import Connect
from tests.federation.dfm_json.rig import core, node, pipeline, ref, statement
from tests.federations import file_of

API = "minifed.fed.api."
ALPHA = "minifed.fed.site.alpha."


def call(operation: str, ident: Any, **keys: Any) -> dict[str, Any]:
    return statement(API + operation, ident, **keys)


def out(ident: int, value: Any, place: str = "yield", **keys: Any) -> dict[str, Any]:
    return core("Yield", ident, value=value, place=place, **keys)


def param(place: str) -> dict[str, Any]:
    return {"tag": "@dfm-place-param", "place": place, "multiuse": True}


def compared(op: str, left: Any, right: Any) -> dict[str, Any]:
    return {"operator": op, "left": left, "right": right}


def square(x: float) -> float:
    return x * x


def label(number: float, unit: str = "metres", ending: str = "") -> str:
    return f"no. {number:.0f} {unit} in the north{ending} (3 places, 14 letters)"


LOOP = [
    call("data.Range", 0, count=param("n"), start=1, site="beta"),
    core(
        "ForEach",
        1,
        seq=ref(0),
        dfm_body=[
            call("math.Square", 2, x=ref(1), site="alpha"),
            call("data.Range", 3, count=ref(1), site="gamma"),
            core(
                "ForEach",
                4,
                seq=ref(3),
                dfm_body=[call("math.Scale", 5, x=ref(2), factor=ref(4)), out(6, ref(5), "inner")],
            ),
            out(7, ref(2), "outer"),
        ],
    ),
]
BRANCH = [
    call("math.Square", 0, x=param("x"), site="beta"),
    core("If", 1, cond=compared(">", ref(0), 10), dfm_body=[out(2, "large", "size")]),
    core("If", 3, cond={"operator": "not", "exp": compared(">", ref(0), 10)}, dfm_body=[out(4, "small", "size")]),
    core(
        "If",
        5,
        cond={"operator": "or", "exp": [compared("==", ref(0), 4), compared("==", ref(0), 16)]},
        dfm_body=[call("math.Square", 6, x=ref(0), site="gamma"), out(7, ref(6), "again")],
    ),
]
for _statement in (BRANCH[1], BRANCH[2]):
    _statement["dfm_body"][0]["multiuse"] = True
CACHE = [
    call("math.Square", 0, x=param("x"), site="alpha"),
    core(
        "TryFromCache",
        1,
        key=ref(0),
        dfm_body=[
            call("text.Label", 2, number=ref(0), site="alpha"),
            core("_WriteToCache", 3, key=ref(0), value=ref(2)),
        ],
    ),
    out(4, ref(1)),
]
PROVIDER = [
    statement(ALPHA + "acme.math.Square", 0, x=param("x")),
    call("math.Scale", 1, x=ref(0), factor=None, site="alpha", provider="acme"),
    call("math.Scale", 2, x=ref(0), factor=0, site="alpha", provider="acme"),
    out(3, ref(1)),
    out(4, ref(2), "zero"),
]
FALSY = [
    call("text.Label", 0, number=0),
    out(1, ref(0), "bound"),
    out(2, 0, "zero"),
    out(3, "", "empty"),
    out(4, False, "no"),
    out(5, None, "null"),
]
ORDER = [
    call("math.Square", 0, x=3, site="alpha"),
    call("math.Square", 1, x=4, site="beta") | {"dfm_after": node(0)},
    core("If", 2, cond=True, dfm_body=[out(3, ref(1))]) | {"dfm_after": node(0)},
    out(4, param("x"), "given"),
]

CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], list[list[tuple[str, Any]]]]] = {
    "loops in loops": (
        LOOP,
        [{"n": 3}, {"n": 0}],
        [
            [
                *(("outer", square(i)) for i in (1, 2, 3)),
                *(("inner", square(i) * j + 1) for i in (1, 2, 3) for j in range(i)),
            ],
            [],
        ],
    ),
    "branches": (
        BRANCH,
        [{"x": 2}, {"x": 4}, {"x": 3}],
        [[("size", "small"), ("again", 16)], [("size", "large"), ("again", 256)], [("size", "small")]],
    ),
    "caches": (
        CACHE,
        [{"x": 2}, {"x": 3}, {"x": 2}],
        [[("yield", label(4))], [("yield", label(9))], [("yield", label(4))]],
    ),
    "providers": (PROVIDER, [{"x": 3}], [[("yield", 9 * 2 + 1), ("zero", 1)]]),
    "falsy constants": (
        FALSY,
        [{}],
        [[("bound", label(0)), ("zero", 0), ("empty", ""), ("no", False), ("null", None)]],
    ),
    "order without data": (ORDER, [{"x": [1]}], [[("yield", 16), ("given", [1])]]),
}


@pytest.mark.usefixtures("adapter_packages")
async def test_what_nv_dfm_core_cannot_run_yields_what_plain_python_says(connect: Connect) -> None:
    federation = Federation.from_yaml(file_of("minifed"), compat=True)
    found: dict[str, list[list[tuple[str, Any]]]] = {}
    async with connect(federation) as session:
        for name, (statements, params, _) in CASES.items():
            job = await session.execute(federation.pipeline_from_dfm(pipeline(*statements)), params)
            found[name] = [[] for _ in params]
            for result in await job.collect():
                found[name][result.frame[0]].append((result.place, result.value))
    for name, (_, _, expected) in CASES.items():
        assert [sorted(frame, key=repr) for frame in found[name]] == [sorted(frame, key=repr) for frame in expected], (
            name
        )
