"""The live page is small, and there at once.

The bytes of its files are counted as they are served and as they travel (gzip). The times are taken by a real headless
Chromium with an empty cache, against a real server: until something is painted, and until the first job of a running
service is in the list. The peer is a page of one word from the same server. Claimed: at most 115 kB, 42 on their way;
painted within 0.5 s of the empty page.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from playwright.async_api import Browser
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route

from benchmarks.common import Figure, Options, Target, interleave, main
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield
from dfm_async.web import AllowAnyone, Service
from dfm_async.web.assets import read_assets
from tests.web.page.browser import launched

fed = Federation("bench")
lab = fed.site("lab")


@lab.operation
async def square(x: int) -> int:
    return x * x


with Pipeline("squares") as squares:
    Yield(square(PlaceParam("x")))

WATCH = """
    new MutationObserver((_, observer) => {
        if (!document.querySelector(".row")) return;
        window.listed = performance.now();
        observer.disconnect();
    }).observe(document, { childList: true, subtree: true });
"""
PAINTED = """() => new Promise(resolve => new PerformanceObserver(list =>
    list.getEntriesByName("first-contentful-paint").forEach(entry => resolve(entry.startTime))
).observe({ type: "paint", buffered: true }))"""


def weigh() -> list[Figure]:
    """Counts the bytes of every file, and of all together."""
    assets = read_assets()
    figures = [
        Figure(f"{name}, {len(asset.packed) / 1000:.1f} packed", "kB", len(asset.body) / 1000)
        for name, asset in sorted(assets.items())
    ]
    size = sum(len(asset.body) for asset in assets.values())
    packed = sum(len(asset.packed) for asset in assets.values())
    figures.append(Figure("all files", "kB", size / 1000, target=Target(115)))
    figures.append(Figure("all files, packed", "kB", packed / 1000, target=Target(42)))
    return figures


class Bench:
    """The page and its peer on one server, and a browser."""

    def __init__(self, browser: Browser, address: str) -> None:
        self._browser = browser
        self._address = address

    async def painted(self, path: str) -> float:
        """Gives the milliseconds until something can be seen."""
        context = await self._browser.new_context()
        try:
            page = await context.new_page()
            await page.goto(self._address + path)
            return float(await page.evaluate(PAINTED))
        finally:
            await context.close()

    async def listed(self, path: str) -> float:
        """Gives the milliseconds until the first job is in the list."""
        context = await self._browser.new_context()
        try:
            page = await context.new_page()
            await page.add_init_script(WATCH)
            await page.goto(self._address + path)
            await page.locator(".row").first.wait_for()
            return float(await page.evaluate("window.listed"))
        finally:
            await context.close()


async def empty(_request: Request) -> HTMLResponse:
    return HTMLResponse("<!doctype html><title>empty</title><p>Empty")


async def run(options: Options) -> list[Figure]:
    service = Service(
        session=lambda: Session(fed, target="inline"), pipelines={"squares": squares}, authorizer=AllowAnyone()
    )
    app = Starlette(lifespan=service.lifespan, routes=[Route("/empty", empty), Mount("/dfm", service.app)])
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    serving = asyncio.create_task(server.serve([listening]))
    try:
        async with launched() as browser:
            bench = Bench(browser, f"http://127.0.0.1:{listening.getsockname()[1]}")
            await bench.painted("/empty")  # warms the browser up, and the server is there after it
            assert service.current is not None
            await (await service.current.execute(squares, {"x": 1}))
            blocks = {"ours": lambda: bench.painted("/dfm/"), "empty page": lambda: bench.painted("/empty")}
            painted = await interleave(blocks, options.repeats)
            listed = await interleave({"ours": lambda: bench.listed("/dfm/")}, options.repeats)
    finally:
        server.should_exit = True
        await serving
    peers = {"empty page": painted["empty page"]}
    return [
        *weigh(),
        Figure("first paint", "ms", painted["ours"], peers, Target(painted["empty page"] + 500)),
        Figure("first job in the list", "ms", listed["ours"], peers),
    ]


if __name__ == "__main__":
    main("page_weight", __doc__, run)
