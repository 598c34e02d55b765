"""Objects of classes that only the main script has, in jobs and in stores."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_python


def test_objects_of_a_scripts_own_classes_arrive_as_what_they_were() -> None:
    done = run_python(Path(__file__).parent / "script_classes.py", check=False)
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [line for line in lines if line[-1] != "right"] == [], done.stderr
    targets = [line[0] for line in lines]
    assert targets.count("inline") == targets.count("local") == 48, done.stderr


STORED = """
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
    (tmp_path / "app.py").write_text(STORED)
    runs = [run_python("app.py", cwd=tmp_path) for _ in range(2)]
    assert runs[0].stdout.split(" ", 1)[1] == "[1, 2, 3]\n"
    assert runs[1].stdout == "finished [1, 2, 3]\n"
