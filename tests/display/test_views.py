"""What notebooks show: everything that matters, nothing that is not escaped."""

from __future__ import annotations

import asyncio
import io
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from dfm_async import (
    Failure,
    Federation,
    ForEach,
    Job,
    JobFailed,
    JobStatus,
    OperationFailed,
    Pipeline,
    PipelineError,
    PlaceParam,
    Result,
    ResultLimits,
    Results,
    Session,
    WorkerLost,
    Yield,
)
from dfm_async.base.rendering import Shown
from dfm_async.display import job_view
from dfm_async.display.job_view import JobView
from dfm_async.display.renderer import _html
from dfm_async.errors import DfmError, Problem, ResultsUnread
from dfm_async.testing import Gate
from tests.support.pipelines import pipeline_of

fed = Federation("weather <i>", api_version="2.1.0")
archive = fed.site("archive")
lab = fed.site("lab", workers=3)

EVIL = "</pre></details><script>alert(1)</script>"


@archive.operation
async def load(count: int) -> list[int]:
    """Reads the temperatures <of> a day.

    And more.
    """
    return list(range(count))


@lab.operation(in_process=True, provider="fine")
def reciprocal(value: int) -> float:
    if value == 0:
        raise ValueError(EVIL)
    return 1 / value


@lab.operation
async def held(gate: Gate) -> int:
    await gate.arrive()
    return 1


with Pipeline("reciprocals") as reciprocals:
    with ForEach(load(PlaceParam("count"))) as element:
        Yield(reciprocal(element), place="found")

with Pipeline("many") as many:
    with ForEach(load(PlaceParam("count"))) as one:
        Yield(one, place="one")

waits = pipeline_of(held, "gate")


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with Session(fed, target="inline") as session:
        yield session


