"""``dfm-async jobs``, ``attach``, ``logs``, ``send``, ``retry``, ``fork``, ``cancel``: jobs of a service or a store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec
from rich.table import Table
from rich.text import Text

from dfm_async.cli.command_options import EventOptions, Output, ServiceOptions, SourceOptions
from dfm_async.cli.command_runner import BadInput, Exit, exit_of_status, print_message, safe, safe_json
from dfm_async.cli.params import parse_value
from dfm_async.cli.references import load_module
from dfm_async.cli.results import check_places, json_values, value_text, writer_of
from dfm_async.cli.service_tokens import client_token
from dfm_async.cli.stores import store_session
from dfm_async.cli.terminal import StandardOutput, terminal
from dfm_async.cli.view import STATUS_STYLES, counted, follow, logged, view_of
from dfm_async.errors import DfmError, JobNotFound
from dfm_async.model.events import (
    Activity,
    Event,
    EventSent,
    Failure,
    FailureHandled,
    FrameCompleted,
    Metrics,
    Progress,
    Result,
    StatusChanged,
    WaitBegan,
    WaitEnded,
    WorkerNotice,
)
from dfm_async.model.info import JobInfo
from dfm_async.model.job_filter import JobFilter
from dfm_async.model.status import JobStatus
from dfm_async.planning.types import type_of_event
from dfm_async.results.event_codec import event_data
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.telemetry.spans import frame_text

if TYPE_CHECKING:
    from dfm_async.client import Client


class _Wanted(TypedDict):
    """Which jobs to list, of a service as of a store."""

    pipeline: str | None
    since: float | None
    until: float | None
    search: str | None


def _open(source: SourceOptions, modules: Sequence[str] = ()) -> AbstractAsyncContextManager[Client | _StoredJobs]:
    """Open the store if one is given, else the service. Modules have the classes of stored values."""
    return open_client(source) if source.store is None else _stored_jobs(source.store, modules)


def open_client(source: ServiceOptions) -> Client:
    """Connect to the service."""
    try:
        from dfm_async.client import Client

        return Client(source.url, token=client_token(source.token_file, source.url))
    except (ImportError, ValueError) as error:
        raise BadInput(f"--url: {error}") from error


@asynccontextmanager
async def _stored_jobs(url: str, modules: Sequence[str]) -> AsyncIterator[_StoredJobs]:
    for name in modules:
        load_module(name)
    async with store_session(url) as session:
        yield _StoredJobs(session)


class _StoredJobs:
    """The jobs of a store, read beside the process that runs them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def jobs(
        self, limit: int, status: JobStatus | None, *, principal: str | None, **wanted: Unpack[_Wanted]
    ) -> list[JobInfo]:
        """Return the newest jobs that fit, the newest first. Services label jobs with their principals."""
        found: list[JobInfo] = []
        async with aclosing(self._session.find_jobs(status=status, label=principal, **wanted)) as jobs:
            async for info in jobs:
                found.append(info)
                if len(found) == limit:
                    break
        return found

    async def info(self, job_id: str) -> JobInfo:
        """Return what is known of a job."""
        return (await self._job(job_id)).info()

    async def events(
        self, job_id: str, *, after: int, follow: bool, activity: bool
    ) -> AsyncGenerator[Event | Activity, None]:
        """Yield the events after an offset."""
        job = await self._job(job_id)
        end = job.info().events
        if not follow and after + 1 >= end:
            return
        async with aclosing(job.events(after if after >= 0 else None)) as events:
            async for event in events:
                yield event
                if not follow and event.offset + 1 >= end:
                    return

    async def cancel(self, job_id: str, reason: str) -> dict[str, str]:
        """Cancel a job, also one that another process runs."""
        return await (await self._job(job_id)).cancel(reason)

    async def send(self, job_id: str, name: str, value: Any, *, frame: int | None) -> JobInfo:
        """Send an event to a job that another process runs."""
        job = await self._job(job_id)
        await job.send(name, value, frame=frame)
        return job.info()

    async def _job(self, job_id: str) -> Job:
        job = await self._session.reattach(job_id)
        if not job.was_found:
            raise JobNotFound(job_id, "the store")
        return job


