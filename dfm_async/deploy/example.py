"""A small example federation in files: three sites with weather data, and a pipeline over them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FEDERATION: Final = """\
# The federation: which operations there are, and which site offers them with which code.
dfm: 1.0.0
info:
  api-version: 1.0.0
  code-package: weather
  description: An archive of readings, a lab that cleans them, and a desk that sums them up

operations:
  archive.Readings:
    description: Reads the temperatures of one month.
    parameters:
      month: {type: string, description: "Such as jan."}
      days: {type: integer, description: How many days., default: 28}
    required: [month]
    returns: array
  lab.Clean:
    description: Rounds a reading as the instrument would.
    parameters:
      reading: {type: number}
    required: [reading]
    returns: number
  desk.Mean:
    description: Gives the mean of many values.
    parameters:
      values: {type: array}
    required: [values]
    returns: number

sites:
  archive:
    interface:
      "#/operations/archive.Readings": {adapter: weather.adapters.Readings, is-async: false, args: from-operation}
  lab:
    interface:
      "#/operations/lab.Clean": {adapter: weather.adapters.Clean, args: from-operation}
  desk:
    interface:
      "#/operations/desk.Mean": {adapter: weather.adapters.Mean, is-async: false, args: from-operation}
"""
_ADAPTERS: Final = '''\
"""The code of the sites."""

import math
import random

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


class Readings:
    """The archive has the data."""

    def body(self, month: str, days: int) -> list[float]:
        noise = random.Random(month)
        base = 10 - 12 * math.cos(2 * math.pi * MONTHS.index(month) / 12)
        return [base + noise.gauss(0, 4) for _ in range(days)]


class Clean:
    """The lab cleans every reading."""

    async def body(self, reading: float) -> float:
        return round(reading, 1)


class Mean:
    """The desk sums a month up."""

    def body(self, values: list[float]) -> float:
        return round(sum(values) / len(values), 2)
'''
_PIPELINE: Final = '''\
"""The pipeline: it is written once, and every part of it runs at its site."""

from pathlib import Path

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Yield, collect

fed = Federation.from_yaml(Path(__file__).parent / "weather" / "federation.dfm.yaml")
ops = fed.operations

with Pipeline("year") as year:
    with ForEach(ops.archive.Readings(month=PlaceParam("month"))) as reading:
        celsius = ops.lab.Clean(reading=reading)
    Yield(ops.desk.Mean(values=collect(celsius)), place="mean")
'''
_FILES: Final = {
    "weather/__init__.py": "",
    "weather/federation.dfm.yaml": _FEDERATION,
    "weather/adapters.py": _ADAPTERS,
    "year.py": _PIPELINE,
}


def write_example(folder: Path) -> tuple[Path, Path]:
    """Write the files that do not exist yet. Return the federation file, and the file of the pipeline."""
    for name, text in _FILES.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder / "weather" / "federation.dfm.yaml", folder / "year.py"
