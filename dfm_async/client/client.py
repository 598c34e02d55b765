"""The client of a web service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, Self, overload
from urllib.parse import quote

import httpx2
import msgspec

from dfm_async.base.tasks import in_thread
from dfm_async.client.event_stream import EventParser
from dfm_async.client.service_connection import INVALID, ServiceConnection
from dfm_async.errors import ServiceError
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.checks import moment
from dfm_async.model.events import Activity, Event, Result
from dfm_async.model.info import JobInfo, ScheduleInfo
from dfm_async.model.stats import SessionStats, SiteStats
from dfm_async.model.status import JobStatus, check_status
from dfm_async.results.event_codec import event_from_data
from dfm_async.wire.codec.arrow_streams import read_table

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 8
"""How many times in a row a broken stream is opened again without receiving an event."""
_TEMPORARY: Final = (502, 503, 504)
"""The statuses of a service that restarts, or of the proxy in front of it."""
_PAGE: Final = 500
_ARROW: Final = "application/vnd.apache.arrow.stream"
_LONGEST_DELAY: Final = 60.0
"""The longest delay before a broken stream is opened again, in seconds, whatever the service asks for."""

ParameterSet = Mapping[str, Any]


class ServedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline that a service runs for its clients.

    Attributes:
        name: the name to submit it by.
        pipeline: the name of the pipeline itself.
        params: the JSON schema of one parameter set.
        results: the JSON schema of the results of each place.
        definitions: the schemas that ``params`` and ``results`` refer to as ``#/$defs/...``.
    """

    name: str
    pipeline: str | None
    params: dict[str, Any]
    results: dict[str, Any]
    definitions: dict[str, Any] = {}


