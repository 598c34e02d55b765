"""Applications and packages register codecs for their own types."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.msgpack import Ext

from dfm_async import Federation, Pipeline, PlaceParam, Session, TryFromCache, Yield, codecs
from dfm_async.errors import EncodingError, JobExists
from dfm_async.wire.codec import Broken, Codec, KnownClasses
from dfm_async.wire.codec.registry import _registry
from dfm_async.wire.memory import Arena, Payload
from tests.wire.shapes import through, trusted, untrusted


class Grid:
    """A type that no rule knows."""

    def __init__(self, cells: Any, name: str = "") -> None:
        self.cells = cells
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self.name == other.name and np.array_equal(self.cells, other.cells)

    def __hash__(self) -> int:
        return hash(self.name)


class FineGrid(Grid):
    """A subclass of it."""


def encode(grid: Grid) -> Any:
    return {"name": grid.name, "cells": grid.cells}


def decode(state: Any) -> Grid:
    return Grid(state["cells"], state["name"])


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], object]], None]:
    """Forget the libraries that were loaded, and set what an import does."""
    monkeypatch.setattr(_registry, "_libraries", set())
    monkeypatch.setattr(_registry, "_missing", {})
    monkeypatch.setattr(_registry, "_names", dict(_registry._names))
    return lambda function: monkeypatch.setattr("dfm_async.wire.codec.registry.importlib.import_module", function)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    names, types = dict(_registry._names), dict(_registry._types)
    codecs.register(Grid, name="tests.Grid", encode=encode, decode=decode)
    yield
    _registry._names, _registry._types = names, types
    trusted.forget()
    untrusted.forget()


GRID = Grid(np.arange(3), "g")
SAFE = [untrusted, Codec.for_store(), Codec.for_programs(), Codec.for_untrusted(KnownClasses())]


def test_a_registered_type_passes_every_border() -> None:
    for codec in [trusted, *SAFE]:
        assert through({"a": [GRID]}, codec) == {"a": [GRID]}


def test_the_name_travels_and_not_the_path_of_the_class() -> None:
    data = trusted.encode(GRID)
    assert b"tests.Grid" in data
    assert b"registered" not in data


def test_large_buffers_travel_in_shared_memory_and_arrive_read_only() -> None:
    codecs.register(
        Raw,
        name="tests.Raw",
        encode=lambda raw: [1, memoryview(raw.data)],
        decode=lambda state: Raw(state[1]),
    )
    codec = Codec.for_processes(Arena())
    for size in (10, 1_000_000):
        payload = codec.payload(codec.pack(Raw(bytes(size))))
        assert isinstance(payload, Payload) == (size > 10)
        found = trusted.loads(payload).data
        assert found.readonly
        assert found == bytes(size)


class Raw:
    def __init__(self, data: Any) -> None:
        self.data = data


def test_subclasses_have_a_codec_only_if_it_is_for_them() -> None:
    with pytest.raises(EncodingError, match="FineGrid cannot be sent"):
        untrusted.pack(FineGrid(1))
    codecs.register(Grid, name="tests.Grid", encode=encode, decode=decode, subclasses=True)
    assert type(through(FineGrid(1), untrusted)) is Grid


def test_a_codec_that_is_not_safe_is_for_the_processes_of_one_application() -> None:
    codecs.register(Grid, name="tests.Grid", encode=encode, decode=decode, safe=False)
    data = trusted.encode(GRID)
    assert trusted.loads(data) == GRID
    for codec in SAFE:
        with pytest.raises(EncodingError, match=r"its codec 'tests.Grid' is only for the processes of one application"):
            codec.pack(GRID)
        with pytest.raises(EncodingError, match=r"values of the codec 'tests.Grid' are not accepted here"):
            codec.loads(data)


def test_a_registered_dataclass_is_encoded_by_its_codec() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(EncodingError):
        untrusted.pack(Local(1))
    codecs.register(Local, name="tests.Local", encode=lambda found: found.x, decode=Local)
    assert through(Local(1), untrusted) == Local(1), "also where values of the type were refused before"


def test_a_name_that_is_unknown_is_named_with_what_to_do() -> None:
    data = untrusted.encode([GRID])
    del _registry._names["tests.Grid"]
    with pytest.raises(EncodingError) as caught:
        untrusted.loads(data)
    assert "no codec named 'tests.Grid' is registered here" in str(caught.value)
    assert "Install the package that registers it in this environment" in str(caught.value)


def test_errors_of_a_codec_are_the_cause_of_an_encoding_error() -> None:
    with pytest.raises(EncodingError, match=r"value\[1\]\['cells'\]\[0\] of type function"):
        untrusted.pack([1, Grid([lambda: None])])
    codecs.register(Grid, name="tests.Grid", encode=lambda grid: grid.missing, decode=decode)  # type: ignore[attr-defined]
    with pytest.raises(EncodingError, match=r"value of type .*Grid.* has no attribute 'missing'"):
        trusted.pack(GRID)
    codecs.register(Grid, name="tests.Grid", encode=lambda grid: None, decode=decode)
    with pytest.raises(EncodingError, match="cannot be rebuilt here"):
        through(GRID)


def test_one_broken_value_does_not_spoil_its_batch() -> None:
    good, bad = trusted.pack(GRID), trusted.pack(Grid([GRID]))
    data = trusted.dumps([good, bad, good])

    def picky(state: Any) -> Grid:
        if len(state["cells"]) == 1:
            raise ValueError("too small")
        return decode(state)

    codecs.register(Grid, name="tests.Grid", encode=encode, decode=picky)
    first, broken, last = trusted.loads_batch(data)
    assert (first, last) == (GRID, GRID)
    assert type(broken).__name__ == "Broken"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": 5}, TypeError, "codecs are registered for types, not for 5"),
        ({"kind": list}, ValueError, "values of list are sent without a codec"),
        ({"kind": tuple}, ValueError, "values of tuple are sent without a codec"),
        ({"name": ""}, TypeError, "the name of a codec must be a string"),
        ({"name": "pandas.DataFrame"}, ValueError, "is reserved"),
        ({"kind": FineGrid}, ValueError, "the codec 'tests.Grid' exists already, for"),
        ({"decode": None}, TypeError, "encode and decode of the codec 'tests.Grid' must be functions"),
    ],
)
def test_invalid_registrations_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"kind": Grid, "name": "tests.Grid", "encode": encode, "decode": decode, **changes}
    with pytest.raises(error, match=message):
        codecs.register(**arguments)


# jobs

fed = Federation("grids", api_version="1")
lab = fed.site("lab")
home = fed.site("home")


@lab.operation
def load(name: str) -> Grid:
    return Grid(np.arange(20_000), name)


@home.operation
def described(grid: Grid, frame: Any) -> list[Any]:
    return [grid, frame.assign(total=len(grid.cells))]


async def test_values_pass_between_sites_into_stores_caches_and_fingerprints(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": range(3), "when": pd.date_range("2024", periods=3, tz="Europe/Rome")})
    with Pipeline("grids") as pipeline:
        with TryFromCache(key=("grid", GRID, frame)) as cached:
            cached.store(load("a"))
        Yield(described(cached, PlaceParam("frame")))
    expected = frame.assign(total=20_000)
    async with Session(fed, store=f"sqlite:///{tmp_path}/jobs.db") as session:
        job = await session.execute(pipeline, {"frame": frame}, job_id="once")
        again = await session.execute(pipeline, {"frame": frame.copy()}, job_id="once")
        assert again.info().created == job.info().created
        with pytest.raises(JobExists):
            await session.execute(pipeline, {"frame": frame[:2]}, job_id="once")
        grid, found = (await job.first()).value
        assert grid == Grid(np.arange(20_000), "a")
        pd.testing.assert_frame_equal(found, expected)
        await job
    async with Session(fed, store=f"sqlite:///{tmp_path}/jobs.db") as session:
        (stored,) = session.jobs()
        grid, found = (await stored.first()).value
        assert grid == Grid(np.arange(20_000), "a")
        pd.testing.assert_frame_equal(found, expected)


SCRIPT = """
import asyncio
from dfm_async import Federation, Session, codecs


