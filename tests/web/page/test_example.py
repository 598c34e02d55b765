"""The example service as a newcomer meets it: started, submitted to, watched, hurt, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal

import httpx
from playwright.async_api import expect

from tests.web.page.browser import launched
from tests.web.page.example import example


async def test_a_worker_is_killed_the_page_is_reloaded_and_nothing_is_lost() -> None:
    async with example() as address, launched() as browser:
        page = await browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        await page.goto(address)
        async with httpx.AsyncClient(base_url=address) as client:
            body = {"params": {"day": "tue"}, "job_id": "tuesday"}
            assert (await client.post("pipelines/report/jobs", json=body)).status_code == 201

        process = page.get_by_role("row", name="lab").get_by_role("cell").nth(2)
        await expect(process).to_have_text(re.compile(r"\d+"))
        pid = int(await process.text_content() or "")
        await page.locator('.row[data-job="tuesday"]').click()
        await expect(page.locator('.node[data-node="anomaly#2"].active')).to_be_visible()
        os.kill(pid, signal.SIGKILL)
        await expect(page.get_by_text("worker lost")).to_be_visible()
        await page.reload()
        await expect(page.get_by_text("worker lost")).to_be_visible()

        await expect(page.locator("h1 .badge")).to_contain_text("finished", timeout=30_000)
        values = page.locator("[aria-labelledby=card-results] tbody tr td:last-child")
        await expect(values).to_have_count(4)
        assert sorted(await values.all_text_contents()) == ['"tue: -5.5 to +6.5"', "-3", "-5.5", "6.5"]
        await page.get_by_role("link", name="dfm_async").click()
        restarted = page.get_by_role("row", name="lab").get_by_role("cell")
        await expect(restarted.nth(6)).to_have_text("1")
        assert await restarted.nth(2).text_content() != str(pid)
        assert not wrong
