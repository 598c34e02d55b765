"""The live page in a real browser, against a real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Locator, Page, expect
from starlette.requests import HTTPConnection

from dfm_async import JobInfo, Session
from dfm_async.web import Action, AllowAnyone, Authorizer, Principal, Service
from dfm_async.web.open_streams import StreamPhase
from tests.web.page.browser import RULES
from tests.web.page.conftest import Open
from tests.web.page.site import PIPELINES, fed, gate
from tests.web.rig import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


def row(page: Page, job_id: str) -> Locator:
    return page.locator(f'nav .row[data-job="{job_id}"]')


def node(page: Page, label: str) -> Locator:
    return page.locator(f'.node[data-node="{label}"]')


def card(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title, exact=True)


async def new_job(page: Page) -> Locator:
    await page.get_by_role("button", name="New job").click()
    return page.get_by_role("dialog", name="New job")


async def finished(page: Page, status: str = "finished") -> None:
    await expect(page.locator("h1 .badge")).to_have_text(f"{'✓' if status == 'finished' else '✕'}{status}")


async def test_the_list_shows_jobs_as_they_come_and_end(server: Server, opened: Open) -> None:
    page = await opened()
    job_id = await server.submit("holding", {"n": 1, "name": "list"})
    await expect(row(page, job_id)).to_contain_text("running")
    await expect(page.locator(".row").first).to_have_attribute("data-job", job_id)
    gate("list").set()
    await expect(row(page, job_id)).to_contain_text("finished")
    jobs = page.get_by_role("navigation", name="Jobs")
    await jobs.get_by_role("button", name="Active").click()
    await expect(row(page, job_id)).to_have_count(0)
    await jobs.get_by_role("button", name="Finished").click()
    await expect(row(page, job_id)).to_have_count(1)


async def test_jobs_are_listed_page_by_page_and_filtered_by_the_service(tmp_path: Path, browser: Browser) -> None:
    def session() -> Session:
        return Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db")

    async with session() as earlier:
        for name, count, label in (("counting", 130, "ada"), ("saying", 3, "bob"), ("counting", 1, "bob")):
            for _ in range(count):
                await earlier.execute(PIPELINES[name], autostop=True, input_params=[], label=label)
        broken = await earlier.execute(PIPELINES["breaking"], {"x": 7}, label="eve")
        await broken.wait_until_finished()
    service = Service(session=session, pipelines=PIPELINES, authorizer=AllowAnyone())
    async with serving(service) as server, await browser.new_context() as context:
        requests: list[str] = []
        page = await context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        await page.goto(f"http://127.0.0.1:{server.port}/dfm/")
        jobs, rows = page.get_by_role("navigation", name="Jobs"), page.locator("nav .row")
        await expect(rows).to_have_count(100)
        await expect(jobs).to_contain_text("The newest 100.")
        lately = page.locator(".facts div", has_text="Errors per minute").locator("dd")
        await expect(lately).to_have_text("1")  # of a job that had failed before the page was opened
        live = await server.submit("counting", {"n": 1})
        await expect(row(page, live)).to_contain_text("finished")  # of the stream
        await jobs.get_by_role("button", name="Show older jobs").click()
        await expect(rows).to_have_count(136)
        await expect(jobs.get_by_role("button", name="Show older jobs")).to_be_hidden()
        search = jobs.get_by_label("Search jobs by parts of their id, pipeline or submitter")
        await search.fill("OUN Bo")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("· bob")
        await search.fill("oun %")
        await expect(jobs).to_contain_text("No such jobs.")
        await search.fill(live[3:])
        await expect(rows).to_have_attribute("data-job", live)
        another = await server.submit("counting", {"n": 1})
        await expect(row(page, another)).to_have_count(0)
        await search.fill("")
        await expect(row(page, another)).to_contain_text("finished")
        await expect(rows).to_have_count(100)
        await jobs.get_by_text("Filter", exact=True).click()
        await jobs.get_by_label("Submitted by").fill("bo")
        await expect(jobs).to_contain_text("Pipeline and submitter must be whole names")
        await jobs.get_by_label("Submitted by").fill("bob")
        await expect(rows).to_have_count(4)
        await expect(rows.first).to_contain_text("bob")
        await jobs.get_by_label("Pipeline", exact=True).fill("count")
        await expect(rows).to_have_count(1)
        await jobs.get_by_label("Until").fill("2020-01-01T00:00")
        await expect(jobs).to_contain_text("No such jobs.")
        await jobs.get_by_role("button", name="Clear filter").click()
        await jobs.get_by_role("button", name="Failed").click()
        await expect(rows).to_have_count(1)
        await expect(card(page, "Newest errors")).to_contain_text("ValueError in breaks#0: no 7")
        await expect(page.locator(".facts")).to_contain_text(re.compile(r"Failed, last \d+ min1 \(1 %\)"))
        await expect(card(page, "Jobs ended").get_by_role("img")).to_have_attribute(
            "aria-label", re.compile(r"Jobs that ended, last \d+ min: 136 finished, 1 failed, 0 stopped")
        )
        asked = [url for url in requests if "/jobs?" in url]
        assert all("limit=" in url for url in asked)
        assert sum("principal=bob" in url for url in asked) == 3


async def test_job_that_starts_later_shows_when(server: Server, opened: Open) -> None:
    answer = await server.client.post(
        "/pipelines/holding/jobs", json={"params": {"n": 1, "name": "later"}, "start_at": 4102444800}
    )
    job_id = answer.json()["job_id"]
    page = await opened(job_id)
    await expect(row(page, job_id)).to_contain_text("starts at")
    facts = page.locator("dl div", has_text="Starts at")
    await expect(facts.locator("dd")).to_contain_text("Jan 1")
    await expect(page.locator("dl div", has_text="Waits for")).to_contain_text("its start at 2100-01-01T00:00:00Z")
    await server.client.post(f"/jobs/{job_id}/cancel", json={})


async def test_a_site_shows_which_calls_wait_for_which_limit(server: Server, opened: Open) -> None:
    page = await opened()
    job_id = await server.submit("waiting", [{"x": x, "name": "turn"} for x in range(3)])
    site = card(page, "Sites").locator("tbody tr", has_text="lab")
    await expect(site.locator("td").nth(1)).to_have_text("2 wait for limit")
    gate("turn").set()
    await expect(row(page, job_id)).to_contain_text("finished")
    await expect(card(page, "Sites")).to_be_hidden()


async def test_nodes_are_active_while_their_operations_run(server: Server, opened: Open) -> None:
    job_id = await server.submit("holding", {"n": 3, "name": "light"})
    page = await opened(job_id)
    await expect(node(page, "hold#2")).to_have_class("node call s1 active")
    await expect(node(page, "load#0")).not_to_have_class("active")
    await expect(node(page, "load#0").locator(".count")).to_have_text("1")
    progress = card(page, "Progress").locator("tr", has_text="hold#2")
    await expect(progress).to_contain_text("a quarter · 1 of 4")
    await expect(progress.locator("td").nth(2)).to_have_text("3")
    gate("light").set()
    await finished(page)
    await expect(node(page, "hold#2")).not_to_have_class("active")
    await expect(node(page, "hold#2").locator(".count")).to_have_text("3")
    await expect(progress.locator("td").nth(3)).to_have_text("3")
    await expect(progress.locator("progress, small")).to_have_count(2)
    for outdated in await progress.locator("progress, small").all():
        await expect(outdated).to_be_hidden()
    await expect(card(page, "Metrics").get_by_role("img")).to_have_attribute(
        "aria-label", "loss: 3 values from 0.33333 to 1, now 0.33333"
    )


async def test_timeline_shows_what_ran_where_also_as_a_table(server: Server, opened: Open) -> None:
    gate("time").set()
    page = await opened(await server.submit("holding", {"n": 2, "name": "time"}))
    await finished(page)
    timeline = card(page, "Timeline")
    label = await timeline.get_by_role("img").get_attribute("aria-label") or ""
    assert "archive: 1 call of load#0" in label
    assert "lab: 2 calls of hold#2" in label
    await timeline.get_by_text("The same as a table").click()
    await expect(timeline.locator("tbody tr")).to_have_count(3)
    assert await timeline.locator("tbody tr").first.locator("td").nth(5).text_content() == "done"


async def test_results_come_as_they_are_made_and_can_be_filtered(server: Server, opened: Open) -> None:
    job_id = await server.submit("holding", {"n": 3, "name": "results"})
    page = await opened(job_id)
    results = card(page, "Results")
    rows = results.locator("tbody tr")
    await expect(rows).to_have_count(3)  # the numbers need not wait
    gate("results").set()
    await expect(rows).to_have_count(6)
    await results.get_by_label("Place").select_option("squares")
    await expect(rows).to_have_count(3)
    await results.get_by_label("Frame").fill("0.2")
    await expect(rows).to_have_count(1)
    await expect(rows.locator("pre")).to_have_count(0)
    await rows.locator("summary").click()
    assert await rows.locator("pre").text_content() == '{\n  "x": 2,\n  "squares": [\n    4,\n    4,\n    4\n  ]\n}'


async def test_a_failed_job_shows_the_traceback_of_its_site(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("breaking", [{"x": 1}, {"x": 2}]))
    await finished(page, "failed")
    errors = card(page, "Errors")
    await expect(errors.locator(".cap")).to_contain_text("2 errors, 2 results missing")
    fault = errors.locator(".fault")
    await expect(fault).to_have_count(1)
    await expect(fault.locator("summary")).to_contain_text("ValueError \N{MULTIPLICATION SIGN} 2 in breaks#0: no ")
    await expect(fault.locator("pre")).to_have_count(0)
    await fault.locator("summary").click()
    first = fault.locator(".one", has_text="no 1")
    await expect(first).to_contain_text("lab breaks#0, frame 0")
    await expect(first.locator("pre")).to_contain_text('raise ValueError(f"no {x}")')
    await expect(node(page, "breaks#0")).to_have_class("node call s0 failed")


async def test_many_errors_leave_room_for_the_graph(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("breaking", [{"x": number} for number in range(300)]))
    await finished(page, "failed")
    errors = card(page, "Errors")
    await expect(errors.locator(".cap")).to_contain_text("300 errors, 300 results missing")
    await expect(page.locator(".facts .wrong dd")).to_have_text("300")
    await expect(errors.locator(".fault summary")).to_contain_text("ValueError \N{MULTIPLICATION SIGN} 300")
    await errors.locator(".fault summary").click()
    await expect(errors.locator(".one")).to_have_count(20)
    await expect(errors).to_contain_text("The newest 20 of 300:")
    box = await card(page, "Graph").bounding_box()
    assert box is not None
    assert box["y"] < 900, "without scrolling"


async def test_a_graph_fits_its_width_and_zooms(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("crashing", {"x": 1}))
    await finished(page, "failed")
    graph = card(page, "Graph")
    frame, drawing = graph.locator(".graph"), graph.locator("svg")
    fits = "element => element.scrollWidth <= element.clientWidth"
    await expect(drawing).to_have_css("width", re.compile(r"\d"))
    assert await frame.evaluate(fits)
    size = await drawing.bounding_box()
    assert size is not None
    assert size["width"] > 600, "a wide drawing has the whole width of the page"
    await graph.get_by_role("button", name="Zoom in").click()
    await graph.get_by_role("button", name="Zoom in").click()
    assert not await frame.evaluate(fits)
    await frame.focus()
    await page.keyboard.press("0")
    assert await frame.evaluate(fits)
    await expect(graph.get_by_role("button", name="Zoom out")).to_be_disabled()
    await page.set_viewport_size({"width": 360, "height": 740})
    await expect(drawing).to_have_css("width", re.compile(r"^[23]\d\d(\.\d+)?px"))
    assert await frame.evaluate(fits)


async def test_errors_beyond_the_page_limit_are_counted(server: Server, opened: Open) -> None:
    job = await server.session.execute(PIPELINES["breaking"], [{"x": number} for number in range(4000)], watch=True)
    await job.wait_until_finished()
    page = await opened(job.job_id)
    note = card(page, "Errors").locator(".cap .soft")
    await expect(note).to_have_text(re.compile(r"4,000 errors, the newest [1-3],\d\d\d are listed"))
    await expect(page.locator(".facts .wrong dd")).to_have_text("4,000")


async def test_many_kinds_of_errors_are_folded_and_counted_alike(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("crashing", [{"x": number} for number in range(40)]))
    await finished(page, "failed")
    errors = card(page, "Errors")
    await expect(errors.locator(".cap .soft")).to_have_text("240 errors, 240 results missing")
    await expect(page.locator(".facts .wrong dd")).to_have_text("240")
    await expect(card(page, "Graph").locator(".cap")).to_contain_text("6 with errors")
    await expect(card(page, "Timeline").locator(".cap")).to_contain_text("240 calls")
    shown = errors.locator(".fault:visible")
    await expect(shown).to_have_count(3)
    box = await card(page, "Graph").bounding_box()
    assert box is not None
    assert box["y"] < 600
    await errors.get_by_role("button", name="Show all 6 kinds").click()
    await expect(shown).to_have_count(6)
    await errors.get_by_role("button", name="Show fewer").click()
    await expect(shown).to_have_count(3)


async def test_values_of_jobs_are_shown_as_text(server: Server, opened: Open) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page = await opened(await server.submit("saying", {"text": text}))
    await finished(page)
    await expect(page.locator("h1")).to_contain_text("<b>say</b>")
    await expect(card(page, "Results").locator("tbody tr")).to_contain_text(text)
    assert await page.locator("main img, main script, main b").count() == 0


async def test_values_have_previews(server: Server, opened: Open) -> None:
    kinds = {
        "array": "30 \N{MULTIPLICATION SIGN} 30 numbers",
        "long": "100 \N{MULTIPLICATION SIGN} 100 numbers",
        "series": "pandas.Series, 9, celsius",
        "table": "pandas.DataFrame, 30 \N{MULTIPLICATION SIGN} 2, <b>, wind",
        "icon": "6 \N{MULTIPLICATION SIGN} 8 \N{MULTIPLICATION SIGN} 4 numbers",
    }
    page = await opened(await server.submit("giving", [{"kind": kind} for kind in kinds]))
    await finished(page)
    values = {}
    for kind, title in kinds.items():
        values[kind] = page.locator(".results > table > tbody > tr", has_text=title)
        await values[kind].locator("summary").first.click()
    for kind, size in {"array": 30, "long": 96, "icon": 8}.items():
        await expect(values[kind].locator("canvas")).to_have_js_property("width", size)
    for kind in "array", "long":
        await expect(values[kind].locator(".preview td")).to_have_count(20 * 13)
    await expect(values["long"].get_by_role("link", name="the whole value")).to_be_visible()
    curve = values["series"].get_by_role("img", name="9 numbers from -1.5 to 6")
    await expect(curve.locator("path")).to_have_attribute("d", re.compile("^M0.00 28.00L"))
    await expect(values["table"].locator(".preview tbody tr")).to_have_count(20)
    await expect(values["table"].locator(".preview tbody tr").first.locator("td")).to_have_text(['[0,"x"]', "<i>", "0"])
    await expect(values["table"]).to_contain_text("The first 20 of 30 rows.")
    colour = "canvas => [...canvas.getContext('2d').getImageData(7, 5, 1, 1).data]"
    assert await values["icon"].locator("canvas").evaluate(colour) == [200, 200, 200, 200]
    assert await page.evaluate("document.querySelector('.results').scrollWidth <= innerWidth")


async def test_images_have_previews(server: Server, opened: Open) -> None:
    kinds = {
        "pillow": ("PIL.Image.Image, RGB, 1,500 \N{MULTIPLICATION SIGN} 1,000 pixels", 1024),
        "photo": ("JPEG image, ", 300),
        "file": ("PNG image, ", 300),
        "web": ("WebP image, ", 300),
        "pixels": ("numpy.ndarray, 480 \N{MULTIPLICATION SIGN} 640 \N{MULTIPLICATION SIGN} 3, uint8", 640),
        "large": ("bytes, 5.", 300),
        "image": ("PIL.Image.Image, RGB, 640 \N{MULTIPLICATION SIGN} 480 pixels", None),
    }
    opened.expected = {"status of 404"}  # for the value that only looks like an image
    page = await opened(await server.submit("giving", [{"kind": kind} for kind in (*kinds, "svg")]))
    await finished(page)
    for title, width in kinds.values():
        value = page.locator(".results > table > tbody > tr", has_text=title)
        await value.locator("summary").first.click()
        image = value.locator("img")
        if width is None:
            await expect(value).to_contain_text("There is no preview of this value.")
            await expect(image).to_have_count(0)
        else:
            await expect(image).to_have_js_property("naturalWidth", width)
            assert title in (await image.get_attribute("alt") or "")
    svg = page.locator(".results > table > tbody > tr", has_text="PHN2ZyB4")
    await expect(svg.locator("details, img")).to_have_count(0)
    assert await page.evaluate("document.querySelector('.results').scrollWidth <= innerWidth")
    await sound(page, RULES)


async def test_drawings_are_stripped_of_scripts(opened: Open) -> None:
    page = await opened()
    opened.expected = {"inline event handler violates"}  # the policy would have stopped it, too
    found = await page.evaluate(
        """async () => {
            const { harmless } = await import("./page/graph.js");
            const { root, style } = harmless(`<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">
                <style>a&gt;b{}</style><script>alert(2)</script><foreignObject><p>x</p></foreignObject>
                <a href="http://x.example"><rect/></a>
                <rect fill="url(http://x.example/y)" class="kept" mask="url(#z)"/></svg>`);
            return [root.outerHTML.replace(/\\s+/g, " "), style];
        }"""
    )
    assert found == [
        '<svg xmlns="http://www.w3.org/2000/svg"> <rect class="kept" mask="url(#z)"></rect></svg>',
        "a>b{}",
    ]


async def test_a_job_is_cancelled_only_when_that_is_confirmed(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("holding", {"n": 1, "name": "never"}))
    cancel = page.get_by_role("button", name="Cancel job")
    dialog = page.get_by_role("dialog")
    await cancel.first.click()
    await dialog.get_by_role("button", name="Keep it").click()
    await expect(page.locator("h1 .badge")).to_contain_text("running")
    await cancel.first.click()
    await dialog.get_by_role("button", name="Cancel job").click()
    await expect(page.locator("h1 .badge")).to_contain_text("aborted")
    await expect(page.get_by_text("cancelled on the live page")).to_be_visible()
    await expect(cancel).to_have_count(0)


async def test_a_dialog_that_is_opened_again_at_once_takes_its_own_answer(server: Server, opened: Open) -> None:
    job = await server.submit("holding", {"n": 1, "name": "again"})
    page = await opened(job)
    cancel = page.locator(".head").get_by_role("button", name="Cancel job")
    await cancel.click()
    # The close event of the first dialog is still queued while the second one opens.
    await cancel.evaluate("button => { document.getElementById('ask').close(); button.click(); }")
    await page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    await expect(page.locator("h1 .badge")).to_contain_text("aborted")


async def test_a_job_that_is_open_for_inputs_can_be_finished(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("counting", {"n": 1}, open=True))
    await page.get_by_role("button", name="Finish inputs").click()
    await finished(page)


async def test_events_that_a_job_waits_for_are_sent_by_forms(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("approving", {}))
    waits = card(page, "Waits for")
    await expect(waits.locator("li")).to_have_count(4)
    await expect(waits).to_contain_text("a time until")
    await waits.get_by_role("button", name="Yes: approval").click()
    await expect(waits.locator("li")).to_have_count(3)
    await waits.get_by_role("form", name="grade").get_by_label("value").select_option("bad")
    number = waits.get_by_role("form", name="count")
    await number.get_by_label("value").fill("7")
    await waits.get_by_role("form", name="grade").get_by_role("button", name="Send").click()
    await expect(waits.locator("li")).to_have_count(2)
    await expect(number.get_by_label("value")).to_have_value("7")  # what is typed stays
    await number.get_by_role("button", name="Send").click()
    await expect(waits.locator("li")).to_have_count(1)
    results = card(page, "Results")
    for text in ("true", "bad", "7"):
        await expect(results).to_contain_text(text)
    await page.get_by_role("button", name="Cancel job").first.click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    await expect(waits).to_be_hidden()


async def test_failed_sets_run_again_and_the_page_shows_the_new_job(server: Server, opened: Open) -> None:
    job_id = await server.submit("breaking", {"x": 1})
    page = await opened(job_id)
    await expect(page.locator("h1 .badge")).to_contain_text("failed")
    await page.get_by_role("button", name="Run failed sets again").click()
    await expect(page.locator(".facts")).to_contain_text(job_id)
    assert job_id not in page.url
    await page.locator(".facts").get_by_role("link", name=job_id).click()
    await expect(page).to_have_url(re.compile(f"job={job_id}$"))


async def test_a_job_of_a_store_is_forked_by_a_dialog(tmp_path: Path, server: Server, browser: Browser) -> None:
    gate("forked").set()
    service = Service(
        session=lambda: Session(fed, target="inline", store=f"sqlite:///{tmp_path}/jobs.db"),
        pipelines=PIPELINES,
        authorizer=AllowAnyone(),
    )
    async with serving(service) as stored, await browser.new_context() as context:
        page = await context.new_page()
        job_id = await stored.submit("holding", {"n": 2, "name": "forked"})
        await page.goto(f"http://127.0.0.1:{stored.port}/dfm/?job={job_id}")
        await page.get_by_role("button", name="Fork job").click()
        dialog = page.get_by_role("dialog", name="Run again from a node on")
        node_field, call_field = dialog.get_by_label("node the first"), dialog.get_by_label("call its parameter set")
        assert await node_field.locator("option").all_inner_texts() == ["load#0", "hold#2"]
        await sound(page, RULES)
        await node_field.select_option("hold#2")
        for wrong, message in (
            ("first", "call takes numbers, such as 0,57"),
            ("0,1", "no call of hold#2 in frame [0, 1]"),
        ):
            await call_field.fill(wrong)
            await dialog.get_by_role("button", name="Fork").click()
            await expect(dialog.get_by_role("alert")).to_contain_text(message)
        await call_field.fill("")
        await dialog.get_by_role("button", name="Fork").click()
        await expect(page.locator(".facts")).to_contain_text(job_id)
        assert job_id not in page.url
        await finished(page)
        await expect(dialog).to_have_count(0)
        (fork,) = [info for info in stored.session.infos() if info.fork_of == job_id]
        assert fork.job_id in page.url
    page = await (await browser.new_context()).new_page()
    await page.goto(
        f"http://127.0.0.1:{server.port}/dfm/?job={await server.submit('saying', {'text': 'kept in memory'})}"
    )
    await finished(page)
    await expect(page.get_by_role("button", name="Fork job")).to_be_hidden()
    await page.context.close()


async def test_the_overview_lists_schedules_and_their_newest_jobs(browser: Browser) -> None:
    service = Service(session=lambda: Session(fed, target="inline"), pipelines=PIPELINES, authorizer=AllowAnyone())
    service.schedule("leap", PIPELINES["counting"], {"n": 1}, every=366 * 86400, missed="once")
    service.schedule("often", PIPELINES["counting"], {"n": 1}, every=1)
    async with serving(service) as server, await browser.new_context() as context:
        page = await context.new_page()
        await page.goto(f"http://127.0.0.1:{server.port}/dfm/")
        rows = card(page, "Schedules").locator("tbody tr")
        await expect(rows.nth(0)).to_contain_text(re.compile(r"^leapevery 31,622,400 s.+once$"))
        await expect(rows.nth(1)).to_contain_text(re.compile(r"^oftenevery 1 s.+often@2.+Zskip$"))
        await page.set_viewport_size({"width": 360, "height": 640})
        assert await card(page, "Schedules").locator(".scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
        await rows.nth(1).get_by_role("link").click()
        await finished(page)


async def test_a_reload_loses_nothing(server: Server, opened: Open) -> None:
    job_id = await server.submit("holding", {"n": 4, "name": "reload"})
    page = await opened(job_id)
    rows = card(page, "Results").locator("tbody tr")
    await expect(rows).to_have_count(4)
    await page.reload()
    await expect(rows).to_have_count(4)
    await expect(node(page, "hold#2")).to_have_class("node call s1 active")
    gate("reload").set()
    await finished(page)
    await expect(rows).to_have_count(8)
    before = await rows.all_text_contents()
    await page.reload()
    await expect(rows).to_have_count(8)
    assert await rows.all_text_contents() == before
    await expect(node(page, "hold#2").locator(".count")).to_have_text("4")


async def test_reconnect_loses_and_repeats_nothing(server: Server, opened: Open) -> None:
    job_id = await server.submit("holding", {"n": 2, "name": "line"})
    page = await opened(job_id)
    rows = card(page, "Results").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await server.streams(2)
    for stream in list(server.service._state.streams._open):
        stream.reach(StreamPhase.DRAINING)
    await server.streams(0)
    gate("line").set()
    await finished(page)
    await expect(rows).to_have_count(4)
    offsets = [await found.locator("td").first.text_content() for found in await rows.all()]
    assert len(set(offsets)) == 4
    await expect(node(page, "hold#2").locator(".count")).to_have_text("2")


async def test_hidden_page_holds_no_connection(server: Server, opened: Open) -> None:
    page = await opened(await server.submit("holding", {"n": 2, "name": "hidden"}), clock=True)
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await server.streams(2)
    await page.evaluate(hide, True)
    await page.clock.fast_forward(31_000)
    await server.streams(0)
    gate("hidden").set()
    await page.evaluate(hide, False)
    await finished(page)
    await expect(card(page, "Results").locator("tbody tr")).to_have_count(4)


async def test_long_job_shows_its_newest_events(server: Server, opened: Open) -> None:
    job_id = await server.submit("counting", {"n": 10_500})
    await (await server.session.reattach(job_id)).wait_until_finished()
    page = await opened(job_id)
    notice = page.locator(".notice").first
    await expect(notice).to_contain_text("are not shown, to save memory. The service has them all")
    assert (await notice.get_by_role("link").get_attribute("href") or "").endswith("/events?after=-1")
    await expect(card(page, "Results").locator(".cap")).to_contain_text("the newest 200 of 5,000")
    await expect(card(page, "Results").locator("tbody tr")).to_have_count(200)
    await expect(card(page, "Results").locator("tbody tr").first).to_contain_text("10499")


async def test_unknown_job_shows_a_message(server: Server, opened: Open) -> None:
    page = await opened()
    opened.expected = {"status of 404"}
    await page.evaluate("history.pushState(null, '', '?job=nothing'); dispatchEvent(new PopStateEvent('popstate'))")
    await expect(page.get_by_role("alert")).to_have_text("There is no job nothing, or you may not see it.")


async def test_page_reports_a_missing_permission(browser: Browser) -> None:
    class Reader(Authorizer):
        async def __call__(self, request: HTTPConnection, /) -> Principal | None:
            return Principal("ada")

        def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
            return action == "read"

    service = Service(session=lambda: Session(fed, target="inline"), pipelines=PIPELINES, authorizer=Reader())
    async with serving(service) as server, await browser.new_context() as context:
        job = await server.session.execute(PIPELINES["counting"], {"n": 2})
        page = await context.new_page()
        await page.goto(f"http://127.0.0.1:{server.port}/dfm/?job={job.job_id}")
        await expect(page.locator("nav .note")).to_have_text("The jobs cannot be listed: you may not list here.")
        await finished(page)
        await expect(card(page, "Results").locator("tbody tr")).to_have_count(2)


async def test_a_form_runs_registered_pipelines(server: Server, opened: Open) -> None:
    page = await opened()
    form = await new_job(page)
    await form.get_by_label("Pipeline").select_option("counting")
    await form.get_by_label("n integer").fill("3")
    await form.get_by_role("button", name="Run").click()
    await finished(page)
    await expect(card(page, "Results").locator("tbody tr")).to_have_count(3)
    await page.get_by_role("button", name="New job").click()
    await form.get_by_label("several parameter sets").check()
    await form.get_by_label("Parameter sets, as a JSON list").fill('[{"n": 1}, {"n": "two"}]')
    opened.expected = {"status of 422"}
    await form.get_by_role("button", name="Run").click()
    await expect(form.get_by_role("alert")).to_contain_text("unable to parse string as an integer")


async def test_a_form_shows_defaults_and_leaves_out_empty_fields(server: Server, opened: Open) -> None:
    page = await opened()
    form = await new_job(page)
    await form.get_by_label("Pipeline").select_option("defaulting")
    await expect(form.get_by_label("n integer")).to_have_value("2")
    await form.get_by_label("who any value").fill("")
    await form.get_by_role("button", name="Run").click()
    await finished(page)
    await expect(card(page, "Results").locator("tbody tr")).to_have_count(4)
    await expect(card(page, "Results")).to_contain_text("2026-01-02")
    await expect(card(page, "Errors")).to_contain_text("goes on without a failed value")
    await expect(card(page, "Errors")).to_contain_text("ValueError: no 1")


async def test_a_form_describes_a_function_and_its_parameters(server: Server, opened: Open) -> None:
    page = await opened()
    form = await new_job(page)
    await form.get_by_label("Pipeline").select_option("described")
    await expect(form.locator(".about")).to_have_text("Say what was given.")
    await expect(form.get_by_label("times how often.")).to_have_value("")
    await expect(form.get_by_label("kind which one.").locator("option")).to_have_text(["null", "short", "long"])
    await form.get_by_label("twice whether to do it again.").check()
    await form.get_by_role("button", name="Run").click()
    await finished(page)
    (info,) = [info for info in server.session.infos() if info.pipeline == "described"]
    job = await server.session.reattach(info.job_id)
    assert [result.value async for result in job.results("given")] == [[None, None, True]]


async def test_everything_can_be_done_with_the_keyboard(server: Server, opened: Open) -> None:
    first = await server.submit("holding", {"n": 1, "name": "keys"})
    second = await server.submit("counting", {"n": 1})
    page = await opened()
    await expect(row(page, second)).to_be_visible()

    async def tab_to(wanted: Locator) -> None:
        for _ in range(40):
            await page.keyboard.press("Tab")
            if await wanted.evaluate("element => element === document.activeElement"):
                outline = await wanted.evaluate("element => getComputedStyle(element).outlineStyle")
                assert outline != "none"  # the focus can be seen
                return
        raise AssertionError(f"the keyboard does not reach {wanted}")

    await tab_to(row(page, second))
    await page.keyboard.press("ArrowDown")
    await expect(row(page, first)).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_be_focused()
    cancel = page.locator(".head").get_by_role("button", name="Cancel job")
    await tab_to(cancel)
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await expect(cancel).to_be_focused()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1 .badge")).to_contain_text("aborted")
    await expect(page.locator("h1")).to_be_focused()  # its button is gone
    await expect(page.locator("#said")).to_contain_text("The job hold is aborted.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_passes_the_accessibility_checks(server: Server, opened: Open, scheme: str) -> None:
    failed = await server.submit("breaking", {"x": 1})
    running = await server.submit("holding", {"n": 2, "name": "axe"})
    page = await opened(color_scheme=scheme, reduced_motion="reduce")
    ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(245, 246, 249)", "dark": "rgb(14, 17, 22)"}[scheme]
    await expect(row(page, failed)).to_contain_text("error")
    await page.get_by_role("button", name="New job").click()
    # Colours are what differs in the dark; the rest need not be looked at twice.
    rules = ["color-contrast"] if scheme == "dark" else RULES
    await sound(page, rules)
    await page.get_by_role("dialog").get_by_role("button", name="Close").click()
    await page.get_by_text("Filter", exact=True).click()
    await expect(card(page, "Newest errors")).to_contain_text("ValueError")
    await sound(page, rules)
    await row(page, failed).click()
    await page.locator(".fault summary").click()
    await sound(page, rules)
    await row(page, running).click()
    await expect(node(page, "hold#2")).to_have_class("node call s1 active")
    await card(page, "Timeline").get_by_text("The same as a table").click()
    await sound(page, rules)
    await page.get_by_role("button", name="Cancel job").click()
    await sound(page, rules)


async def sound(page: Page, rules: list[str]) -> None:
    found = await Axe().run(page, options={"resultTypes": ["violations"], "runOnly": rules})
    assert not found.violations_count, found.generate_report()


async def test_a_small_screen_needs_no_sideways_scrolling(server: Server, opened: Open) -> None:
    gate("small").set()
    job_id = await server.submit("holding", [{"n": 3, "name": "small"}, {"n": 2, "name": "small"}])
    await server.submit("waiting", [{"x": x, "name": "queue"} for x in range(3)])
    failed = await server.submit("breaking", {"x": 1})
    page = await opened(viewport={"width": 360, "height": 640})
    # Nothing is cut: neither the page, nor tables, nor tiles.
    fits = """[document.documentElement, ...document.querySelectorAll(".scroll, .facts > div, .facts dd")].every(
        element => element.scrollWidth <= element.clientWidth)"""
    await expect(row(page, job_id)).to_be_visible()
    await expect(card(page, "Sites")).to_contain_text("2 wait for limit")
    await expect(card(page, "Newest errors")).to_contain_text("ValueError")
    assert await page.evaluate(fits)
    gate("queue").set()
    await row(page, job_id).click()
    await finished(page)
    await expect(node(page, "hold#2")).to_be_visible()
    await card(page, "Timeline").get_by_text("The same as a table").click()
    await expect(card(page, "Timeline").locator("tbody tr")).to_have_count(7)
    assert await page.evaluate(fits)
    newest = card(page, "Results").locator("tbody tr").first.locator("td")
    await expect(newest.nth(3)).to_be_hidden()
    shown = await newest.nth(1).evaluate("cell => getComputedStyle(cell, '::after').content")
    assert re.fullmatch(r'"lab · \d+"', shown), "what hidden columns have is in the others"
    await expect(row(page, job_id)).to_be_hidden()
    await page.get_by_role("link", name="All jobs").click()
    await row(page, failed).click()
    await page.locator(".fault summary").click()
    assert await page.evaluate(fits)
    await sound(page, ["wcag2a", "wcag21aa"])


async def test_animations_respect_reduced_motion(server: Server, opened: Open) -> None:
    job_id = await server.submit("holding", {"n": 1, "name": "still"})
    for motion, name in (("reduce", "none"), ("no-preference", "march")):
        page = await opened(job_id, reduced_motion=motion)
        shape = node(page, "hold#2").locator(".shape").first
        await expect(node(page, "hold#2")).to_have_class("node call s1 active")
        assert await shape.evaluate("element => getComputedStyle(element).animationName") == name
