"""Services in several processes that share a PostgreSQL database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dfm_async.store.postgres import PostgresStore
from tests.support.postgres import PostgresServer
from tests.support.processes import ROOT, read_until, started_server
from tests.support.waiting import PROMPT
from tests.web.rig import Events, Server, all_events, gates, inline, new_service, serving

LEASE = 2.0
COUNT = 20
REPLICA = """
import asyncio, sys
from dfm_async.store.postgres import PostgresStore
from tests.web.rig import PIPELINES, gates, inline

async def main(url, lease, count):
    gates["replicas"] = asyncio.Event()
    async with inline(store=PostgresStore(url, lease=float(lease))) as session:
        job = await session.execute(PIPELINES["gated"], {"n": int(count), "gate": "replicas"}, job_id="shared")
        results = aiter(job)
        for _ in range(int(count) // 2):
            await anext(results)
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    gates["replicas"] = asyncio.Event()
    return postgres.url(postgres.new_database())


@asynccontextmanager
async def replica(url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process whose job has yielded half of its results, and waits."""
    command = [sys.executable, "-c", REPLICA, url, str(LEASE), str(COUNT)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    yield process
    if process.returncode is None:
        process.kill()
    await process.communicate()


@asynccontextmanager
async def service(url: str) -> AsyncIterator[Server]:
    async with serving(
        new_service(session=lambda: inline(store=PostgresStore(url, lease=LEASE)), resume=True)
    ) as server:
        yield server


async def test_a_job_can_be_read_and_cancelled_at_every_service(url: str) -> None:
    async with replica(url), service(url) as server:
        found = (await server.client.get("/jobs/shared/events?limit=1000")).json()["events"]
        assert [event["value"] for event in found if event["event"] == "result"] == [*range(COUNT // 2)]
        cancelled = (await server.client.post("/jobs/shared/cancel", json={"reason": "enough"})).json()
        assert (cancelled["status"], cancelled["reason"]) == ("aborted", "enough")
        assert cancelled["outcomes"]["lab"] == "stopped"


async def test_a_job_takes_inputs_at_every_service(url: str) -> None:
    async with service(url) as first, service(url) as second:
        job_id = await first.submit("squares", None, open=True)
        for server, last in (second, False), (first, False), (second, True):
            body = {"params": [{"x": 2}, {"x": 3}], "last": last}
            sent = await server.client.post(f"/jobs/{job_id}/inputs", json=body)
            assert sent.status_code == 202, sent.text
        assert sorted(await second.results(job_id)) == [4, 4, 4, 9, 9, 9]
        late = await second.client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 2}})
        assert (late.status_code, late.json()["error"]) == (409, "closed")
        assert (await second.client.delete(f"/jobs/{job_id}")).status_code == 204
        assert (await first.client.get("/jobs/other")).status_code == 404


async def until(found: Events, **wanted: Any) -> dict[str, Any]:
    """Return the first state of a job that fits; the events after it can still be read."""
    async with asyncio.timeout(PROMPT):
        while True:
            event = await anext(found)
            if event.name == "job" and wanted.items() <= event.data.items():
                return event.data


async def test_the_stream_of_all_jobs_has_those_of_other_processes(url: str) -> None:
    async with service(url) as server, server.follow("/stream?active=true") as before, replica(url) as process:
        found = await until(before, job_id="shared", status="running")
        assert (found["sets"], found["done"]) == (1, 0)
        async with service(url) as later, later.follow("/stream?active=true") as after:
            assert (await until(after, job_id="shared", status="running"))["events"] == found["events"]
            process.kill()
            gates["replicas"].set()
            for stream in (before, after):
                assert (await until(stream, job_id="shared", status="finished"))["done"] == 1


async def test_the_stream_of_all_jobs_has_the_progress_of_other_processes(url: str) -> None:
    async with service(url) as first, service(url) as second, second.follow("/stream?active=true") as stream:
        job_id = await first.submit("squares", None, open=True)
        await until(stream, job_id=job_id, accepts=True)
        for count in (1, 2):
            await first.client.post(f"/jobs/{job_id}/inputs", json={"params": {"x": 2}})
            await until(stream, job_id=job_id, sets=count, done=count)
        short = await first.submit("squares", [{"x": 3}] * 7)
        assert (await until(stream, job_id=short, status="finished"))["done"] == 7


async def test_jobs_of_a_process_that_is_killed_go_on_in_another_service(url: str) -> None:
    async with service(url) as server, replica(url) as process:
        reading = asyncio.create_task(all_events(server.client, "/jobs/shared/stream"))
        process.kill()
        gates["replicas"].set()
        found = await asyncio.wait_for(reading, 60)
    assert [event.data["value"] for event in found if event.name == "result"] == [*range(COUNT)]
    assert found[-1].name == "end"
    assert found[-1].data["status"] == "finished"


SERVED = """
import os
from tests.web.rig import inline, new_service

app = new_service(session=lambda: inline(store=os.environ["STORE"]), resume=True).app
"""
GUNICORN = ("gunicorn", "served:app", "-w", "2", "-k", "uvicorn.workers.UvicornWorker", "-b", "127.0.0.1:0")
UVICORN = ("uvicorn", "served:app", "--workers", "2", "--port", "0")


@contextmanager
def replicas(*server: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server that starts several processes; give its main process, and the address."""
    with started_server("-m", *server, start_new_session=True, **options) as (process, address):
        read_until(process.stderr, "startup complete")
        try:
            yield process, address
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_processes_of_gunicorn_and_uvicorn_are_replicas(url: str, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    environment = {**os.environ, "HOME": str(tmp_path), "STORE": url, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    options = {"cwd": tmp_path, "env": environment}
    with replicas(*GUNICORN, **options) as (process, address), httpx2.Client(base_url=address) as client:
        body = {"params": [{"x": 2}], "open": True, "job_id": "open"}
        assert httpx2.post(f"{address}/pipelines/squares/jobs", json=body).status_code == 201
        for x in range(3, 6):  # each on a connection of its own, which any of the processes may get
            sent = httpx2.post(f"{address}/jobs/open/inputs", json={"params": {"x": x}})
            assert sent.status_code == 202, sent.text
        with client.stream("GET", "/jobs/open/stream", timeout=30) as response:
            lines = response.iter_lines()
            for _ in range(4):
                assert any(line == "event: result" for line in lines)
            process.send_signal(signal.SIGTERM)
            assert "event: drain" in list(lines)
    with replicas(*UVICORN, **options) as (_, address):
        body = {"params": {"x": 6}, "last": True}
        while (sent := httpx2.post(f"{address}/jobs/open/inputs", json=body)).status_code == 503:
            httpx2.get(f"{address}/jobs/open/events?after=4&wait=1", timeout=30)  # until it is resumed
        assert sent.status_code == 202, sent.text
        found = httpx2.get(f"{address}/jobs/open/stream", timeout=30).text
    assert found.count("event: result") == 5
