"""Data frames, tables and registered types pass between sites on every target, also where nothing is pickled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import xarray as xr

from dfm_async import Federation, Pipeline, PlaceParam, Yield
from tests.conformance.grid import Grid
from tests.conftest import Connect
from tests.support.sessions import first_value
from tests.wire.frames import arrived

federation = Federation("library values")
archive = federation.site("archive")
lab = federation.site("lab")


@archive.operation
def extended(frame: pd.DataFrame) -> dict[str, Any]:
    return {"frame": frame.assign(b=frame["a"] * 2), "grid": Grid(frame["a"].to_numpy())}


@lab.operation
def described(values: dict[str, Any]) -> list[Any]:
    frame, grid = values["frame"], values["grid"]
    dataset = xr.Dataset({"t": ("x", grid.cells)}, attrs={"unit": "K"})
    return [frame, pa.table({"b": frame["b"].to_numpy()}), dataset, Grid(grid.cells + 1)]


async def test_values_of_libraries_and_registered_types_arrive_as_they_were(connect: Connect) -> None:
    with Pipeline("frames") as pipeline:
        Yield(described(extended(PlaceParam("frame"))))
    cells = np.arange(50_000)
    frame = pd.DataFrame({"a": cells}, index=pd.date_range("2024", periods=50_000, freq="s", tz="Europe/Rome"))
    async with connect(federation) as session:
        found, table, dataset, grid = await first_value(session, pipeline, {"frame": frame})
    assert arrived(found, frame.assign(b=cells * 2))
    assert arrived(table, pa.table({"b": cells * 2}))
    assert arrived(dataset, xr.Dataset({"t": ("x", cells)}, attrs={"unit": "K"}))
    assert type(grid) is Grid
    assert (grid.cells == cells + 1).all()
