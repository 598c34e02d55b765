"""The benchmark of a batch of files: it notices files that are missing, and cores that are idle."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import operations
from benchmarks.batch import Busy, check, collected, fed, summaries, write_files
from benchmarks.common import cpu_times, tree
from dfm_async import Session


async def test_every_file_comes_once(tmp_path: Path) -> None:
    rows = write_files(tmp_path, 10)
    async with Session(fed, target="inline") as session:
        check(await collected(summaries(session, rows)), rows)


@pytest.mark.parametrize("wrong", ["missing", "repeated", "torn"])
def test_a_batch_that_is_not_complete_is_an_error(tmp_path: Path, wrong: str) -> None:
    rows = write_files(tmp_path, 3)
    found = [operations.summarize(path) for path in rows]
    match wrong:
        case "missing":
            found.pop()
        case "repeated":
            found.append(found[0])
        case "torn":
            found[0]["rows"] -= 1
    with pytest.raises(RuntimeError, match="files"):
        check(found, rows)


def test_idle_cores_are_noticed() -> None:
    idle = Busy(1)
    with idle.measuring():
        time.sleep(0.6)
    assert 0 <= min(idle.samples) <= max(idle.samples) < 0.9


def test_the_processor_time_of_a_process_is_known() -> None:
    (process,) = tree(os.getpid())[:1]
    assert cpu_times([process])[process.pid] > 0
