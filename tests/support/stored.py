"""A small federation for jobs that are stored, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dfm_async import Federation, current_context
from tests.support.pipelines import pipeline_of
from tests.support.waiting import file_created

fed = Federation("stored")
site = fed.site("site")


@site.operation
async def square(n: int) -> int:
    return n * n


@site.operation
def count(n: int) -> Any:
    yield from range(n)


@site.operation
async def wait_for(folder: str, n: int) -> int:
    """Note the call in a file; return at once for small numbers, and when the file ``open`` exists for others."""
    with (Path(folder) / "runs").open("a") as file:
        file.write(f"{n}\n")
    current_context().progress(n)
    if n >= 3:
        await file_created(f"{folder}/open")
    return n


squares = pipeline_of(square, "n")
counts = pipeline_of(count, "n")
waits = pipeline_of(wait_for, "folder", "n")
