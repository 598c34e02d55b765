"""The page with the timeline of a trace, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

from dfm_async.cli.timeline import read_timeline
from dfm_async.cli.trace import MOST_SPANS, timeline_page
from tests.cli.test_trace import span
from tests.web.page.browser import launched


async def test_the_timeline_is_used_with_the_keyboard_in_the_dark_on_a_small_screen(tmp_path: Path) -> None:
    spans = [
        span("dfm.job", 0, 100, "application", pipeline="p", id="1" * 16),
        span("dfm.operation", 10, 20, node="load#0", frame="0", parent="1" * 16, waited=0.004),
        span("dfm.operation", 30, 60, node="load#0", frame="1", status="error", message="it is <b>broken</b>"),
    ]
    trace, page_file = tmp_path / "trace.jsonl", tmp_path / "page.html"
    trace.write_text("".join(f"{json.dumps(found)}\n" for found in spans))
    page_file.write_text(timeline_page(read_timeline(trace, kept=MOST_SPANS), "run"))
    wrong: list[str] = []
    async with launched() as browser:
        context = await browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark")
        page = await context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        await page.goto(page_file.as_uri())
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        assert "3 spans in 100.0 ms" in await page.inner_text("#head")
        await page.focus("#view")
        said = []
        for key in ("ArrowRight", "ArrowDown", "p", "e", "+", "0"):
            await page.keyboard.press(key)
            said.append((await page.inner_text("#details")).split("\n")[0])
        assert said[:4] == [
            "job p in application: 100.0 ms, from 0 µs",
            "load#0 in lab: 10.0 ms, from 10.0 ms, after waiting for 4.00 ms",
            "job p in application: 100.0 ms, from 0 µs",
            "load#0 in lab: 30.0 ms, from 30.0 ms",
        ]
        assert "it is <b>broken</b>" in await page.inner_text("#details")
        await context.close()
    assert wrong == []
