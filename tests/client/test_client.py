"""The client and a real service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import httpx2
import pandas as pd
import pytest

from dfm_async import (
    Federation,
    JobInfo,
    JobNotFound,
    JobStatus,
    OperationFailed,
    ParameterError,
    Pipeline,
    PipelineError,
    PlaceParam,
    Session,
    Yield,
)
from dfm_async.client import Client
from dfm_async.errors import JobExists, ServiceError
from dfm_async.events import Failure, Metrics, Progress, Result, StatusChanged
from dfm_async.web import TokenAuthorizer
from tests.support.pipelines import pipeline_of
from tests.web.rig import PIPELINES, Server, fed, gates, new_service, serving
from tests.web.test_single_results import VALUES, tables

TOKEN = "a-token-of-the-tests"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Return a service that anyone may use."""
    async with serving(new_service(allow_pipelines=True)) as found:
        yield found


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """Return a client of that service."""
    async with Client(str(server.client.base_url)) as found:
        yield found


async def test_results_of_a_submitted_job_arrive(client: Client) -> None:
    submitted = await client.submit("squares", [{"x": 3}, {"x": 4}], job_id="order-17")
    assert (submitted.job_id, submitted.pipeline) == ("order-17", "squares")
    results = [result async for result in client.results("order-17")]
    assert sorted(result.value for result in results) == [9, 16]
    rest = [result async for result in client.results("order-17", after=results[0].offset)]
    assert [result.value for result in rest] == [results[1].value]
    assert [result async for result in client.results("order-17", places=["elsewhere"])] == []
    info = await client.info("order-17")
    assert (info.status, info.done) == (JobStatus.FINISHED, 2)


async def test_the_state_of_a_service_and_its_changes_can_be_read(client: Client, server: Server) -> None:
    await client.submit("squares", stay_open=True, job_id="open")
    states: dict[str, tuple[JobStatus, str | None]] = {}
    async with aclosing(client.changes()) as changes:
        async for change in changes:
            if isinstance(change, JobInfo):
                states[change.job_id] = change.status, change.waits_for
            if states.get("open") == (JobStatus.RUNNING, "further parameter sets"):
                states["open"] = JobStatus.SUBMITTED, None
                assert (await client.stats()).running == 1
                await client.send_stop_frame("open")
            if states.get("open") == (JobStatus.FINISHED, None):
                break
    assert (await client.stats()).ended["finished"] == 1


async def test_table_of_a_result_is_an_arrow_table() -> None:
    async with tables() as server, Client(str(server.client.base_url)) as client:
        for name in ("pandas", "periods", "number"):
            await client.submit("load", {"name": name}, job_id=name)
            assert [result.offset async for result in client.results(name)] == [1]
        table = await client.table("pandas", 1)
        pd.testing.assert_frame_equal(table.to_pandas(), VALUES["pandas"], check_freq=False)
        for job_id, offset, code, message in (
            ("number", 1, "table", "the value of type int is not a table"),
            ("pandas", 0, "result", "event 0 of the job is not a result"),
            ("periods", 1, "", "cannot be read as a table: extension types of Arrow are not accepted"),
        ):
            with pytest.raises(ServiceError, match=message) as caught:
                await client.table(job_id, offset)
            assert caught.value.code == code
        with pytest.raises(ServiceError, match="more than 100 bytes"):
            await client.table("pandas", 1, max_bytes=100)
        with pytest.raises(JobNotFound):
            await client.table("unknown", 1)


async def test_events_have_the_types_of_a_local_job(client: Client) -> None:
    await client.submit("telling", {"x": 1}, job_id="telling")
    followed = [event async for event in client.events("telling")]
    assert {type(event) for event in followed} >= {StatusChanged, Progress, Metrics, Result}
    assert [event.offset for event in followed] == list(range(len(followed)))
    assert [event async for event in client.events("telling", follow=False)] == followed
    assert [event async for event in client.events("telling", follow=False, after=len(followed) - 1)] == []


async def test_a_failure_has_the_error_of_the_operation(client: Client) -> None:
    await client.submit("failing", {"x": 1}, job_id="failing")
    failures = [event async for event in client.events("failing") if isinstance(event, Failure)]
    assert isinstance(failures[0].error, OperationFailed)
    assert failures[0].error.message == "no 1"