async def list_jobs(options: SourceOptions, limit: int, wanted: JobFilter, *, as_json: bool) -> int:
    """List jobs, the newest first."""
    output = StandardOutput()
    async with _open(options) as source:
        rest: _Wanted = {
            "pipeline": wanted.pipeline,
            "since": wanted.since,
            "until": wanted.until,
            "search": wanted.search,
        }
        found = await source.jobs(limit, wanted.status, principal=wanted.label, **rest)
    if as_json:
        for info in found:
            await output.line(safe_json(msgspec.json.encode(info)))
        return Exit.SUCCESS
    if found:
        _table(found)
        for info in found:
            if info.status is JobStatus.UNKNOWN:
                print_message(info.reason or f"job {info.job_id} cannot be read")
    else:
        status = wanted.status
        if wanted != JobFilter(status=status):
            print_message("no jobs fit these options")
        else:
            print_message("no jobs" if status is None else f"no jobs are {status.value}")
    return Exit.SUCCESS


def _table(found: list[JobInfo]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "status", "pipeline", "created", "took", "sets", "events", "errors"):
        table.add_column(name, justify="right" if name in ("took", "sets", "events", "errors") else "left")
    for info in found:
        sets = "" if info.sets is None else f"{info.done}/{info.sets}" if info.done is not None else str(info.sets)
        table.add_row(
            safe(info.job_id),
            Text(_status(info), STATUS_STYLES.get(info.status, "cyan")),
            safe(info.pipeline or ""),
            _time(info.created),
            "" if info.finished is None else f"{max(0.0, info.finished - (info.start_at or info.created)):.2f} s",
            sets,
            str(info.events),
            str(info.errors or ""),
        )
    terminal().print(table)


async def attach(options: EventOptions, output: Output) -> int:
    """Follow a job to its end, as ``run`` does. Cancellation does not cancel the job."""
    stdout, places, job_id = StandardOutput(), output.places or (), options.job
    async with _open(options, options.modules or ()) as source:
        info = await source.info(job_id)
        check_places(output, info.places)
        writer = writer_of(output, stdout)
        view = view_of(quiet=output.quiet, sets=info.sets)
        view.status = info.status
        with logged(view), view.shown(stdout):
            async with aclosing(source.events(job_id, after=options.after, follow=True, activity=True)) as events:
                last = await follow(events, writer, view, places)
        if last is None or not last.status.ended:  # the job had ended before the offset, or was resumed since
            info = await source.info(job_id)
            last = StatusChanged(info.events, info.status, info.reason)
    view.status = last.status
    view.summarize(job_id, last.reason)
    unread = sum(count for place, count in view.unread.items() if not places or place in places)
    if unread:
        view.print(
            f"{counted(unread, 'result')} cannot be decoded: name the module of their class with --import", "red"
        )
        return Exit.FAILED
    return exit_of_status(last.status)


async def show_log(options: EventOptions, *, following: bool, as_json: bool) -> int:
    """Write the events of a job, one per line."""
    output = StandardOutput()
    values = json_values()
    async with (
        _open(options, options.modules or ()) as source,
        aclosing(source.events(options.job, after=options.after, follow=following, activity=False)) as events,
    ):
        async for event in events:
            if isinstance(event, Activity):
                continue
            if as_json:
                await output.line(safe_json(values.encode_whole(event_data(event, values, tracebacks=True))))
            else:
                await output.line(f"{event.offset:>6}  {_line(event)}")
    return Exit.SUCCESS


async def cancel(options: SourceOptions, job_id: str, reason: str, *, as_json: bool) -> int:
    """Cancel a job, and show the outcome at each site."""
    output = StandardOutput()
    async with _open(options) as source:
        outcomes = await source.cancel(job_id, reason)
        info = await source.info(job_id)
    if as_json:
        data: dict[str, Any] = {"job_id": job_id, "status": info.status.value, "outcomes": outcomes}
        await output.line(safe_json(msgspec.json.encode(data)))
        return Exit.SUCCESS
    sites = "".join(f"\n  {safe(site)}: {safe(outcome)}" for site, outcome in outcomes.items())
    await output.line(f"job {safe(job_id)} is {info.status.value}{sites}")
    return Exit.SUCCESS


