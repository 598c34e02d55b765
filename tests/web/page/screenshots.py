"""Takes the pictures of the live page for the documentation: ``nox -s screenshot``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path

import httpx2
from playwright.async_api import Page, ViewportSize

from tests.web.page.browser import launched
from tests.web.page.example import KNOWN, ROOT, TOKEN, example

SIZE = ViewportSize(width=1360, height=850)


async def main(home: Path) -> None:
    """Takes pictures of a job that runs."""
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        address = f"{stack.enter_context(example(Path(directory) / 'jobs.db'))}/dfm/"
        client = await stack.enter_async_context(httpx2.AsyncClient(base_url=address, headers=KNOWN))
        browser = await stack.enter_async_context(launched())

        async def submit(job_id: str, *days: str, accept: str = "application/json") -> None:
            body = {"params": [{"day": day} for day in days], "job_id": job_id}
            answer = await client.post("pipelines/report/jobs", json=body, headers={"accept": accept}, timeout=60)
            answer.raise_for_status()

        for job_id, day in (("monday", "mon"), ("typo", "mno"), ("tuesday", "tue")):
            await submit(job_id, day, accept="text/event-stream")  # the answer ends with the job
        await submit("today", "mon", "tue", "wed")
        pages = []
        for scheme in ("light", "dark"):
            context = await browser.new_context(viewport=SIZE, locale="en-GB")
            page = await context.new_page()
            await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            await page.goto(f"{address}?job=today&token={TOKEN}")
            pages.append(take(page, home / f"live-page-{scheme}.png"))
        await asyncio.gather(*pages)


async def take(page: Page, path: Path) -> None:
    """Waits for a moment with something to see."""
    await page.wait_for_selector('.node[data-node^="anomaly"].active')
    await page.locator("[aria-labelledby=card-results] tbody tr").nth(8).wait_for()
    await page.screenshot(path=path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=ROOT / "docs" / "images")
    home = parser.parse_args().home
    home.mkdir(exist_ok=True)
    asyncio.run(main(home))
