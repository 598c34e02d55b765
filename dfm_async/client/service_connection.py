"""Requests to a web service: bounded answers, and refusals as errors of the library."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import httpx2
import msgspec

from dfm_async.client.event_stream import EventParser, EventTooLarge, SentEvent
from dfm_async.errors import (
    DfmError,
    EventsFull,
    JobExists,
    JobNotFound,
    ParameterError,
    PipelineError,
    Problem,
    ResultsExpired,
    ServiceError,
)

_LARGEST: Final = 256 * 1024 * 1024
"""The maximum size of an event of a stream, and of any other answer, in bytes."""
INVALID: Final = (KeyError, TypeError, AttributeError, ValueError, RecursionError)
"""What decoding an untrusted answer can raise."""


class _Refusal(msgspec.Struct, frozen=True):
    """The JSON of an answer that refuses a request."""

    error: str
    message: str
    problems: list[str] = []
    first: int | None = None


def _media(response: httpx2.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def _check_encoding(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.RemoteProtocolError("the service sent a compressed answer without being asked for one")


class ServiceConnection:
    """Send requests to one service. An invalid URL is a ``ValueError``."""

    def __init__(self, url: str, token: str | None, transport: httpx2.AsyncBaseTransport | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"invalid service URL {url!r}: it must begin with http:// or https://")
        headers = {"accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        try:
            self.http = httpx2.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx2.Timeout(30, read=60),
                event_hooks={"response": [_check_encoding]},
                transport=transport,
            )
        except (httpx2.InvalidURL, TypeError) as error:
            raise ValueError(f"invalid service URL {url!r}: {error}") from error
        self.url = url
        self.largest = _LARGEST

    async def request(
        self, method: str, path: str, job_id: str = "", *, after: int = -1, body: Any = None, query: Any = None
    ) -> Any:
        """Send a request, and return its decoded answer. A refusal is raised as the error of the library that it means.

        Args:
            method: the HTTP method.
            path: the path below the address of the service.
            job_id: the job that the request is about, for errors.
            after: the offset after which events are read, for errors.
            body: what to send as JSON.
            query: the query parameters.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        answer = await self._send(method, path, job_id, after, content=content, headers=headers, params=query)
        return self.decoded(answer) if answer else None

    async def content(self, path: str, media: str, job_id: str, after: int, largest: int) -> bytes:
        """Return an answer of a media type that is not JSON; refusals are raised as by :meth:`request`.

        Args:
            path: the path below the address of the service.
            media: the type.
            job_id: the job that the request is about, for errors.
            after: the offset after which events are read, for errors.
            largest: the maximum size of the answer, in bytes.
        """
        return await self._send("GET", path, job_id, after, media, largest, headers={"accept": media})

    async def _send(
        self,
        method: str,
        path: str,
        job_id: str,
        after: int,
        media: str | None = None,
        largest: int | None = None,
        **options: Any,
    ) -> bytes:
        try:
            async with self.http.stream(method, path, **options) as response:
                await self.check(response, job_id, after)
                if media is not None and _media(response) != media:
                    raise self.invalid(ValueError(f"{_media(response)[:100]!r} instead of {media!r}"))
                return await self._content(response, largest)
        except httpx2.TransportError as error:
            raise self.unreachable(error) from error

    def stream(self, path: str, *, after: int = -1, query: Any = None) -> AbstractAsyncContextManager[httpx2.Response]:
        """Request a stream of events, which begins after an offset."""
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if after >= 0:
            headers["last-event-id"] = str(after)
        return self.http.stream("GET", path, headers=headers, params=query)

    async def events(self, response: httpx2.Response, stream: EventParser) -> AsyncGenerator[SentEvent, None]:
        """Yield the events of a response, which the stream finds."""
        if (kind := _media(response)) != "text/event-stream":
            raise httpx2.RemoteProtocolError(f"the service answered with {kind[:100]!r} instead of a stream of events")
        try:
            async for chunk in response.aiter_bytes():
                for sent in stream.feed(chunk):
                    yield sent
        except EventTooLarge as error:
            raise self.invalid(error) from error

    async def check(self, response: httpx2.Response, job_id: str, after: int = -1) -> None:
        """Raise the error that an answer means, unless it is a success."""
        if not response.is_success:
            try:
                refusal = msgspec.json.decode(await self._content(response), type=_Refusal)
            except INVALID as error:
                problem = f"invalid answer with status {response.status_code}: is this the URL of a dfm_async service?"
                raise ServiceError(self.url, problem, response.status_code) from error
            raise self._error(refusal, response.status_code, job_id, after)

    def _error(self, refusal: _Refusal, status: int, job_id: str, after: int) -> DfmError:
        match refusal.error, status:
            case "job", _:
                return JobNotFound(job_id, f"the service {self.url}")
            case "exists", _:
                return JobExists(job_id)
            case "expired", _:
                if refusal.first is None:
                    return self.invalid(ValueError("no offset of the first event"))
                return ResultsExpired(job_id, after + 1, refusal.first)
            case "events", 429:
                return EventsFull(refusal.problems)
            case "parameters", _:
                return ParameterError(refusal.problems)
            case "pipeline", 422:
                return PipelineError(None, [Problem("", problem) for problem in refusal.problems])
        problem = "; ".join([refusal.message, *refusal.problems])
        return ServiceError(self.url, problem, status, refusal.error)

    async def _content(self, response: httpx2.Response, largest: int | None = None) -> bytes:
        """Read an answer up to the limit of its size."""
        largest = self.largest if largest is None else largest
        found = bytearray()
        async for chunk in response.aiter_bytes():
            found += chunk
            if len(found) > largest:
                raise httpx2.RemoteProtocolError(f"the service sends more than {largest:,} bytes at once")
        return bytes(found)

    def decoded(self, data: bytes | str) -> Any:
        """Decode JSON that the service sent."""
        try:
            return msgspec.json.decode(data)
        except INVALID as error:
            raise self.invalid(error) from error

    def unreachable(self, error: httpx2.TransportError) -> ServiceError:
        """Return the error for a request that got no answer."""
        return ServiceError(self.url, f"cannot be reached: {str(error) or type(error).__name__}")

    def invalid(self, error: Exception) -> ServiceError:
        """Return the error for an answer that cannot be decoded."""
        return ServiceError(self.url, f"invalid answer: {error}. The service may have another version", 200)