class Grid:
    def __init__(self, cells):
        self.cells = cells


codecs.register(Grid, name="geo.Grid", encode=lambda grid: grid.cells, decode=Grid, safe=False)
fed = Federation("script", api_version="1")


@fed.site("lab").operation
def doubled(grid: Grid) -> Grid:
    assert type(grid) is Grid
    return Grid(grid.cells * 2)


async def main():
    async with Session(fed) as session:
        print((await session.call(doubled, Grid([1]))).cells)


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_codecs_of_a_script_work_in_its_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[1, 1]\n", done.stderr


# installed packages


def installed(folder: Path, name: str, code: str) -> None:
    """Install a package with an entry point."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[dfm_async.codecs]\n{name} = {name}\n")


def test_codecs_of_installed_packages_are_found_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = "codecs.register(Shape, name='shapes.Shape', encode=lambda shape: 1, decode=lambda state: Shape())"
    installed(tmp_path, "dfm_shapes", f"from dfm_async import codecs\nclass Shape: pass\n{register}\n")
    installed(tmp_path, "dfm_faulty", "raise RuntimeError('out of order')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_registry, "_installed", False)
    monkeypatch.setattr(_registry, "_failures", [])
    untrusted.loads(untrusted.encode([GRID]))
    assert "dfm_shapes" not in sys.modules, "nothing was unknown"
    state = untrusted.dumps(untrusted.pack(GRID)).replace(b"tests.Grid", b"other.Grid")
    with pytest.raises(EncodingError, match=r"'other.Grid'.*'dfm_faulty' .* failed: RuntimeError\('out of order'\)"):
        untrusted.loads(state)
    assert "failed" in caplog.text
    shape = sys.modules["dfm_shapes"].Shape
    assert type(through(shape(), untrusted)) is shape
    del sys.modules["dfm_shapes"]


def test_codecs_can_be_added_while_another_thread_imports_a_library(importing: Any) -> None:
    added = threading.Event()

    def register() -> None:
        codecs.register(Grid, name="tests.Grid", encode=encode, decode=decode)
        added.set()

    def import_slowly(_name: str) -> None:
        thread = threading.Thread(target=register)
        thread.start()
        assert added.wait(10), "the thread waits for the lock of the registry"
        thread.join()

    importing(import_slowly)
    _registry.load_library("torch")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "'torch', which is not installed"),
        (ImportError("libtorch.so: cannot open"), "'torch', which cannot be imported: libtorch.so: cannot open"),
    ],
    ids=["missing", "broken"],
)
def test_a_library_that_cannot_be_imported_is_tried_once(importing: Any, error: ImportError, reason: str) -> None:
    attempts = []

    def fail(name: str) -> None:
        attempts.append(name)
        raise error

    importing(fail)
    value = Ext(30, untrusted.dumps(["torch.Nothing", None]))
    for found in untrusted.loads_batch(untrusted.dumps([value] * 3)):
        assert type(found) is Broken
        assert isinstance(found.error, LookupError)
        assert f"values of torch need the package {reason}" in str(found.error)
    assert len(attempts) == 1
