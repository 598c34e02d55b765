"""Jobs of a running service, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import msgspec

from dfm_async.base.installation import install_hint
from dfm_async.cli.exits import BadInput, Unreachable
from dfm_async.cli.sources import JobSource
from dfm_async.errors import DfmError, OperationFailed
from dfm_async.model.activity import Activity
from dfm_async.model.events import (
    Event,
    Failure,
    FrameCompleted,
    Metrics,
    Progress,
    Result,
    StatusChanged,
    WorkerNotice,
)
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus

try:
    import httpx
    from httpx_sse import SSEError, aconnect_sse
except ImportError as error:
    raise BadInput(f"looking at a service needs httpx and httpx-sse: {install_hint('cli')}") from error

_log = logging.getLogger(__name__)

__all__ = ["ServedJobs", "event_of", "served_jobs"]

_ATTEMPTS: Final = 8
"""How often a broken stream is opened again without an event in between."""
_PASSING: Final = (502, 503, 504)
"""What a service that is about to come back answers, or the proxy before it."""
_PAGE: Final = 500
_LONGEST_PAUSE: Final = 60.0
"""At most this many seconds are waited before a broken stream is opened again, whatever the service asks for."""
_LARGEST: Final = 256 * 1024 * 1024
"""How many bytes an event of a stream, or another answer, may have."""
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_KINDS: Final[dict[str, Any]] = {
    "result": Result,
    "progress": Progress,
    "metrics": Metrics,
    "status": StatusChanged,
    "frame": FrameCompleted,
    "worker": WorkerNotice,
    "activity": Activity,
}


@asynccontextmanager
async def served_jobs(url: str, token: str | None) -> AsyncIterator[JobSource]:
    """Opens the jobs of a service.

    Args:
        url: its address, with the path that it is mounted at.
        token: what it knows us by, if it wants to know.
    """
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--url {url}: an address begins with http:// or https://, as in http://127.0.0.1:8000")
    headers = {"accept-encoding": "identity"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    try:
        client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(30, read=60),
            event_hooks={"response": [_bound]},
        )
    except (httpx.InvalidURL, TypeError) as error:
        raise BadInput(f"--url {url}: {error}") from error
    async with client:
        yield ServedJobs(client, url)


class _Bounded(httpx.AsyncByteStream):
    """The body of an answer, with a bound for its size; in a stream of events the bound is for each event."""

    def __init__(self, inner: httpx.AsyncByteStream, *, events: bool) -> None:
        self._inner = inner
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, last = 0, b""
        async for chunk in self._inner:
            size += len(chunk)
            if self._events:  # a blank line ends an event, and may be in two chunks
                seen = last + chunk
                end = max((found.end() for found in _BLANK_LINE.finditer(seen)), default=-1)
                size = len(seen) - end if end >= 0 else size
                last = seen[-3:]
            if size > _LARGEST:
                raise httpx.RemoteProtocolError(f"the service sends more than {_LARGEST:,} bytes at once")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _bound(response: httpx.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx.RemoteProtocolError("the service compresses its answers, although nobody asked for that")
    assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - of an asynchronous client
    events = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _Bounded(response.stream, events=events)


class ServedJobs:
    """The jobs of a service.

    Args:
        client: speaks to it.
        url: its address, as the user wrote it.
    """

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    async def infos(self, limit: int, status: JobStatus | None) -> list[JobInfo]:
        """What is known of the newest jobs, of all or of those in one state; the newest first."""
        found: list[JobInfo] = []
        query: dict[str, Any] = {} if status is None else {"status": status.value}
        while len(found) < limit:
            page = await self._ask("GET", "/jobs", params={**query, "limit": min(limit - len(found), _PAGE)})
            listed, following = self._parts(page, "jobs")
            found += [self._info(data) for data in listed]
            if following is None or not listed:
                break
            query["after"] = following
        return found[:limit]

    async def info(self, job_id: str) -> JobInfo:
        """What is known of one job."""
        return self._info(await self._ask("GET", _path(job_id), job_id))

    async def cancel(self, job_id: str, reason: str) -> dict[str, str]:
        """Cancels a job; waits until nothing of it runs any more."""
        found = await self._ask("POST", f"{_path(job_id)}/cancel", job_id, json={"reason": reason})
        try:
            return msgspec.convert(found["outcomes"], dict[str, str])
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise self._not_understood(error) from error

    def events(self, job_id: str, after: int, *, following: bool) -> AsyncGenerator[Event | Activity, None]:
        """Gives the events of a job behind an offset: those that are there, or all until it ends."""
        return self._follow(job_id, after) if following else self._stored(job_id, after)

    async def _stored(self, job_id: str, after: int) -> AsyncGenerator[Event | Activity, None]:
        end = (await self.info(job_id)).events
        while after + 1 < end:
            query = {"after": after, "limit": _PAGE}
            page = await self._ask("GET", f"{_path(job_id)}/events", job_id, params=query)
            listed, following = self._parts(page, "events")
            if not listed:
                return
            for data in listed:
                if not isinstance(data, dict) or not isinstance(data.get("event"), str):
                    raise self._not_understood(ValueError("an event without a name"))
                event = self._event(data["event"], data)
                if event is not None:
                    yield event
            if not isinstance(following, int) or following <= after:
                raise self._not_understood(ValueError(f"after offset {after} it goes on with {following!r}"))
            after = following

    async def _follow(self, job_id: str, after: int) -> AsyncGenerator[Event | Activity, None]:
        """Reads the stream of a job; goes on behind the last event after a break."""
        pause, failed = 1.0, 0
        while True:
            try:
                headers, query = _resumed(after), {"activity": "true"}
                async with aconnect_sse(
                    self._client, "GET", f"{_path(job_id)}/stream", headers=headers, params=query
                ) as source:
                    if source.response.status_code == 204:  # all of it was read before
                        return
                    if source.response.status_code in _PASSING:
                        raise httpx.RemoteProtocolError(f"it answered {source.response.status_code}")
                    await self._check(source.response, job_id)
                    async for sent in source.aiter_sse():
                        if sent.retry is not None:
                            pause = min(max(sent.retry / 1000, 0.0), _LONGEST_PAUSE)
                        if sent.event in ("end", "interrupted"):
                            return
                        event = self._event(sent.event, self._json(sent.data)) if sent.data else None
                        if event is not None:
                            failed = 0
                            after = after if isinstance(event, Activity) else event.offset
                            yield event
                problem = "the service ended the stream"
            except (httpx.TransportError, SSEError) as error:
                problem = f"{type(error).__name__}: {error}"
                if after < 0 and not failed and isinstance(error, httpx.ConnectError):
                    raise self._unreachable(error) from error
            failed += 1
            if failed > _ATTEMPTS:
                raise Unreachable(f"the stream of job {job_id} at {self._url} broke, and cannot be opened: {problem}")
            _log.warning("the stream of job %s broke: %s; it is opened again in %g s", job_id, problem, pause)
            await asyncio.sleep(pause)  # as long as the service asks for

    def _parts(self, page: Any, name: str) -> tuple[list[Any], Any]:
        """What a page of a list has, and where the next one begins."""
        if not isinstance(page, dict) or not isinstance(page.get(name), list) or "next" not in page:
            raise self._not_understood(ValueError(f"a page without {name!r} and 'next'"))
        return page[name], page["next"]

    def _event(self, name: str, data: Any) -> Event | Activity | None:
        try:
            return event_of(name, data)
        except (msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise self._not_understood(error) from error

    def _info(self, data: Any) -> JobInfo:
        try:
            return msgspec.convert({**data, "label": data.get("principal")}, JobInfo)
        except (msgspec.ValidationError, TypeError, AttributeError, RecursionError) as error:
            raise self._not_understood(error) from error

    def _json(self, data: bytes | str) -> Any:
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise self._not_understood(error) from error

    async def _ask(self, method: str, path: str, job_id: str = "", **options: Any) -> Any:
        try:
            response = await self._client.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        await self._check(response, job_id)
        return self._json(response.content)

    async def _check(self, response: httpx.Response, job_id: str) -> None:
        """Raises what the service refuses."""
        if response.is_success:
            return
        try:
            refused = msgspec.json.decode(await response.aread())
            code, message = str(refused["error"]), str(refused["message"])
        except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError, KeyError):
            raise Unreachable(
                f"{self._url} answered {response.status_code}: is there a dfm_async service at this address?"
            ) from None
        if code == "job":
            raise Unreachable(f"there is no job {job_id!r} at {self._url}: dfm-async jobs lists those that are there")
        if code == "expired":
            first = refused.get("first", 0)
            if not isinstance(first, int):
                raise self._not_understood(ValueError(f"the log begins at {first!r}"))
            message += f". Read from there with --after {first - 1}"
        if response.status_code == 401:
            message = "it needs a token: give --token-file, or set DFM_TOKEN"
        raise Unreachable(f"{self._url} refused ({response.status_code}): {message}")

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        return Unreachable(
            f"there is no service at {self._url} ({str(error) or type(error).__name__}): "
            "start one with dfm-async serve, or give its address with --url"
        )

    def _not_understood(self, error: Exception) -> Unreachable:
        return Unreachable(f"what {self._url} answered is not understood: {error}. Is it of another version?")


def event_of(name: str, data: Any) -> Event | Activity | None:
    """Makes an event of what a service tells; None if it is none of a job's log.

    Raises:
        msgspec.ValidationError: it is not what such an event has to be.
    """
    if name == "failure":
        return _failure(data)
    kind = _KINDS.get(name)
    if kind is None:
        return None
    event: Event | Activity = msgspec.convert(data, kind)
    return event


def _failure(data: Any) -> Failure:
    told, frame = data["error"], tuple(data["frame"])
    error: DfmError
    if "operation" in told:
        error = OperationFailed(
            data["site"],
            told["operation"],
            data["node"],
            frame,
            told["attempt"],
            told["type"],
            told["message"],
            told.get("traceback") or "",
        )
    else:
        error = DfmError(f"{told['type']}: {told['message']}")
    return Failure(data["offset"], data["place"], error, frame, data["site"], data["node"])


def _path(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"


def _resumed(after: int) -> dict[str, str]:
    return {} if after < 0 else {"last-event-id": str(after)}