async def test_stored_events_end_with_the_newest_one(client: Client) -> None:
    gates["open"] = asyncio.Event()
    await client.submit("gated", {"n": 4, "gate": "open"}, job_id="gated")
    async for event in client.events("gated"):
        if isinstance(event, Result) and event.value == 1:
            break
    newest = [event async for event in client.events("gated", follow=False)]
    assert [event.value for event in newest if isinstance(event, Result)] == [0, 1]
    gates["open"].set()
    assert [result.value async for result in client.results("gated", after=newest[-1].offset)] == [2, 3]


async def test_an_open_job_takes_further_parameter_sets(client: Client) -> None:
    await client.submit("squares", stay_open=True, job_id="open")
    await client.send_input_params("open", [{"x": 2}, {"x": 3}])
    await client.send_stop_frame("open")
    assert sorted([result.value async for result in client.results("open")]) == [4, 9]


async def test_a_cancelled_job_is_aborted_and_can_be_forgotten(client: Client) -> None:
    await client.submit("endless", job_id="endless")
    assert await client.cancel("endless", "enough") == {"lab": "stopped"}
    info = await client.info("endless")
    assert (info.status, info.reason) == (JobStatus.ABORTED, "enough")
    await client.forget("endless")
    with pytest.raises(JobNotFound, match="'endless' is known to the service http"):
        await client.info("endless")


async def test_jobs_are_listed_newest_first(client: Client) -> None:
    for name in ("a", "b", "c"):
        await client.submit("squares", {"x": 1}, job_id=name)
        assert [result.value async for result in client.results(name)] == [1]
    assert [info.job_id for info in await client.jobs()] == ["c", "b", "a"]
    assert [info.job_id for info in await client.jobs(limit=2)] == ["c", "b"]
    assert await client.jobs(status=JobStatus.FAILED) == []


async def test_pipelines_have_the_schemas_of_their_parameters(client: Client) -> None:
    found = {pipeline.name: pipeline for pipeline in await client.pipelines()}
    assert found.keys() == PIPELINES.keys()
    assert found["squares"].params["properties"]["x"]["type"] == "integer"


async def test_a_pipeline_of_the_client_runs(client: Client) -> None:
    info = await client.submit(PIPELINES["squares"], {"x": 5})
    assert [result.value async for result in client.results(info.job_id)] == [25]


def _crater() -> int:
    return 1


async def test_refusals_are_the_errors_of_a_session(client: Client) -> None:
    with pytest.raises(ParameterError) as wrong:
        await client.submit("squares", {"x": "three", "y": 1})
    assert len(wrong.value.problems) == 2
    await client.submit("squares", {"x": 1}, job_id="taken")
    with pytest.raises(JobExists) as taken:
        await client.submit("squares", {"x": 2}, job_id="taken")
    assert taken.value.job_id == "taken"
    elsewhere = Federation("elsewhere").site("moon").operation(_crater)
    with pytest.raises(PipelineError, match="_crater"):
        await client.submit(pipeline_of(elsewhere))
    with pytest.raises(ServiceError) as unknown:
        await client.submit("no-such-pipeline")
    assert (unknown.value.status, unknown.value.code) == (404, "pipeline")
    with pytest.raises(ServiceError) as ended:
        await client.resume("taken")
    assert (ended.value.status, ended.value.code) == (409, "not interrupted")


async def test_failed_sets_run_again_as_a_new_job(client: Client) -> None:
    failed = await client.submit("failing", [{"x": 1}, {"x": 2}])
    assert [event async for event in client.results(failed.job_id)] == []
    again = await client.retry_failed(failed.job_id)
    assert (again.retry_of, again.sets, again.pipeline) == (failed.job_id, 2, "failing")
    assert again.job_id != failed.job_id


