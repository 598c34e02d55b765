"""What the pages under test show: two sites, and operations that wait for the test."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from datetime import date
from typing import Any, Literal

import numpy as np
from PIL import Image

from dfm_async import Federation, ForEach, OperationContext, Pipeline, PlaceParam, Sleep, Wait, Yield

fed = Federation("weather")
archive = fed.site("archive")
lab = fed.site("lab")

gates: dict[str, asyncio.Event] = {}
"""What operations wait for, by name."""


def gate(name: str) -> asyncio.Event:
    return gates.setdefault(name, asyncio.Event())


@archive.operation
async def load(n: int) -> list[int]:
    return list(range(n))


@lab.operation
async def hold(x: int, name: str, context: OperationContext) -> dict[str, Any]:
    """Tells how far it is, and waits for the test."""
    context.progress(1, 4, "a quarter")
    context.metrics({"loss": 1.0 / (x + 1)})
    await gate(name).wait()
    return {"x": x, "squares": [x * x] * 3}


@lab.operation(limit=1)
async def alone(x: int, name: str) -> int:
    await gate(name).wait()
    return x


@lab.operation
async def breaks(x: int) -> int:
    raise ValueError(f"no {x}")


@lab.operation
async def says(text: str) -> str:
    return text


def photo(kind: str) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((300, 200), 64).save(file, kind)
    return file.getvalue()


@lab.operation
async def gives(kind: str) -> Any:
    """Return a value, or the JSON of one."""
    table = {"type": "pandas.DataFrame", "shape": [30, 2], "columns": ["<b>", "wind"], "dtypes": ["str", "int64"]}
    return {
        "array": [[x * y / 3 for x in range(30)] for y in range(30)],
        "long": [[x * y / 7 for x in range(100)] for y in range(100)],
        "series": {"type": "pandas.Series", "shape": [9], "name": "celsius", "values": [-1.5, None, *range(7)]},
        "table": {**table, "index": [[0, "x"]] * 20, "rows": [["<i>", n] for n in range(20)]},
        "image": {"type": "PIL.Image.Image", "mode": "RGB", "size": [640, 480]},  # but it is not one
        "pillow": Image.new("RGB", (1500, 1000), "red"),
        "photo": photo("JPEG"),
        "file": photo("PNG"),
        "web": photo("WEBP"),
        "pixels": np.full((480, 640, 3), 7, np.uint8),
        "icon": np.full((6, 8, 4), 200, np.uint8),
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
        "large": photo("PNG") + bytes(4 * 2**20),
    }[kind]


@lab.operation
async def count(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


with Pipeline("hold") as holding:
    with ForEach(load(PlaceParam("n"))) as number:
        Yield(hold(number, PlaceParam("name")), place="squares")
        Yield(number, place="numbers")

with Pipeline("approval") as approving:
    Yield(Wait("approval", bool, timeout=3600), place="approved")
    Yield(Wait("grade", Literal["good", "bad"]), place="grade")
    Yield(Wait("count", int), place="count")
    Yield("slept", place="slept", after=Sleep(3600))

with Pipeline("alone") as waiting:
    Yield(alone(PlaceParam("x"), PlaceParam("name")))

with Pipeline("defaults") as defaulting:
    Yield(breaks(1, fallback=0), place="fallback")
    Yield(count(PlaceParam("n", default=2)))
    Yield([PlaceParam("since", default=date(2026, 1, 2)), PlaceParam("who", default="me")], place="given")


@fed.pipeline
def described(kind: Literal["short", "long"] | None = None, times: int | None = None, twice: bool = False) -> list[Any]:
    """Say what was given.

    Args:
        kind: which one.
        times: how often.
        twice: whether to do it again.
    """
    Yield([kind, times, twice], place="given")
    return [kind]


with Pipeline("break") as breaking:
    Yield(breaks(PlaceParam("x")))

with Pipeline("crash") as crashing:
    param = PlaceParam("x", multiuse=True)
    for index in range(6):
        Yield(breaks(param), place=f"place{index}")

with Pipeline("<b>say</b>") as saying:
    Yield(says(PlaceParam("text")))

with Pipeline("give") as giving:
    Yield(gives(PlaceParam("kind")))

with Pipeline("count") as counting:
    Yield(count(PlaceParam("n")))

PIPELINES = {
    "holding": holding,
    "breaking": breaking,
    "crashing": crashing,
    "giving": giving,
    "saying": saying,
    "counting": counting,
    "waiting": waiting,
    "defaulting": defaulting,
    "described": described,
    "approving": approving,
}