async def send(options: SourceOptions, job_id: str, name: str, text: str, frame: int | None, *, as_json: bool) -> int:
    """Send an event to a job, and show what it waits for now."""
    output = StandardOutput()
    async with _open(options) as source:
        schema = (await source.info(job_id)).events_awaited.get(name)
        value = parse_value(text, () if schema is None else (type_of_event(schema),))
        info = await source.send(job_id, name, value, frame=frame)
    if as_json:
        await output.line(safe_json(msgspec.json.encode(info)))
        return Exit.SUCCESS
    await output.line(f"event {safe(repr(name))} was sent to job {safe(job_id)}")
    return Exit.SUCCESS


async def retry(options: ServiceOptions, job_id: str, *, as_json: bool) -> int:
    """Run the failed parameter sets of a job again, and show the new job."""
    output = StandardOutput()
    async with open_client(options) as client:
        info = await client.retry_failed(job_id)
    if as_json:
        await output.line(safe_json(msgspec.json.encode(info)))
        return Exit.SUCCESS
    sets = "" if info.sets is None else f" with {counted(info.sets, 'parameter set')}"
    await output.line(f"job {safe(info.job_id)} runs the failed parameter sets of {safe(job_id)} again{sets}")
    return Exit.SUCCESS


async def fork(
    options: ServiceOptions, job_id: str, from_node: str, frame: str | None, *, accept_changes: bool, as_json: bool
) -> int:
    """Run a job again from a node on, and show the new job."""
    output, numbers = StandardOutput(), None if frame is None else _frame(frame)
    async with open_client(options) as client:
        info = await client.fork(job_id, from_node, numbers, accept_changes)
    if as_json:
        await output.line(safe_json(msgspec.json.encode(info)))
        return Exit.SUCCESS
    where = safe(from_node) if frame is None else f"{safe(from_node)} in frame {numbers}"
    await output.line(f"job {safe(info.job_id)} runs {safe(job_id)} again from {where} on")
    return Exit.SUCCESS


def _frame(text: str) -> list[int]:
    """Return the numbers of a frame such as ``0,57``."""
    numbers = text.strip("[]() ").split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise BadInput(f"--frame takes numbers, such as 0,57, not {text!r}")
    return [int(number) for number in numbers]


def _line(event: Event) -> str:
    match event:
        case Result():
            text = f"result    {event.place} [{frame_text(event.frame)}] {value_text(event.value)[:200]}"
        case Failure():
            where = "" if event.place is None else f"{event.place} "
            text = f"failure   {where}[{frame_text(event.frame)}] {_summary(event.error)}"
        case FrameCompleted():
            text = f"frame     [{frame_text(event.frame)}] done"
        case StatusChanged():
            text = f"status    {event.status.value}" + (f": {event.reason}" if event.reason else "")
        case Progress():
            total = "" if event.total is None else f"/{event.total:g}"
            where = f"{event.site} {event.node} [{frame_text(event.frame)}]"
            text = f"progress  {where} {event.done:g}{total} {event.note}".rstrip()
        case FailureHandled():
            where = f"{event.site} {event.node} [{frame_text(event.frame)}]"
            text = f"handled   {where} {event.type_name}: {event.message}"
        case Metrics():
            step = "" if event.step is None else f" step {event.step}"
            numbers = " ".join(f"{name}={value}" for name, value in event.values.items())
            text = f"metrics   {event.site} {event.node} [{frame_text(event.frame)}]{step} {numbers}"
        case WaitBegan():
            what = f"for event {event.name!r}" if event.name else "for a time"
            until = "" if event.until is None else f" until {_time(event.until)}"
            text = f"waits     {event.node} [{frame_text(event.frame)}] {what}{until}"
        case EventSent():
            text = f"event     {event.name!r} [{frame_text(event.frame)}] {value_text(event.value)[:200]}"
        case WaitEnded():
            text = f"goes on   {event.node} [{frame_text(event.frame)}] by {event.by}"
        case WorkerNotice():
            text = f"worker    {event.site} {event.kind}: {event.detail}"
    return safe(text).replace("\n", "\\n")


def _summary(error: DfmError) -> str:
    """Return the message of an error without its remote traceback."""
    text, traceback = str(error), error.remote_traceback.rstrip()
    return (text.removesuffix(traceback) if traceback else text).rstrip()


def _status(info: JobInfo) -> str:
    waits = info.start_at is not None and info.status is JobStatus.SUBMITTED
    return f"starts at {_time(info.start_at or 0)}" if waits else info.status.value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
