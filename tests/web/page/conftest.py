"""One server and one browser for all tests of the page; a fresh profile for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page

from dfm_async import Session
from tests.web.page.browser import launched
from tests.web.page.site import PIPELINES, fed, gates
from tests.web.rig import Server, new_service, serving


class Open:
    """Opens the page, and listens to what goes wrong in it."""

    def __init__(self, browser: Browser, address: str) -> None:
        self._browser = browser
        self._address = address
        self._contexts: list[BrowserContext] = []
        self.wrong: list[str] = []
        self.expected: set[str] = set()
        """What a test provokes, and browsers complain about."""

    async def __call__(self, job: str | None = None, *, clock: bool = False, **options: Any) -> Page:
        """Opens the page, at a job or at the beginning; ``clock``: whether the test can put its clock forward."""
        context = await self._browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(20_000)
        self._contexts.append(context)
        page = await context.new_page()
        if clock:
            await page.clock.install()
        page.on("console", self._listen)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        await page.goto(self._address if job is None else f"{self._address}?job={job}")
        await page.wait_for_selector("#link[data-state=live]")
        return page

    def _listen(self, message: ConsoleMessage) -> None:
        expected = any(text in message.text for text in self.expected)
        if message.type in ("error", "warning") and not expected:
            self.wrong.append(message.text)

    async def close(self) -> None:
        for context in self._contexts:
            await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    # The limit is how soon a browser reconnects.
    service = new_service(session=lambda: Session(fed, target="inline"), pipelines=PIPELINES, retry=0.05)
    async with serving(service) as running:
        yield running
        for gate in gates.values():
            gate.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with launched() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def opened(server: Server, browser: Browser) -> AsyncIterator[Open]:
    """Opens the page; nothing may go wrong in it, and nothing may offend against its policy."""
    found = Open(browser, f"http://127.0.0.1:{server.port}/dfm/")
    yield found
    await found.close()
    await server.streams(0)
    assert not found.wrong, found.wrong


@pytest.fixture(autouse=True)
def closed_gates() -> None:
    gates.clear()
