"""Durable jobs of a script: its own classes, and a death in the middle."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
import asyncio, dataclasses, sys
from dfm_async import *

@dataclasses.dataclass
class Point:
    x: int

fed = Federation("points")

@fed.site("site").operation
def move(point: Point) -> Point:
    return Point(point.x + 1)

with Pipeline("points") as pipeline:
    Yield(move(PlaceParam("point")))

async def main():
    async with Session(fed, store="sqlite:///jobs.db") as session:
        job = await session.execute(pipeline, [{"point": Point(n)} for n in range(3)], job_id="points")
        print(job.status.value, sorted(result.value.x for result in await job.collect()))

asyncio.run(main())
"""


def test_a_script_stores_and_reads_values_of_its_own_classes(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(SCRIPT))
    runs = [
        subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout.split(" ", 1)[1] == "[1, 2, 3]\n"
    assert runs[1].stdout == "finished [1, 2, 3]\n"
