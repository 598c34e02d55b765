"""Takes the pictures of the live page for the documentation: ``nox -s screenshot``."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from playwright.async_api import Page, ViewportSize

from dfm_async import Session
from dfm_async.web import Service
from examples.service import fed, report
from tests.web.page.browser import launched
from tests.web.rig import Server, serving

HOME = Path(__file__).resolve().parents[3] / "docs" / "images"
SIZE: ViewportSize = {"width": 1360, "height": 850}


async def main(home: Path) -> None:
    """Runs the example service, and takes pictures of one moment."""
    with tempfile.TemporaryDirectory() as directory:
        service = Service(
            session=lambda: Session(fed, store=f"sqlite:///{directory}/jobs.db"), pipelines={"report": report}
        )
        async with serving(service) as server, launched() as browser:
            await prepare(server)
            job_id = await server.submit("report", [{"day": "mon"}, {"day": "tue"}, {"day": "wed"}], job_id="today")
            pages = []
            for scheme in ("light", "dark"):
                context = await browser.new_context(viewport=SIZE, color_scheme=scheme, locale="en-GB")
                page = await context.new_page()
                await page.goto(f"http://127.0.0.1:{server.port}/dfm/?job={job_id}")
                pages.append((scheme, page))
            await asyncio.gather(*(take(page, home / f"live-page-{scheme}.png") for scheme, page in pages))


async def prepare(server: Server) -> None:
    """Lets some jobs end, one of them badly, so that there is something in the list."""
    for job_id, day in (("monday", "mon"), ("typo", "mno"), ("tuesday", "tue")):
        job = await server.session.reattach(await server.submit("report", {"day": day}, job_id=job_id))
        await job.wait_until_finished()


async def take(page: Page, path: Path) -> None:
    """Waits for a moment with something to see."""
    await page.wait_for_selector('.node[data-node^="anomaly"].active')
    await page.locator("[aria-labelledby=card-results] tbody tr").nth(8).wait_for()
    await page.screenshot(path=path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=HOME)
    home = parser.parse_args().home
    home.mkdir(exist_ok=True)
    asyncio.run(main(home))
