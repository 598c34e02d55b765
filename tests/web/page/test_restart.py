"""A service that is killed and started again, and browsers that were connected to it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Browser, expect

from tests.support.processes import free_socket

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-for-the-restart"
COUNT = 6
SERVICE = """
import asyncio, sys
from pathlib import Path
import uvicorn
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.web import Service, WebLimits

port, folder = int(sys.argv[1]), Path(sys.argv[2])
fed = Federation("numbers")
lab = fed.site("lab")

@lab.operation
async def count(n: int):
    for number in range(n):
        while number == n // 2 and not (folder / "gate").exists():
            await asyncio.sleep(0.02)
        yield number

@lab.operation
async def late(n: int) -> int:
    while not (folder / "gate").exists():
        await asyncio.sleep(0.02)
    return n

with Pipeline("counting") as counting:
    Yield(count(PlaceParam("n")), place="numbers")
    Yield(late(1), place="late")

def session():
    return Session(fed, target="inline", store=f"sqlite:///{folder}/jobs.db")

service = Service(session=session, pipelines={"counting": counting}, limits=WebLimits(retry=0.1, heartbeat=0.2))
uvicorn.run(service.app, port=port, log_level="warning")
"""
LISTENER = """
    window.seen = [];
    const stream = new EventSource("jobs/kept/stream");
    stream.addEventListener("result", event => seen.push(JSON.parse(event.data).value));
    stream.addEventListener("end", () => { stream.close(); seen.push("end"); });
"""
"""What the guide tells pages to do."""


@asynccontextmanager
async def running(port: int, folder: Path) -> AsyncIterator[None]:
    """Runs the service in a process, and kills it."""
    environment = {**os.environ, "DFM_TOKEN": TOKEN}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, str(port), str(folder), env=environment
    )
    try:
        async with asyncio.timeout(60), httpx2.AsyncClient() as client:
            ready = False
            while not ready:
                await asyncio.sleep(0.05)
                try:
                    ready = (await client.get(f"http://127.0.0.1:{port}/ready")).is_success
                except httpx2.TransportError:
                    assert process.returncode is None
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def test_a_browser_goes_on_when_the_job_is_resumed_after_a_restart(browser: Browser, tmp_path: Path) -> None:
    with free_socket() as found:
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    known = {"authorization": f"Bearer {TOKEN}"}
    context = await browser.new_context()
    context.set_default_timeout(30_000)
    page, bare = await context.new_page(), await context.new_page()
    badge, rows = page.locator("h1 .badge"), page.locator("[aria-labelledby=card-results] tbody tr")
    graph, progress = page.locator("[aria-labelledby=card-graph] .cap"), page.locator("[aria-labelledby=card-progress]")
    async with running(port, tmp_path), httpx2.AsyncClient(base_url=url, headers=known) as client:
        body = {"params": {"n": COUNT}, "job_id": "kept"}
        (await client.post("/pipelines/counting/jobs", json=body)).raise_for_status()
        await page.goto(f"{url}/?token={TOKEN}&job=kept")
        assert page.url == f"{url}/?job=kept"
        await bare.goto(f"{url}/health")  # any page of the service
        await bare.evaluate(LISTENER)
        await expect(rows).to_have_count(COUNT // 2)
        await expect(graph).to_contain_text("2 active")
        await bare.wait_for_function(f"seen.length === {COUNT // 2}")
    async with running(port, tmp_path), httpx2.AsyncClient(base_url=url, headers=known) as client:
        await expect(badge).to_have_text("‖interrupted")
        await expect(page.locator(".facts")).not_to_contain_text("Took")  # when it was killed is not known
        await expect(graph).not_to_contain_text("active")
        await expect(progress.locator("tbody tr td:nth-child(3)")).to_have_text(["0", "0"])
        await expect(page.locator("#link")).to_have_attribute("data-state", "live")
        await page.get_by_role("button", name="Resume").click()
        await expect(badge).to_have_text("●running")
        await expect(graph).to_contain_text("2 active")
        (tmp_path / "gate").touch()
        await expect(badge).to_have_text("✓finished")
        await expect(graph).not_to_contain_text("active")
        await expect(rows).to_have_count(COUNT + 1)
        await bare.wait_for_function("seen.includes('end')")
        seen = await bare.evaluate("seen")
        assert sorted(seen[:-1]) == sorted([*range(COUNT), 1])
        assert seen[-1] == "end"
    await context.close()
