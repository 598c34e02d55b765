"""The client and a hostile service: every invalid answer is a ServiceError, and nothing is unbounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from dfm_async import JobStatus
from dfm_async.client import Client
from dfm_async.errors import ServiceError

INFO: dict[str, Any] = {
    "job_id": "j",
    "status": "running",
    "reason": None,
    "pipeline": "p",
    "places": [],
    "principal": None,
    "created": 0.0,
    "finished": None,
    "first": 0,
    "events": 1000,
    "errors": 0,
    "sets": None,
    "done": None,
    "accepts": False,
}


class Endless(httpx2.AsyncByteStream):
    """A body without an end."""

    def __init__(self, chunk: bytes) -> None:
        self.chunk = chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield self.chunk


def client_of(answers: dict[str, Any]) -> Client:
    """Return the client of a service that answers each path always in the same way."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        found = answers[request.url.path]
        return found() if callable(found) else httpx2.Response(200, json=found)

    made = Client("http://service", transport=httpx2.MockTransport(answer))
    made._connection.largest = 1_000_000
    return made


async def read(found: Client, *, follow: bool = False) -> list[Any]:
    async with asyncio.timeout(20):
        return [event async for event in found.events("j", follow=follow)]


async def test_list_of_jobs_that_never_ends_is_cut_at_the_limit() -> None:
    found = client_of({"/jobs": {"jobs": [INFO] * 3, "next": "again"}})
    assert len(await found.jobs(100, JobStatus.RUNNING)) == 100
    assert await client_of({"/jobs": {"jobs": [], "next": "again"}}).jobs(100) == []


@pytest.mark.parametrize("page", [[], {}, {"jobs": None, "next": 1}, {"jobs": [3], "next": None}, {"jobs": [INFO]}])
async def test_invalid_list_of_jobs_is_an_error(page: Any) -> None:
    with pytest.raises(ServiceError, match="invalid answer"):
        await client_of({"/jobs": page}).jobs(5)


@pytest.mark.parametrize("following", [-1, -5, None, "x"])
async def test_pages_of_events_that_go_on_at_the_same_offset_end(following: Any) -> None:
    event = {"event": "status", "offset": 0, "status": "running", "reason": None}
    answers = {"/jobs/j": INFO, "/jobs/j/events": {"events": [event], "next": following}}
    with pytest.raises(ServiceError, match="invalid answer"):
        await read(client_of(answers))


@pytest.mark.parametrize(
    "chunk", [b"x" * 10_000, b"data: " + b"x" * 10_000 + b"\n", b"data: " + b"x" * 10_000 + b"\r\n"]
)
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_answer_without_an_end_is_refused(kind: str, chunk: bytes) -> None:
    def endless() -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": kind}, stream=Endless(chunk))

    found = client_of({"/jobs/j": endless, "/jobs/j/stream": endless})
    with pytest.raises(ServiceError, match="more than 1,000,000 bytes"):
        await read(found, follow=kind == "text/event-stream")


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 100, bytes(100)])
@pytest.mark.parametrize("kind", ["application/vnd.apache.arrow.stream", "application/json"])
async def test_table_that_is_none_is_an_error(kind: str, data: bytes) -> None:
    def table() -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": kind}, content=data)

    with pytest.raises(ServiceError, match="invalid answer" if kind == "application/json" else "cannot be read"):
        await client_of({"/jobs/j/results/1": table}).table("j", 1)


EVENTS: list[Any] = [{}, {"event": 3}, 3, None, {"event": "failure"}, {"event": "failure", "error": 3, "frame": []}]
EVENTS += [{"event": "failure", "error": {"operation": 1}, "frame": 3}, {"event": "result", "value": 3}]


@pytest.mark.parametrize("event", EVENTS)
async def test_invalid_event_is_an_error(event: Any) -> None:
    answers = {"/jobs/j": INFO, "/jobs/j/events": {"events": [event], "next": 3}}
    with pytest.raises(ServiceError, match="invalid answer"):
        await read(client_of(answers))


@pytest.mark.parametrize("answer", [{"outcomes": 3}, {"outcomes": {"a": 3}}, {"outcomes": ["ab"]}, {}, [], 3])
async def test_outcomes_of_a_cancellation_that_are_none_are_an_error(answer: Any) -> None:
    with pytest.raises(ServiceError, match="invalid answer"):
        await client_of({"/jobs/j/cancel": answer}).cancel("j", "because")


DEEP = b"[" * 100_000


async def test_deep_json_is_an_error() -> None:
    def page() -> httpx2.Response:
        return httpx2.Response(200, content=DEEP)

    def stream() -> httpx2.Response:
        data = b"event: result\ndata: " + DEEP + b"\n\n"
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)

    found = client_of({"/jobs": page, "/jobs/j": page, "/jobs/j/stream": stream})
    for asked in (found.jobs(5), found.info("j"), read(found, follow=True)):
        with pytest.raises(ServiceError, match="invalid answer"):
            await asked


@pytest.mark.parametrize("first", ["q", None, [], 1.5])
async def test_refusal_with_an_invalid_offset_is_an_error(first: Any) -> None:
    def expired() -> httpx2.Response:
        return httpx2.Response(410, json={"error": "expired", "message": "x", "first": first})

    with pytest.raises(ServiceError, match="invalid answer"):
        await client_of({"/jobs/j": expired}).info("j")


async def test_service_cannot_ask_for_a_pause_of_years(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("dfm_async.client.client.asyncio.sleep", pause)

    def stream() -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=b"retry: 99999999999999\n\n")

    with pytest.raises(ServiceError, match="broke"):
        await read(client_of({"/jobs/j/stream": stream}), follow=True)
    assert pauses
    assert max(pauses) <= 60


async def test_compressed_answer_is_refused() -> None:
    def packed() -> httpx2.Response:
        return httpx2.Response(200, headers={"content-encoding": "gzip"}, stream=Endless(b"x"))

    with pytest.raises(ServiceError, match="compressed"):
        await client_of({"/jobs/j": packed}).info("j")
