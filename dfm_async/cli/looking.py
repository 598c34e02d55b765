"""``dfm-async jobs``, ``attach``, ``logs`` and ``cancel``: jobs of other processes."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from datetime import datetime
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from dfm_async.cli.exits import Exit, exit_of_status
from dfm_async.cli.following import follow
from dfm_async.cli.program import complain, safe, safe_json
from dfm_async.cli.results import json_values, value_text
from dfm_async.cli.running import Output
from dfm_async.cli.sources import JobSource
from dfm_async.cli.streams import StandardOutput
from dfm_async.cli.terminal import terminal
from dfm_async.cli.view import STATUS_STYLES, counted, view_of
from dfm_async.model.activity import Activity
from dfm_async.model.events import Event, Failure, FrameCompleted, Metrics, Progress, Result, StatusChanged
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.results.event_data import event_data
from dfm_async.telemetry.spans import frame_text

__all__ = ["attach", "cancel", "list_jobs", "show_log"]

Source = AbstractAsyncContextManager[JobSource]


async def list_jobs(opening: Source, limit: int, status: JobStatus | None, *, as_json: bool) -> int:
    """Lists jobs, the newest first."""
    output = StandardOutput()
    async with opening as source:
        found = await source.infos(limit, status)
    if as_json:
        for info in found:
            await output.line(safe_json(msgspec.json.encode(info)))
        return Exit.SUCCESS
    if found:
        _table(found)
        for info in found:
            if info.status is JobStatus.UNKNOWN:
                complain(info.reason or f"job {info.job_id} cannot be read")
    else:
        complain("there are no jobs" if status is None else f"there are no jobs that are {status.value}")
    return Exit.SUCCESS


def _table(found: list[JobInfo]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "status", "pipeline", "created", "took", "sets", "events", "errors"):
        table.add_column(name, justify="right" if name in ("took", "sets", "events", "errors") else "left")
    for info in found:
        sets = "" if info.sets is None else f"{info.done}/{info.sets}" if info.done is not None else str(info.sets)
        table.add_row(
            safe(info.job_id),
            Text(info.status.value, STATUS_STYLES.get(info.status, "cyan")),
            safe(info.pipeline or ""),
            _time(info.created),
            "" if info.finished is None else f"{info.finished - info.created:.2f} s",
            sets,
            str(info.events),
            str(info.errors or ""),
        )
    terminal().print(table)


async def attach(opening: Source, job_id: str, after: int, output: Output) -> int:
    """Follows a job to its end, as ``run`` does. Being cancelled leaves the job alone."""
    out = StandardOutput()
    async with opening as source:
        info = await source.info(job_id)
        output.check_places(info.places)
        writer = output.writer(out)
        view = view_of(quiet=output.quiet, sets=info.sets)
        view.status = info.status
        with view.shown(out):
            async with aclosing(source.events(job_id, after, following=True)) as events:
                last = await follow(events, writer, view, output.places)
        if last is None or not last.status.ended:  # it had ended before the offset, or was resumed since
            info = await source.info(job_id)
            last = StatusChanged(info.events, info.status, info.reason)
    view.status = last.status
    view.sum_up(job_id, last.reason)
    unread = sum(count for place, count in view.unread.items() if not output.places or place in output.places)
    if unread:
        view.say(f"{counted(unread, 'result')} cannot be read here: give the module of the class with --import", "red")
        return Exit.FAILED
    return exit_of_status(last.status)


async def show_log(opening: Source, job_id: str, after: int, *, following: bool, as_json: bool) -> int:
    """Writes what happened to a job, one line per event."""
    output = StandardOutput()
    values = json_values()
    async with opening as source, aclosing(source.events(job_id, after, following=following)) as events:
        async for event in events:
            if isinstance(event, Activity):
                continue
            if as_json:
                await output.line(safe_json(values.encode_whole(event_data(event, values, tracebacks=True))))
            else:
                await output.line(f"{event.offset:>6}  {_line(event)}")
    return Exit.SUCCESS


async def cancel(opening: Source, job_id: str, reason: str, *, as_json: bool) -> int:
    """Cancels a job, and tells what became of it at each site."""
    output = StandardOutput()
    async with opening as source:
        outcomes = await source.cancel(job_id, reason)
        info = await source.info(job_id)
    if as_json:
        told: dict[str, Any] = {"job_id": job_id, "status": info.status.value, "outcomes": outcomes}
        await output.line(safe_json(msgspec.json.encode(told)))
        return Exit.SUCCESS
    sites = "".join(f"\n  {safe(site)}: {safe(outcome)}" for site, outcome in outcomes.items())
    await output.line(f"job {safe(job_id)} is {info.status.value}{sites}")
    return Exit.SUCCESS


def _line(event: Event) -> str:
    match event:
        case Result():
            value = value_text(event.value).replace("\n", "\\n")
            text = f"result    {event.place} [{frame_text(event.frame)}] {value[:200]}"
        case Failure():
            where = "" if event.place is None else f"{event.place} "
            text = f"failure   {where}[{frame_text(event.frame)}] {str(event.error).rstrip()}"
        case FrameCompleted():
            text = f"frame     [{frame_text(event.frame)}] done"
        case StatusChanged():
            text = f"status    {event.status.value}" + (f": {event.reason}" if event.reason else "")
        case Progress():
            total = "" if event.total is None else f"/{event.total:g}"
            where = f"{event.site} {event.node} [{frame_text(event.frame)}]"
            text = f"progress  {where} {event.done:g}{total} {event.note}".rstrip()
        case Metrics():
            step = "" if event.step is None else f" step {event.step}"
            numbers = " ".join(f"{name}={value}" for name, value in event.values.items())
            text = f"metrics   {event.site} {event.node} [{frame_text(event.frame)}]{step} {numbers}"
        case _:
            text = f"worker    {event.site} {event.kind}: {event.detail}"
    return safe(text)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
