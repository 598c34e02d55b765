"""The client and a hostile service: every invalid answer is a ServiceError, and nothing is unbounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from dfm_async import JobStatus
from dfm_async.client import Client, client, connection
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


class Endless(httpx.AsyncByteStream):
    """A body without an end."""

    def __init__(self, chunk: bytes) -> None:
        self.chunk = chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield self.chunk


def client_of(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return the client of a service that answers each path always in the same way."""
    monkeypatch.setattr(connection, "_LARGEST", 1_000_000)

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers[request.url.path]
        return found() if callable(found) else httpx.Response(200, json=found)

    return Client("http://service", transport=httpx.MockTransport(answer))


async def read(found: Client, *, follow: bool = False) -> list[Any]:
    async with asyncio.timeout(20):
        return [event async for event in found.events("j", follow=follow)]


async def test_list_of_jobs_that_never_ends_is_cut_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = client_of({"/jobs": {"jobs": [INFO] * 3, "next": "again"}}, monkeypatch)
    assert len(await found.jobs(100, JobStatus.RUNNING)) == 100
    assert await client_of({"/jobs": {"jobs": [], "next": "again"}}, monkeypatch).jobs(100) == []


@pytest.mark.parametrize("page", [[], {}, {"jobs": None, "next": 1}, {"jobs": [3], "next": None}, {"jobs": [INFO]}])
async def test_invalid_list_of_jobs_is_an_error(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceError, match="invalid answer"):
        await client_of({"/jobs": page}, monkeypatch).jobs(5)


@pytest.mark.parametrize("following", [-1, -5, None, "x"])
async def test_pages_of_events_that_go_on_at_the_same_offset_end(
    following: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"event": "status", "offset": 0, "status": "running", "reason": None}
    answers = {"/jobs/j": INFO, "/jobs/j/events": {"events": [event], "next": following}}
    with pytest.raises(ServiceError, match="invalid answer"):
        await read(client_of(answers, monkeypatch))


@pytest.mark.parametrize(
    "chunk", [b"x" * 10_000, b"data: " + b"x" * 10_000 + b"\n", b"data: " + b"x" * 10_000 + b"\r\n"]
)
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_answer_without_an_end_is_refused(kind: str, chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ATTEMPTS", 0)

    def endless() -> httpx.Response:
        return httpx.Response(200, headers={"content-type": kind}, stream=Endless(chunk))

    found = client_of({"/jobs/j": endless, "/jobs/j/stream": endless}, monkeypatch)
    with pytest.raises(ServiceError, match="more than 1,000,000 bytes"):
        await read(found, follow=kind == "text/event-stream")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
async def test_many_events_may_be_longer_together(end: bytes, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LARGEST", 40)
    data = (b": a comment of 30 characters...." + end + end) * 10

    class Chunks(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for start in range(0, len(data), size):
                yield data[start : start + size]

    stream = connection._Bounded(Chunks(), events=True)
    assert b"".join([chunk async for chunk in stream]) == data


EVENTS: list[Any] = [{}, {"event": 3}, 3, None, {"event": "failure"}, {"event": "failure", "error": 3, "frame": []}]
EVENTS += [{"event": "failure", "error": {"operation": 1}, "frame": 3}, {"event": "result", "value": 3}]


@pytest.mark.parametrize("event", EVENTS)
async def test_invalid_event_is_an_error(event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"/jobs/j": INFO, "/jobs/j/events": {"events": [event], "next": 3}}
    with pytest.raises(ServiceError, match="invalid answer"):
        await read(client_of(answers, monkeypatch))


@pytest.mark.parametrize("answer", [{"outcomes": 3}, {"outcomes": {"a": 3}}, {"outcomes": ["ab"]}, {}, [], 3])
async def test_outcomes_of_a_cancellation_that_are_none_are_an_error(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServiceError, match="invalid answer"):
        await client_of({"/jobs/j/cancel": answer}, monkeypatch).cancel("j", "because")


DEEP = b"[" * 100_000


async def test_deep_json_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def page() -> httpx.Response:
        return httpx.Response(200, content=DEEP)

    def stream() -> httpx.Response:
        data = b"event: result\ndata: " + DEEP + b"\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data)

    found = client_of({"/jobs": page, "/jobs/j": page, "/jobs/j/stream": stream}, monkeypatch)
    for asked in (found.jobs(5), found.info("j"), read(found, follow=True)):
        with pytest.raises(ServiceError, match="invalid answer"):
            await asked


@pytest.mark.parametrize("first", ["q", None, [], 1.5])
async def test_refusal_with_an_invalid_offset_is_an_error(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def expired() -> httpx.Response:
        return httpx.Response(410, json={"error": "expired", "message": "x", "first": first})

    with pytest.raises(ServiceError, match="invalid answer"):
        await client_of({"/jobs/j": expired}, monkeypatch).info("j")


async def test_service_cannot_ask_for_a_pause_of_years(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("dfm_async.client.client.asyncio.sleep", pause)

    def stream() -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"retry: 99999999999999\n\n")

    with pytest.raises(ServiceError, match="broke"):
        await read(client_of({"/jobs/j/stream": stream}, monkeypatch), follow=True)
    assert pauses
    assert max(pauses) <= 60


async def test_compressed_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed() -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Endless(b"x"))

    with pytest.raises(ServiceError, match="compressed"):
        await client_of({"/jobs/j": packed}, monkeypatch).info("j")
