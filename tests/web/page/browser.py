"""A real Chromium, found on the machine: playwright's own is fetched from a host that not everybody reaches."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright, expect

__all__ = ["RULES", "chromium", "launched"]

RULES = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"]
"""The rules of axe that the page keeps."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """Finds Chromium. Tests of the page without one would prove nothing: they fail."""
    for name in (os.environ.get("DFM_CHROMIUM"), *NAMES):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise RuntimeError(
        "the tests of the live page need Chromium: run them with nox as root on Debian or Ubuntu, which installs it, "
        "or install it yourself (apt-get install chromium), or set DFM_CHROMIUM to its path"
    )


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """Starts a browser."""
    async with async_playwright() as playwright:
        # Without its sandbox: that needs rights which containers do not give, and it sees only pages of ours.
        browser = await playwright.chromium.launch(executable_path=chromium(), chromium_sandbox=False)
        expect.set_options(timeout=20_000)  # on a busy machine; what is expected ends the wait
        try:
            yield browser
        finally:
            await browser.close()
