"""The live page in Firefox, whose streams, layout and policy are other code than those of Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dfm_async.web.open_streams import StreamPhase
from tests.web.page.browser import RULES
from tests.web.page.firefox import Firefox, firefox
from tests.web.page.site import gate
from tests.web.rig import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

BADGE = "document.querySelector('h1 .badge')?.textContent"
ROWS = "document.querySelectorAll('[aria-labelledby=card-results] tbody tr').length"
GRAPH = "document.querySelector('[aria-labelledby=card-graph] .cap')?.textContent"
CUT = """
    [document.documentElement, ...document.querySelectorAll(".scroll, .facts > div, .facts dd, .graph")]
        .filter(element => element.scrollWidth > element.clientWidth)
        .map(element => `${element.className} ${element.ariaLabel}`).join()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab() -> AsyncIterator[Firefox]:
    async with firefox() as found:
        yield found


@pytest.fixture
def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/dfm/"


async def test_firefox_follows_a_job_across_a_reconnect(server: Server, tab: Firefox, address: str) -> None:
    job_id = await server.submit("holding", {"n": 2, "name": "fox"})
    await tab.open(f"{address}?job={job_id}")
    await tab.until(f"{ROWS} === 2 && {GRAPH}.includes('1 active')")
    for stream in list(server.service._state.streams._open):
        stream.reach(StreamPhase.DRAINING)
    await tab.until("document.getElementById('link').dataset.state === 'waiting'")
    gate("fox").set()
    await tab.until(f"{ROWS} === 4 && {BADGE} === '✓finished'")
    assert await tab.evaluate("document.querySelector('h1 .badge').clientHeight") < 40  # in one line
    assert await tab.evaluate(CUT) == ""
    await tab.open(f"{address}?job={job_id}", width=360)
    await tab.until(f"{ROWS} === 4 && {GRAPH}.includes('nodes')")
    assert await tab.evaluate(CUT) == ""
    assert not tab.wrong, tab.wrong


async def test_firefox_filters_jobs_and_submits_one(server: Server, tab: Firefox, address: str) -> None:
    await server.finished(await server.submit("breaking", {"x": 5}))
    await tab.open(address)
    await tab.until("document.querySelector('[aria-labelledby=card-newest-errors]')?.innerText.includes('no 5')")
    await tab.evaluate("[...document.querySelectorAll('nav button')].find(x => x.textContent === 'Failed').click()")
    await tab.until("[...document.querySelectorAll('nav .row')].every(x => x.textContent.includes('failed'))")
    await tab.evaluate("[...document.querySelectorAll('nav button')].find(x => x.textContent === 'New job').click()")
    await tab.evaluate(
        """{
            const form = document.querySelector("dialog[open] form");
            const choice = form.querySelector("select");
            choice.value = "counting";
            choice.dispatchEvent(new Event("change"));
            form.querySelector("input[type=number]").value = "3";
            form.requestSubmit();
        }"""
    )
    await tab.until(f"{BADGE} === '✓finished' && {ROWS} === 3")
    assert not tab.wrong, tab.wrong


async def test_firefox_shows_images(server: Server, tab: Firefox, address: str) -> None:
    kinds = ("pillow", "photo", "file", "web", "pixels")
    job_id = await server.submit("giving", [{"kind": kind} for kind in kinds])
    await tab.open(f"{address}?job={job_id}", width=360)
    await tab.until(f"{BADGE} === '✓finished' && {ROWS} === {len(kinds)}")
    await tab.evaluate("document.querySelectorAll('.results summary').forEach(summary => summary.click())")
    await tab.until(f"document.querySelectorAll('.results img').length === {len(kinds)}")
    widths = await tab.evaluate(
        """Promise.all([...document.querySelectorAll(".results img")].map(async image => {
            image.loading = "eager";
            await image.decode();
            return image.naturalWidth;
        })).then(widths => widths.sort().join())"""
    )
    assert widths == "1024,300,300,300,640"
    assert await tab.evaluate(CUT) == ""
    await tab.sound(RULES)
    assert not tab.wrong, tab.wrong


PRESS = "[...document.querySelectorAll('button, summary')].find(x => x.checkVisibility() && x.textContent.includes(%r))"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_firefox_passes_the_accessibility_checks(server: Server, address: str, scheme: str) -> None:
    failed = await server.submit("breaking", {"x": 1})
    waiting = await server.submit("approving", {})
    running = await server.submit("holding", {"n": 2, "name": "axe-fox"})
    rules = ["color-contrast"] if scheme == "dark" else RULES
    async with firefox(scheme) as tab:

        async def press(text: str) -> None:
            await tab.until(f"{PRESS % text} !== undefined")
            await tab.evaluate(f"{PRESS % text}.click()")

        await tab.open(address)
        await tab.until("document.querySelector('[aria-labelledby=card-newest-errors]')?.innerText.includes('no 1')")
        ground = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(245, 246, 249)", "dark": "rgb(14, 17, 22)"}[scheme]
        await press("Filter")
        await tab.sound(rules)
        await press("New job")
        await tab.sound(rules)
        await tab.open(f"{address}?job={failed}", width=360)
        await press("ValueError")
        await tab.until("document.querySelector('.fault pre') !== null")
        await tab.sound(rules)
        await tab.open(f"{address}?job={waiting}")
        await tab.until("document.querySelectorAll('.waits li').length === 4")
        await tab.sound(rules)
        await tab.open(f"{address}?job={running}")
        await tab.until(f"{ROWS} === 2 && {GRAPH}.includes('1 active')")
        await press("The same as a table")
        await tab.sound(rules)
        await press("Cancel job")
        await tab.sound(rules)
        assert not tab.wrong, tab.wrong
    for job_id in (waiting, running):
        await server.client.post(f"/jobs/{job_id}/cancel", json={})