class Client:
    """Submit jobs to a web service, follow them, and cancel them.

    An async context manager. All methods raise :class:`~dfm_async.errors.ServiceError` when the service cannot be
    reached, rejects the request or returns an invalid response, and the errors of a session where they apply:
    ``JobNotFound``, ``JobExists``, ``ParameterError``, ``PipelineError``, ``ResultsExpired``.

    Args:
        url: the address of the service, with the path that it is mounted at: ``http://127.0.0.1:8000/dfm``.
        token: the token to authenticate with, if the service needs one.
        transport: what sends requests: ``httpx2.ASGITransport(app)`` for an application in the same process.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(
        self, url: str, *, token: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._connection = ServiceConnection(url, token, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections to the service. Jobs continue."""
        await self._connection.http.aclose()

    # pipelines and submissions

    async def pipelines(self) -> list[ServedPipeline]:
        """Return the pipelines that the service has registered, with the schemas of their parameters and results."""
        found = await self._connection.request("GET", "/pipelines")
        try:
            listed = [{**data, "definitions": found.get("$defs", {})} for data in found["pipelines"]]
            return msgspec.convert(listed, list[ServedPipeline])
        except INVALID as error:
            raise self._connection.invalid(error) from error

    async def submit(
        self,
        pipeline: str | Pipeline,
        params: ParameterSet | Sequence[ParameterSet] | None = None,
        *,
        stay_open: bool = False,
        job_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        on_error: Literal["continue", "stop"] = "continue",
        start_at: float | datetime | None = None,
        checkpoint: Literal["marked", "calls"] = "marked",
    ) -> JobInfo:
        """Submit a job.

        Args:
            pipeline: the name of a registered pipeline, or a pipeline of your own if the service allows that.
            params: one parameter set, or several; None for one without parameters.
            stay_open: accept further parameter sets by :meth:`send_input_params`, until :meth:`send_stop_frame`.
            job_id: the id of the job; submitting the same content with the same id again returns the existing job.
            priority: jobs with the highest priority run first; a priority above 0 needs the permission ``prioritize``.
            deadline: abort the job after this many seconds.
            on_error: whether other work continues after an error.
            start_at: when the job starts, as a datetime with a time zone, or in seconds since 1970.
            checkpoint: which calls are recorded if the service has a store: those of operations with
                ``checkpoint=True``, or all.
        """
        given: Any = {} if params is None and not stay_open else params
        body: dict[str, Any] = {
            "params": given,
            "open": stay_open,
            "priority": priority,
            "deadline": deadline,
            "on_error": on_error,
        }
        if start_at is not None:
            body["start_at"] = moment("start_at", start_at)
        if checkpoint != "marked":
            body["checkpoint"] = checkpoint
        if job_id is not None:
            body["job_id"] = job_id
        path = f"/pipelines/{quote(pipeline, safe='')}/jobs" if isinstance(pipeline, str) else "/jobs"
        if isinstance(pipeline, Pipeline):
            body["pipeline"] = pipeline.model_dump()
        return self._info(await self._connection.request("POST", path, job_id or "", body=body))

    # jobs

    async def jobs(
        self,
        limit: int = 50,
        status: JobStatus | None = None,
        *,
        pipeline: str | None = None,
        principal: str | None = None,
        since: float | None = None,
        until: float | None = None,
        search: str | None = None,
    ) -> list[JobInfo]:
        """Return the newest jobs that match all conditions, the newest first.

        Args:
            limit: the maximum number of jobs.
            status: only jobs with this status.
            pipeline: only jobs of the pipeline with this name.
            principal: only jobs of this principal.
            since: only jobs that were created at this time or later, in seconds since 1970.
            until: only jobs that were created before this time.
            search: words that must all occur in their id, the name of their pipeline or their principal.

        Raises:
            ValueError: ``status`` is not a ``JobStatus``.
        """
        found: list[JobInfo] = []
        given = {"pipeline": pipeline, "principal": principal, "since": since, "until": until, "search": search}
        query: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if status is not None:
            check_status("status", status)
            query["status"] = status.value
        while len(found) < limit:
            query["limit"] = min(limit - len(found), _PAGE)
            listed, following = self._page(await self._connection.request("GET", "/jobs", query=query), "jobs")
            found += [self._info(data) for data in listed]
            if following is None or not listed:
                break
            query["after"] = following
        return found[:limit]

    async def stats(self) -> SessionStats:
        """Return the numbers of jobs and the state of the workers; needs the permission ``metrics``."""
        found = await self._connection.request("GET", "/stats")
        try:
            return msgspec.convert(found, SessionStats)
        except INVALID as error:
            raise self._connection.invalid(error) from error

    async def schedules(self) -> list[ScheduleInfo]:
        """Return the schedules of the service; none without the permission ``metrics``."""
        found = await self._connection.request("GET", "/schedules")
        try:
            return msgspec.convert(found["schedules"], list[ScheduleInfo])
        except INVALID as error:
            raise self._connection.invalid(error) from error

    async def changes(self) -> AsyncGenerator[JobInfo | dict[str, SiteStats], None]:
        """Yield the states of all jobs, and of the workers by site; then those that change, until the service ends.

        The iterator yields states, not a history: fast changes are coalesced. Without the permission ``metrics``, it
        yields jobs only.

        Raises:
            ServiceError: the connection has broken.
        """
        connection = self._connection
        try:
            async with connection.stream("/stream") as response:
                await connection.check(response, "")
                async for sent in connection.events(response, EventParser(connection.largest)):
                    if sent.name == "drain":
                        return
                    if sent.name == "job":
                        yield self._info(connection.decoded(sent.data))
                    elif sent.name == "sites":
                        yield self._sites(connection.decoded(sent.data))
        except httpx2.TransportError as error:
            raise ServiceError(connection.url, f"the stream of jobs broke: {error or type(error).__name__}") from error

    async def info(self, job_id: str) -> JobInfo:
        """Return what is known of a job."""
        return self._info(await self._connection.request("GET", _path(job_id), job_id))

    async def send_input_params(self, job_id: str, params: ParameterSet | Sequence[ParameterSet]) -> JobInfo:
        """Send further parameter sets to a job that was submitted with ``stay_open``."""
        body = {"params": params}
        return self._info(await self._connection.request("POST", f"{_path(job_id)}/inputs", job_id, body=body))

    async def send(self, job_id: str, name: str, value: Any = None, *, frame: int | None = None) -> JobInfo:
        """Send an event to a parameter set of a job: a ``Wait`` of the pipeline for that name takes it.

        Args:
            job_id: the job.
            name: the name of the event.
            value: its value, as JSON represents it.
            frame: the number of the parameter set; None if the job has exactly one.
        """
        body = {"value": value, "frame": frame}
        path = f"{_path(job_id)}/events/{quote(name, safe='')}"
        return self._info(await self._connection.request("POST", path, job_id, body=body))

    async def send_stop_frame(self, job_id: str) -> JobInfo:
        """Declare that no further parameter sets will come: the job ends when all are done."""
        return self._info(await self._connection.request("POST", f"{_path(job_id)}/finish", job_id))

    async def resume(self, job_id: str, accept_changes: bool = False) -> JobInfo:
        """Resume a durable job that was interrupted.

        Args:
            job_id: the job.
            accept_changes: go on although the code of operations has changed since the job was submitted.
        """
        query = "?accept_changes=true" if accept_changes else ""
        return self._info(await self._connection.request("POST", f"{_path(job_id)}/resume{query}", job_id))

    async def retry_failed(self, job_id: str) -> JobInfo:
        """Run the failed parameter sets of an ended job again; return the new job."""
        return self._info(await self._connection.request("POST", f"{_path(job_id)}/retry", job_id))

    async def fork(
        self, job_id: str, from_node: str, frame: int | Sequence[int] | None = None, accept_changes: bool = False
    ) -> JobInfo:
        """Run an ended job again from a node on, as a new job; return the new job.

        Args:
            job_id: the job.
            from_node: the first node that runs again, as in :meth:`dfm_async.Job.fork`.
            frame: one call of the node, as in :meth:`dfm_async.Job.fork`.
            accept_changes: use recorded values of operations whose code has changed since the job was submitted.
        """
        numbers = None if frame is None else [frame] if isinstance(frame, int) else list(frame)
        body = {"from_node": from_node, "frame": numbers, "accept_changes": accept_changes}
        return self._info(await self._connection.request("POST", f"{_path(job_id)}/fork", job_id, body=body))

    async def cancel(self, job_id: str, reason: str | None = None) -> dict[str, str]:
        """Cancel a job, wait until nothing of it runs, and return the outcome at each site."""
        body = {"reason": reason}
        found = await self._connection.request("POST", f"{_path(job_id)}/cancel", job_id, body=body)
        try:
            return msgspec.convert(found["outcomes"], dict[str, str])
        except INVALID as error:
            raise self._connection.invalid(error) from error

    async def forget(self, job_id: str) -> None:
        """Delete a job that has ended, with its events."""
        await self._connection.request("DELETE", _path(job_id), job_id)

    # results and events

    async def results(
        self, job_id: str, *, places: Collection[str] = (), after: int = -1
    ) -> AsyncGenerator[Result, None]:
        """Yield the results of a job as they arrive, until it ends or is interrupted.

        A broken connection is opened again; no result is lost or repeated. Values are as JSON represents them.

        Args:
            job_id: the job.
            places: only results of these places; empty for all.
            after: begin after this offset, such as the offset of the last result that was processed.
        """
        async for event in self._follow(job_id, after, activity=False):
            if isinstance(event, Result) and (not places or event.place in places):
                yield event

    async def table(self, job_id: str, offset: int, *, max_bytes: int = 256 * 1024 * 1024) -> Any:
        """Return a result that is a table or a data frame as a ``pyarrow.Table``; needs pyarrow.

        Args:
            job_id: the job.
            offset: the offset of the result.
            max_bytes: the maximum size that the service may send.

        Raises:
            ImportError: pyarrow is not installed.
            ServiceError: the result is not a table (``code`` is ``"table"``), or cannot be read.
            ResultsExpired: the service does not have the result any longer.
        """
        path = f"{_path(job_id)}/results/{offset}"
        data = await self._connection.content(path, _ARROW, job_id, offset - 1, max_bytes)
        try:
            return await in_thread(lambda: read_table(data), "arrow")
        except INVALID as error:
            problem = f"result {offset} of job {job_id} cannot be read as a table: {error}"
            raise ServiceError(self._connection.url, problem, 200) from error

    @overload
    def events(
        self, job_id: str, *, after: int = -1, follow: bool = True, activity: Literal[False] = False
    ) -> AsyncGenerator[Event, None]: ...
    @overload
    def events(
        self, job_id: str, *, after: int = -1, follow: bool = True, activity: bool
    ) -> AsyncGenerator[Event | Activity, None]: ...
    def events(
        self, job_id: str, *, after: int = -1, follow: bool = True, activity: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Yield the events of a job in the order of its log; a broken connection is opened again.

        Args:
            job_id: the job.
            after: begin after this offset.
            follow: wait for further events until the job ends or is interrupted, instead of ending with the newest one.
            activity: while following, also yield what operations do, if the service counts it.
        """
        return self._follow(job_id, after, activity=activity) if follow else self._stored(job_id, after)

    async def _stored(self, job_id: str, after: int) -> AsyncGenerator[Event | Activity, None]:
        end = (await self.info(job_id)).events
        while after + 1 < end:
            query = {"after": after, "limit": _PAGE}
            path = f"{_path(job_id)}/events"
            listed, following = self._page(
                await self._connection.request("GET", path, job_id, after=after, query=query), "events"
            )
            if not listed:
                return
            for data in listed:
                event = self._event(data.get("event") if isinstance(data, dict) else None, data)
                if event is not None:
                    yield event
            if not isinstance(following, int) or following <= after:
                raise self._connection.invalid(
                    ValueError(f"the page after offset {after} is followed by {following!r}")
                )
            after = following

    async def _follow(self, job_id: str, after: int, *, activity: bool) -> AsyncGenerator[Event | Activity, None]:
        connection = self._connection
        query = {"activity": "true"} if activity else {}
        delay, failed = 1.0, 0
        while True:
            stream = EventParser(connection.largest)
            try:
                async with connection.stream(f"{_path(job_id)}/stream", after=after, query=query) as response:
                    status = response.status_code
                    if status == 204:  # all events were read before
                        return
                    if status in _TEMPORARY:
                        raise httpx2.RemoteProtocolError(f"the service answered with status {status}")
                    await connection.check(response, job_id, after)
                    async for sent in connection.events(response, stream):
                        if sent.name in ("end", "interrupted"):
                            return
                        event = self._event(sent.name, connection.decoded(sent.data))
                        if event is not None:
                            failed = 0
                            after = after if isinstance(event, Activity) else event.offset
                            yield event
                problem = "the service ended the stream"
            except httpx2.TransportError as error:
                problem = str(error) or type(error).__name__
                if after < 0 and not failed and isinstance(error, httpx2.ConnectError):
                    raise connection.unreachable(error) from error
            failed += 1
            if stream.retry is not None:
                delay = min(stream.retry / 1000, _LONGEST_DELAY)
            if failed > _ATTEMPTS:
                raise ServiceError(connection.url, f"the stream of job {job_id} broke {failed} times: {problem}")
            _log.warning("the stream of job %s broke: %s; reconnecting in %g s", job_id, problem, delay)
            await asyncio.sleep(delay)  # as long as the service asks for

    # decoding

    def _page(self, page: Any, name: str) -> tuple[list[Any], Any]:
        """Return the items of a page, and where the next page begins."""
        if not isinstance(page, dict) or not isinstance(page.get(name), list) or "next" not in page:
            raise self._connection.invalid(ValueError(f"a page without {name!r} and 'next'"))
        return page[name], page["next"]

    def _event(self, name: Any, data: Any) -> Event | Activity | None:
        try:
            return event_from_data(name, data)
        except INVALID as error:
            raise self._connection.invalid(error) from error

    def _sites(self, data: Any) -> dict[str, SiteStats]:
        try:
            return msgspec.convert(data["sites"], dict[str, SiteStats])
        except INVALID as error:
            raise self._connection.invalid(error) from error

    def _info(self, data: Any) -> JobInfo:
        try:
            return msgspec.convert({**data, "label": data.get("principal")}, JobInfo)
        except INVALID as error:
            raise self._connection.invalid(error) from error


def _path(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"