async def test_a_job_of_a_store_can_be_forked(tmp_path: Path) -> None:
    service = new_service(session=lambda: Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db"))
    async with serving(service) as server, Client(str(server.client.base_url)) as client:
        job = await client.submit("squares", [{"x": 2}, {"x": 3}])
        assert sorted([event.value async for event in client.results(job.job_id)]) == [4, 9]
        fork = await client.fork(job.job_id, "square", frame=1)
        assert (fork.fork_of, fork.sets) == (job.job_id, 1)
        assert [event.value async for event in client.results(fork.job_id)] == [9]
        with pytest.raises(ParameterError, match="the pipeline has no call 'cube'; its calls are: square#0"):
            await client.fork(job.job_id, "cube")


class Broken(httpx2.AsyncByteStream):
    """The body of an answer whose connection breaks in the middle."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._left = 50_000

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk
            self._left -= len(chunk)
            if self._left < 0:
                raise httpx2.RemoteProtocolError("peer closed connection")

    async def aclose(self) -> None:
        await self._body.aclose()


class Unreliable(httpx2.AsyncHTTPTransport):
    """Connections of which the first one with a stream breaks."""

    streams = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await super().handle_async_request(request)
        if request.url.path.endswith("/stream"):
            self.streams += 1
            answer.stream = Broken(answer.stream) if self.streams == 1 else answer.stream
        return answer


async def test_a_broken_connection_continues_after_the_last_event(server: Server) -> None:
    transport = Unreliable()
    async with Client(str(server.client.base_url), transport=transport) as client:
        await client.submit("texts", {"n": 300, "size": 1000}, job_id="broken")
        results = [result async for result in client.results("broken")]
    assert [int(result.value.split()[0]) for result in results] == list(range(300)), "every result comes once"
    assert transport.streams == 2


async def test_a_token_is_sent() -> None:
    async with serving(new_service(authorizer=TokenAuthorizer(TOKEN))) as server:
        url = str(server.client.base_url)
        async with Client(url, token=TOKEN) as known:
            assert await known.jobs() == []
        async with Client(url) as unknown:
            with pytest.raises(ServiceError) as refused:
                await unknown.jobs()
    assert refused.value.status == 401


async def test_a_service_that_does_not_run_is_an_error() -> None:
    async with Client("http://127.0.0.1:9") as client:
        for request in (client.jobs(), anext(client.results("j"))):
            with pytest.raises(ServiceError) as refused:
                await request
            assert (refused.value.url, refused.value.status) == ("http://127.0.0.1:9", None)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://example.org", "http://a:b"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="invalid service URL"):
        Client(url)


async def test_all_calls_of_a_job_can_be_recorded(tmp_path: Path) -> None:
    called: list[int] = []
    counting = Federation("counting")
    lab = counting.site("lab")

    @lab.operation
    async def noted(x: int) -> int:
        called.append(x)
        return x

    with Pipeline("twice") as twice:
        Yield(noted(noted(PlaceParam("x"))))

    session = Session(counting, target="inline", store=f"sqlite:///{tmp_path}/jobs.db")
    service = new_service(session=session, pipelines={"twice": twice})
    async with serving(service) as server, Client(str(server.client.base_url)) as client:
        expected: list[tuple[Literal["marked", "calls"], int]] = [("marked", 4), ("calls", 3)]
        for checkpoint, calls in expected:
            called.clear()
            job = await client.submit("twice", {"x": 1}, checkpoint=checkpoint)
            assert [result.value async for result in client.results(job.job_id)] == [1]
            fork = await client.fork(job.job_id, "noted#1")
            assert [result.value async for result in client.results(fork.job_id)] == [1]
            assert len(called) == calls


async def test_recording_all_calls_needs_a_store(client: Client) -> None:
    with pytest.raises(ServiceError, match="checkpoint: 'calls' needs a service with a store") as caught:
        await client.submit("squares", {"x": 1}, checkpoint="calls")
    assert (caught.value.status, caught.value.code) == (422, "body")


async def test_job_can_start_later(client: Client) -> None:
    later = await client.submit("squares", {"x": 3}, start_at=datetime(2100, 1, 1, tzinfo=UTC))
    assert (later.start_at, later.waits_for) == (4102444800.0, "its start at 2100-01-01T00:00:00Z")
    assert (await client.cancel(later.job_id)) == {}
    at_once = await client.submit("squares", {"x": 3}, start_at=1)
    assert [result.value async for result in client.results(at_once.job_id)] == [9]
    with pytest.raises(ValueError, match="must have a time zone"):
        await client.submit("squares", {"x": 3}, start_at=datetime(2100, 1, 1))