class Page(HTMLParser):
    """Reads a part of a page; everything that it opens must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(thing: Shown) -> Page:
    found = Page(thing._repr_html_())
    assert "script" not in found.tags
    return found


def result(value: Any, offset: int = 0) -> Result:
    return Result(offset, "found", value, (0, 1), "lab", "reciprocal#1")


def everything_that_shows_itself(kind: type[Shown] = Shown) -> Iterator[type[Shown]]:
    for found in kind.__subclasses__():
        yield found
        yield from everything_that_shows_itself(found)


def test_every_displayed_type_has_a_view() -> None:
    kinds = list(everything_that_shows_itself())
    assert {Pipeline, Federation, Job, Result, Results, Failure, DfmError} <= set(kinds)
    assert [kind for kind in kinds if _html.dispatch(kind) is _html.dispatch(object)] == []


# what is planned


def test_a_federation_shows_its_sites_workers_and_operations() -> None:
    found = page(fed)
    assert found.text.startswith("Federation weather <i> 2.1.0 site workers operations")
    assert "archive as many as cores load (count: int) -> list[int] Reads the temperatures <of> a day." in found.text
    assert "lab 3 reciprocal (value: int) -> float provider fine; in a process of its own" in found.text
    assert "And more" not in found.text


def test_an_empty_federation_is_shown_as_empty() -> None:
    assert "no sites yet" in page(Federation("nothing")).text


def test_a_pipeline_shows_its_drawing_and_its_text() -> None:
    found = page(reciprocals)
    assert found.tags.count("svg") == 1
    assert "Yield(n2, place='found')" in found.text
    assert reciprocals.to_svg() in reciprocals._repr_html_()


def test_drawing_that_is_too_large_is_left_out() -> None:
    with Pipeline("large") as large:
        for _ in range(401):
            load(1)
    found = page(large)
    assert "svg" not in found.tags
    assert "401 nodes are too many" in found.text


async def test_plan_shows_where_nodes_run_and_why(session: Session) -> None:
    plan = await session.prepare(reciprocals)
    for shown in (page(plan), page(plan.explain())):
        assert shown.tags.count("svg") == 1
        assert "load#0 archive the only site that offers it" in shown.text
    assert "details" in page(plan).tags
    assert "details" not in page(plan.explain()).tags


# results


def test_results_behave_like_a_list() -> None:
    results = Results([result(1), result(2)])
    assert results == [result(1), result(2)]
    assert repr(results) == repr([result(1), result(2)])
    assert type(results[:1]) is Results
    assert results[1] == result(2)
    assert [*results, *results[1:]] == [result(1), result(2), result(2)]
    again = pickle.loads(pickle.dumps(results))
    assert (type(again), again) == (Results, results)


def test_results_show_themselves_as_a_table() -> None:
    found = page(Results([result("a<b", 7), result([1] * 100, 8)]))
    assert found.text.startswith("offset place frame site node value 7 found 0.1 lab reciprocal#1 'a<b' 8 found")
    assert len(found.text) < 300


def test_long_results_show_the_first_and_count_the_others() -> None:
    found = page(Results(result(i, i) for i in range(1234)))
    assert found.tags.count("tr") == 51
    assert found.text.endswith("and 1,184 more")


def test_empty_results_are_shown_as_none() -> None:
    assert page(Results()).text == "no results"


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def _repr_html_(self) -> str:
        raise RuntimeError("no")


class Polite:
    def _repr_html_(self) -> str:
        return "<b>polite</b>"


def test_result_shows_the_view_of_its_value() -> None:
    assert page(result(1)).tags.count("b") == 1
    assert page(result(Polite())).tags.count("b") == 2
    assert "at lab, frame 0.1, offset 0" in page(result(Polite())).text


@pytest.mark.parametrize("value", [Rude(), [Rude()], Rude, EVIL, {EVIL: EVIL}, "x" * 10_000_000])
def test_value_with_a_failing_repr_is_shown(value: Any) -> None:
    assert len(page(result(value)).text) < 600
    assert len(page(Results([result(value)])).text) < 600


# errors


def failed() -> OperationFailed:
    return OperationFailed("lab", "reciprocal", "reciprocal#1", (2,), 2, "ValueError", EVIL, f"Traceback:\n  {EVIL}\n")


def test_an_error_folds_its_remote_traceback() -> None:
    found = page(failed())
    assert found.tags.count("details") == 1
    assert f"OperationFailed ValueError: {EVIL} reciprocal#1 at lab, frame 2, attempt 2" in found.text
    assert found.text.endswith(f"Traceback: {EVIL}")


def test_a_failed_job_shows_its_first_errors_and_counts_the_others() -> None:
    found = page(JobFailed("j1", [failed()] * 8, 30))
    assert found.tags.count("details") == 5
    assert found.text.endswith("and 25 more")


def test_problems_of_a_pipeline_are_a_table() -> None:
    found = page(PipelineError("p", [Problem("load#0", "is <wrong>"), Problem("", "is empty")]))
    assert found.text == "PipelineError p statement problem load#0 is <wrong> is empty"


def test_lost_worker_folds_its_output() -> None:
    assert "details" in page(WorkerLost("lab", -9, lines=["one", EVIL])).tags
    assert page(WorkerLost("lab", -9)).text == "WorkerLost a worker of site 'lab' was killed by SIGKILL"


def test_other_errors_are_their_text() -> None:
    assert page(DfmError("a <b>")).text == "DfmError a <b>"


@pytest.mark.parametrize(("place", "word"), [(None, "failed"), ("found", "no result for found")])
def test_failure_shows_its_place_and_frame(place: str | None, word: str) -> None:
    shown = page(Failure(3, place, failed(), (2,), "lab", "reciprocal#1"))
    assert shown.text.startswith(f"{word} reciprocal#1 at lab, frame 2, offset 3 OperationFailed")


# jobs


async def test_a_job_shows_its_state_progress_errors_and_newest_results(session: Session) -> None:
    job = await session.execute(reciprocals, [{"count": 3}, {"count": 9}], job_id="j <1>")
    await job.wait_until_finished()
    found = page(job)
    assert "Job j <1> of reciprocals failed" in found.text
    assert "2 errors" in found.text
    assert found.tags.count("details") == 2
    # Threads are served in no particular order.
    assert {shown.value for shown in job.latest(2)} < {1 / number for number in range(1, 9)}
    assert page(await session.reattach("other")).text == "Job other unknown"


async def test_running_job_shows_its_progress(session: Session) -> None:
    with Gate() as gate:
        job = await session.execute(waits, [{"gate": gate}] * 2)
        await gate.arrived(2)
        assert "running 0 of 2 parameter sets" in page(job).text
        assert "progress" in page(job).tags
    await job
    assert "finished 2 of 2 parameter sets" in page(job).text


async def test_newest_results_stay_unread(session: Session) -> None:
    job = await session.execute(many, {"count": 200}, options=ResultLimits(max_items=50))
    async for info in job.changes(interval=0):
        if info.events >= 40:
            break
    assert len(job.latest(1000)) >= 39
    assert [found.value async for found in job] == list(range(200))


# changes


async def test_changes_begin_with_what_is_known_and_end_with_the_end(session: Session) -> None:
    with Gate() as gate:
        job = await session.execute(waits, [{"gate": gate}] * 2)
        await gate.arrived(2)
        changes = job.changes(interval=0)
        first = await anext(changes)
        assert (first.status, first.done) == (JobStatus.RUNNING, 0)
    infos = [info async for info in changes]
    assert (infos[-1].status, infos[-1].done) == (JobStatus.FINISHED, 2)
    assert [info async for info in job.changes()] == [infos[-1]]
    assert [info async for info in changes] == []


async def test_changes_are_coalesced_and_the_end_is_immediate(session: Session) -> None:
    job = await session.execute(many, [{"count": 5}] * 20)
    async with asyncio.timeout(30):
        infos = [info async for info in job.changes(interval=3600)]
    assert infos[-1].status is JobStatus.FINISHED
    assert len(infos) <= 2


async def test_waiting_for_a_change_can_be_cancelled(session: Session) -> None:
    with Gate() as gate:
        job = await session.execute(waits, {"gate": gate})
        await gate.arrived()
        changes = job.changes()
        await anext(changes)
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await job is JobStatus.FINISHED


# jobs while they run, in a terminal


@pytest.mark.parametrize("watch", [False, True])
async def test_in_a_terminal_a_job_is_shown_as_lines(
    session: Session, capsys: pytest.CaptureFixture[str], watch: bool
) -> None:
    job = await session.execute(many, [{"count": 2}] * 3, job_id="shown", watch=watch)
    await job.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("job shown finished: 3 of 3 parameter sets, ")
    assert len(lines) <= 3
    assert [found.value async for found in job] == [0, 1] * 3


async def test_showing_a_job_that_fails_does_not_raise(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    job = await session.execute(reciprocals, {"count": 1}, watch=True)
    await job.show()
    assert "failed: " in capsys.readouterr().out.splitlines()[-1]


async def test_showing_a_job_with_unread_results_raises(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    job = await session.execute(many, {"count": 100}, options=ResultLimits(max_items=10, window=4), watch=True)
    with pytest.raises(ResultsUnread):
        await job.show()
    assert "running" in capsys.readouterr().out
    assert len([found async for found in job]) == 100


class Counted:
    interval = 3600.0

    def __init__(self) -> None:
        self.lines: list[str] = []

    def paint(self, view: JobView) -> None:
        self.lines.append(view.line())


async def test_updates_are_coalesced_and_the_end_is_immediate(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    surface = Counted()
    monkeypatch.setattr(job_view, "_surface", lambda: surface)
    job = await session.execute(many, [{"count": 5}] * 50, watch=True)
    await asyncio.wait_for(job.show(), 30)
    assert len(surface.lines) <= 2
    assert "finished: 50 of 50 parameter sets" in surface.lines[-1]


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


async def test_cancelling_the_view_leaves_the_job_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with Gate() as gate:
        job = await session.execute(waits, {"gate": gate}, watch=True)
        await gate.arrived()
        before = asyncio.all_tasks()
        monkeypatch.setattr(sys, "stdout", terminal)
        view = asyncio.ensure_future(job.show())
        await terminal.written.wait()
        view.cancel()
        with pytest.raises(asyncio.CancelledError):
            await view
        assert asyncio.all_tasks() == before
        assert job.status is JobStatus.RUNNING
    assert await job is JobStatus.FINISHED


def test_views_are_loaded_on_use_and_ipython_never() -> None:
    program = (
        "import sys; from dfm_async import Federation, Pipeline, Session;"
        "print([name for name in sys.modules if name.startswith(('dfm_async.display', 'dfm_async.drawing'))]);"
        "assert Federation('f')._repr_html_();"
        "print('IPython' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
