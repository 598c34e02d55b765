"""Requests to a web service: bounded answers, and refusals as errors of the library."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import msgspec

from dfm_async.errors import (
    DfmError,
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
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
INVALID: Final = (KeyError, TypeError, AttributeError, ValueError, RecursionError)
"""What decoding an untrusted answer can raise."""


class _Refusal(msgspec.Struct, frozen=True):
    """The JSON of an answer that refuses a request."""

    error: str
    message: str
    problems: list[str] = []
    first: int | None = None


class _Bounded(httpx.AsyncByteStream):
    """The body of an answer, with a limit on its size; in a stream of events, on the size of each event."""

    def __init__(self, inner: httpx.AsyncByteStream, *, events: bool) -> None:
        self._inner = inner
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, last = 0, b""
        async for chunk in self._inner:
            size += len(chunk)
            if self._events:  # a blank line ends an event, and may be split over two chunks
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
        raise httpx.RemoteProtocolError("the service sent a compressed answer without being asked for one")
    assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - of an asynchronous client
    events = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _Bounded(response.stream, events=events)


class Connection:
    """Send requests to one service. An invalid URL is a ``ValueError``."""

    def __init__(self, url: str, token: str | None, transport: httpx.AsyncBaseTransport | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"invalid service URL {url!r}: it must begin with http:// or https://")
        headers = {"accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        try:
            self.http = httpx.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(30, read=60),
                event_hooks={"response": [_bound]},
                transport=transport,
            )
        except (httpx.InvalidURL, TypeError) as error:
            raise ValueError(f"invalid service URL {url!r}: {error}") from error
        self.url = url

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
        try:
            response = await self.http.request(method, path, content=content, headers=headers, params=query)
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        await self.check(response, job_id, after)
        return self.decoded(response.content) if response.content else None

    async def check(self, response: httpx.Response, job_id: str, after: int = -1) -> None:
        """Raise the error that an answer means, unless it is a success."""
        if not response.is_success:
            try:
                refusal = msgspec.json.decode(await response.aread(), type=_Refusal)
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
            case "parameters", _:
                return ParameterError(refusal.problems)
            case "pipeline", 422:
                return PipelineError(None, [Problem("", problem) for problem in refusal.problems])
        problem = "; ".join([refusal.message, *refusal.problems])
        return ServiceError(self.url, problem, status, refusal.error)

    def decoded(self, data: bytes | str) -> Any:
        """Decode JSON that the service sent."""
        try:
            return msgspec.json.decode(data)
        except INVALID as error:
            raise self.invalid(error) from error

    def unreachable(self, error: httpx.TransportError) -> ServiceError:
        """Return the error for a request that got no answer."""
        return ServiceError(self.url, f"cannot be reached: {str(error) or type(error).__name__}")

    def invalid(self, error: Exception) -> ServiceError:
        """Return the error for an answer that cannot be decoded."""
        return ServiceError(self.url, f"invalid answer: {error}. The service may have another version", 200)
