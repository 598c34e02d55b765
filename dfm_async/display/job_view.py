"""Jobs in notebooks and terminals: at one moment, and while they run."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from html import escape
from typing import Any, Final

from dfm_async.base.signals import ThrottledSignal
from dfm_async.display.markup import badge, bar, framed, table
from dfm_async.display.views import errors_part, results_table
from dfm_async.drawing import Graph, graph_of, svg
from dfm_async.errors import DfmError
from dfm_async.model.events import NodeActivity
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job

_MOODS: Final = {
    JobStatus.FINISHED: "good",
    JobStatus.FAILED: "bad",
    JobStatus.ABORTED: "bad",
    JobStatus.INTERRUPTED: "bad",
}
_DRAWN = 60
"""A job with more nodes is shown without a drawing of their activity, which is redrawn each time."""


class JobView:
    """A job, and what is known of its nodes if it is watched."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._nodes: dict[tuple[str, str], NodeActivity] = {}
        self._graph: Graph | None = None

    def saw(self, nodes: Iterable[NodeActivity]) -> None:
        """Take over what nodes did."""
        self._nodes.update(((node.node, node.site), node) for node in nodes)

    def line(self) -> str:
        """Return the job on one line."""
        if not self._job.was_found:
            return repr(self._job)
        info = self._job.info()
        running = sum(node.running for node in self._nodes.values())
        calls = f", {running} calls running" if running else ""
        return f"job {info.job_id} {info.status.value}: {', '.join(_counts(info))}{calls}"

    def html(self) -> str:
        """Return the job as a part of a page."""
        job = self._job
        if not job.was_found:
            return framed(f"Job <b>{escape(job.job_id)}</b> {badge('unknown')}")
        info = job.info()
        name = "" if info.pipeline is None else f" of <b>{escape(info.pipeline)}</b>"
        parts = [
            f"<div>Job <code>{escape(info.job_id)}</code>{name} {badge(info.status.value, _MOODS.get(info.status, ''))}"
        ]
        if info.reason:
            parts.append(f" {escape(info.reason)}")
        progress = bar(info.done, info.sets) if info.sets and info.done is not None else ""
        parts.append(f'</div><div>{progress} <span class="dfm-dim">{escape(", ".join(_counts(info)))}</span></div>')
        if job.errors:
            parts.append(errors_part(job.errors, info.errors))
        if self._nodes:
            parts.append(self._activity())
        latest = job.latest()
        if latest:
            parts.append(f"<div>The newest results:</div>{results_table(latest)}")
        return framed(*parts)

    def _activity(self) -> str:
        if self._graph is None:
            self._graph = graph_of(self._job.plan)
        if len(self._graph.nodes) <= _DRAWN:
            marks = {node.node: _mark(node) for node in self._nodes.values()}
            return f'<div class="dfm-scroll">{svg(self._graph, marks)}</div>{self._table()}'
        return self._table()

    def _table(self) -> str:
        rows = (
            (escape(node.node), escape(node.site), str(node.running), str(node.done), str(node.failed))
            for node in list(self._nodes.values())[:_DRAWN]
        )
        return table(("node", "site", "running", "done", "failed"), rows)


def _mark(node: NodeActivity) -> str:
    return "failed" if node.failed else "active" if node.running else "done" if node.done else ""


def _counts(info: JobInfo) -> Iterable[str]:
    if info.sets is not None and info.done is not None:
        yield f"{info.done:,} of {info.sets:,} parameter sets"
    yield f"{info.events:,} events"
    if info.errors:
        yield f"{info.errors:,} error{'s' * (info.errors != 1)}"
    yield f"{(info.finished or time.time()) - info.created:.1f} s"


class _ChangedLines:
    """A terminal: each line that differs from the one before is written."""

    interval = 1.0
    """The least number of seconds between two updates."""

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


def _surface() -> _ChangedLines | _Cell:
    """Return where to show jobs. IPython is imported already if the program runs in it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return _ChangedLines()
    from IPython.display import display

    return _Cell(display)


async def show(job: Job) -> None:
    """Show a job until it has ended. Changes between two updates are coalesced; the end is shown at once.

    Raises:
        ResultsUnread: the job cannot go on, because its log is full and has no reader.
    """
    surface = _surface()
    view = JobView(job)
    changed = ThrottledSignal(surface.interval)
    faults: list[DfmError] = []

    async def watch() -> None:
        async for _ in job.changes(surface.interval):
            changed.notify()

    async def count() -> None:
        async for activity in job.activity(surface.interval):
            view.saw(activity.nodes)
            changed.notify()

    async def follow(updates: list[asyncio.Task[None]]) -> None:
        try:
            await job.wait_until_finished()
            await asyncio.gather(*updates)  # they end with the job
        except DfmError as error:
            faults.append(error)
            for task in updates:
                task.cancel()
        finally:
            changed.close()

    async with asyncio.TaskGroup() as group:
        updates = [group.create_task(watch())]
        if job.watched:
            updates.append(group.create_task(count()))
        group.create_task(follow(updates))
        while not changed.closed:
            await changed.wait()
            surface.paint(view)
    if faults:
        raise faults[0]
