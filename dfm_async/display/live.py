"""Jobs while they run: a view in a notebook that changes, or lines in a terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Protocol

from dfm_async.display.job_view import JobView
from dfm_async.errors import DfmError
from dfm_async.results.watching import Bell
from dfm_async.session.job import Job

__all__ = ["show"]


class _Surface(Protocol):
    interval: float
    """How many seconds lie at least between two looks at the job."""

    def paint(self, view: JobView) -> None: ...


class _Lines:
    """A terminal: each line that differs from the one before is written."""

    interval = 1.0

    def __init__(self) -> None:
        self._last = ""

    def paint(self, view: JobView) -> None:
        line = view.line()
        if line != self._last:
            self._last = line
            print(line, flush=True)  # noqa: T201 - this is what it is for


class _Cell:
    """The output of a notebook's cell: one view, which is replaced."""

    interval = 0.1

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def paint(self, view: JobView) -> None:
        data = {"text/plain": view.line(), "text/html": view.html()}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _surface() -> _Surface:
    """Where this program shows things. IPython is there only if the program runs in it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return _Lines()
    from IPython.display import display

    return _Cell(display)


async def show(job: Job) -> None:
    """Shows a job until it has ended. What happens between two looks is joined; the end is shown at once.

    Raises:
        ResultsUnread: the job cannot go on, because its log is full and nobody reads it.
    """
    surface = _surface()
    view = JobView(job)
    bell = Bell(surface.interval)
    faults: list[DfmError] = []

    async def look() -> None:
        async for _ in job.changes(surface.interval):
            bell.ring()

    async def count() -> None:
        async for activity in job.activity(surface.interval):
            view.saw(activity.nodes)
            bell.ring()

    async def follow(looks: list[asyncio.Task[None]]) -> None:
        try:
            await job.wait_until_finished()
            await asyncio.gather(*looks)  # they end with the job
        except DfmError as error:
            faults.append(error)
            for task in looks:
                task.cancel()
        finally:
            bell.close()

    async with asyncio.TaskGroup() as group:
        looks = [group.create_task(look())]
        if job.watched:
            looks.append(group.create_task(count()))
        group.create_task(follow(looks))
        while not bell.closed:
            await bell.wait()
            surface.paint(view)
    if faults:
        raise faults[0]
