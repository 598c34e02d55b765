"""In Python's own asynchronous REPL: ``python -m asyncio``.

From 3.13 on it takes input that is not typed one line at a time, so that each statement here has one line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LINES = """
from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield
fed = Federation("weather")
lab = fed.site("lab")
def square(x: int) -> int: return x * x

square = lab.operation(square)
with Pipeline("squares") as pipeline: Yield(square(PlaceParam("x")))

pipeline
session = Session(fed, target=TARGET)
await session.connect()
job = await session.execute(pipeline, [{"x": 1}, {"x": 2}, {"x": 3}], job_id="repl", watch=True)
await job.show()
job
async for result in job: print("value", result.value)

await job
await session.close()
"""


@pytest.mark.parametrize("target", ["inline", "local"])
def test_await_sessions_and_views_work_in_the_repl(target: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input=LINES.replace("TARGET", repr(target)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHON_HISTORY": str(tmp_path / "history")},
    )
    printed = re.sub(r"^((>>>|\.\.\.) )+", "", done.stdout, flags=re.MULTILINE).splitlines()
    assert "Traceback" not in done.stderr + done.stdout
    assert "<Pipeline 'squares': 2 statements>" in printed
    assert any(re.match(r"job repl finished: 3 of 3 parameter sets, 8 events, [\d.]+ s$", line) for line in printed)
    assert any(line.startswith("<Job repl: finished") for line in printed)
    assert sorted(line for line in printed if line.startswith("value")) == ["value 1", "value 4", "value 9"]
    assert "JobStatus.FINISHED" in printed
