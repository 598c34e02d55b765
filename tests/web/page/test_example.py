"""The example service as a newcomer meets it: one command, curl, a browser, and a worker that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, expect

from tests.web.page.browser import launched
from tests.web.page.example import TOKEN, example

LINES = {"mon": "mon: -2.5 to +4.5", "tue": "tue: -5.5 to +6.5", "wed": "wed: -4.0 to +3.5"}
DELTAS = {"mon": [-1.0, 4.5, 1.0, -2.5], "tue": [-5.5, -3.0, 6.5], "wed": [0.5, 2.0, -2.0, 3.5, -4.0]}
EXPECTED = {
    *((("line", str(i)), LINES[day]) for i, day in enumerate(DELTAS)),
    *((("delta", f"{i}.{j}"), value) for i, day in enumerate(DELTAS) for j, value in enumerate(DELTAS[day])),
}


async def curl(*arguments: str) -> Any:
    """What one types into another terminal."""
    command = ("curl", "-sS", "-H", f"authorization: Bearer {TOKEN}", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(said)


@asynccontextmanager
async def opened(browser: Browser, store: Path, query: str) -> AsyncIterator[tuple[str, Page]]:
    """Start the service, and open its page; give the address, and the page."""
    with example(store) as service:
        context = await browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(30_000)
        page = await context.new_page()
        await page.goto(f"{service}/dfm/?token={TOKEN}{query}")
        try:
            yield service, page
        finally:
            await context.close()


async def shown(page: Page) -> set[tuple[tuple[str, str], Any]]:
    """The results that the page shows: by place and frame."""
    rows = page.get_by_role("region", name="Results", exact=True).locator("tbody tr")
    await expect(rows).to_have_count(len(EXPECTED), timeout=30_000)
    cells = [await row.locator("td").all_text_contents() for row in await rows.all()]
    return {((place, frame), json.loads(value)) for _, place, frame, _, value, *_ in cells}


async def test_example_survives_a_killed_worker_and_a_reload(tmp_path: Path) -> None:
    store = tmp_path / "jobs.db"
    badge = "h1 .badge"
    async with launched() as browser:
        async with opened(browser, store, "") as (service, page):
            body = {"params": [{"day": day} for day in DELTAS], "job_id": "all-days"}
            job = ["-H", "content-type: application/json", "-d", json.dumps(body)]
            await curl(f"{service}/dfm/pipelines/report/jobs", *job)
            worker = page.get_by_role("row", name="lab").locator(".mono")
            await expect(worker).to_have_text(re.compile(r"process \d+"))
            pid = int((await worker.text_content() or "").split()[-1])
            await page.locator('nav .row[data-job="all-days"]').click()
            await page.wait_for_selector('.node[data-node^="anomaly"].active')
            os.kill(pid, signal.SIGKILL)
            await expect(page.get_by_text("worker lost")).to_be_visible(timeout=30_000)
            await page.reload()
            await expect(page.locator(badge)).to_contain_text("finished", timeout=60_000)
            assert await shown(page) == EXPECTED
            events = (await curl(f"{service}/dfm/jobs/all-days/events?limit=500"))["events"]
            assert [event["kind"] for event in events if event["event"] == "worker"] == ["lost"]
            assert [event["offset"] for event in events] == list(range(len(events)))
        async with opened(browser, store, "&job=all-days") as (service, page):
            own = asyncio.ensure_future(curl(f"{service}/lines"))  # a handler of one's own uses the same session
            await expect(page.locator(badge)).to_contain_text("finished")
            assert await shown(page) == EXPECTED
            assert await own == list(LINES.values())
