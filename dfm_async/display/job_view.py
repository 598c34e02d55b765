"""What a job shows of itself: at one moment, in HTML or on a line."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from typing import Final

from dfm_async.display.markup import badge, bar, framed, table
from dfm_async.display.views import errors_part, results_table
from dfm_async.drawing import Graph, graph_of, svg
from dfm_async.model.activity import NodeActivity
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.session.job import Job

__all__ = ["JobView"]

_MOODS: Final = {
    JobStatus.FINISHED: "good",
    JobStatus.FAILED: "bad",
    JobStatus.ABORTED: "bad",
    JobStatus.INTERRUPTED: "bad",
}
_DRAWN = 60
"""A job with more nodes is shown without a drawing of what they do: it is made anew each time."""


class JobView:
    """A job, and what is known of its nodes if it is watched."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._nodes: dict[tuple[str, str], NodeActivity] = {}
        self._graph: Graph | None = None

    def saw(self, nodes: Iterable[NodeActivity]) -> None:
        """Takes over what nodes did."""
        self._nodes.update(((node.node, node.site), node) for node in nodes)

    def line(self) -> str:
        """The job on one line."""
        if not self._job.was_found:
            return repr(self._job)
        info = self._job.info()
        running = sum(node.running for node in self._nodes.values())
        calls = f", {running} calls running" if running else ""
        return f"job {info.job_id} {info.status.value}: {', '.join(_counts(info))}{calls}"

    def html(self) -> str:
        """The job as a part of a page."""
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
