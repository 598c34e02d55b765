"""Lists of jobs: filtered, page by page, with and without a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, JobInfo, JobStatus, LocalOptions, Pipeline, PlaceParam, Session, Yield
from dfm_async.errors import SessionClosed
from tests.conftest import Open
from tests.support.stores import execute_sql

fed = Federation("listed")
site = fed.site("site")


@site.operation
async def inverse(x: int) -> float:
    return 1 / x


def named(name: str) -> Pipeline:
    with Pipeline(name) as pipeline:
        Yield(inverse(PlaceParam("x")))
    return pipeline


PIPELINES = {name: named(name) for name in ("daily", "hourly")}
JOBS = {
    "a": ("daily", "ann", 1),
    "b": ("daily", "bob", 0),
    "c": ("hourly", "ann", 1),
    "d": ("hourly", None, 1),
    "e": ("daily", "ann", 0),
}
"""The pipeline, the label and the parameter of each job, in the order of submission. With 0, it fails."""

FILTERS: list[tuple[dict[str, Any], str]] = [
    ({}, "edcba"),
    ({"pipeline": "daily"}, "eba"),
    ({"label": "ann"}, "eca"),
    ({"label": "ann", "pipeline": "daily"}, "ea"),
    ({"label": "ann", "status": JobStatus.FAILED}, "e"),
    ({"status": JobStatus.FINISHED}, "dca"),
    ({"status": JobStatus.FAILED}, "eb"),
    ({"status": JobStatus.RUNNING}, ""),
    ({"pipeline": "weekly"}, ""),
    ({"label": ""}, ""),
    ({"search": "nn"}, "eca"),
    ({"search": "  DAILY b "}, "b"),
    ({"search": "hour ann", "status": JobStatus.FINISHED}, "c"),
    ({"search": "lyann"}, ""),
    ({"search": "d"}, "edba"),
    ({"search": "%"}, ""),
    ({"search": ""}, "edcba"),
    ({"label": "a\0\udc80"}, ""),
]


async def submit(session: Session) -> None:
    for job_id, (pipeline, label, x) in JOBS.items():
        job = await session.execute(PIPELINES[pipeline], {"x": x}, job_id=job_id, label=label)
        await job.wait_until_finished()


async def ids(found: AsyncIterator[JobInfo]) -> str:
    return "".join([info.job_id async for info in found])


@pytest.mark.parametrize(("wanted", "expected"), FILTERS, ids=str)
async def test_jobs_are_found_by_what_they_are(wanted: dict[str, Any], expected: str) -> None:
    for options in (LocalOptions(), LocalOptions(keep_finished=2)):
        async with Session(fed, target="inline", options=options) as session:
            await submit(session)
            assert await ids(session.find_jobs(**wanted)) == expected


async def test_jobs_of_a_store_are_found_in_the_session_that_ran_them_and_in_others(opens_inline: Open) -> None:
    async with opens_inline(options=LocalOptions(keep_finished=2, keep_summaries=1)) as first, opens_inline() as second:
        await submit(first)
        for session in (first, second):
            for wanted, expected in FILTERS:
                assert await ids(session.find_jobs(**wanted)) == expected
    async with opens_inline(options=LocalOptions(keep_summaries=0)) as later:
        for wanted, expected in FILTERS:
            assert await ids(later.find_jobs(**wanted)) == expected


async def test_jobs_are_found_by_the_time_of_their_submission(opens_inline: Open) -> None:
    async with opens_inline() as session:
        await submit(session)
        infos = {info.job_id: info async for info in session.find_jobs()}
        at = infos["c"].created
        assert await ids(session.find_jobs(since=at)) == "edc"
        assert await ids(session.find_jobs(until=at)) == "ba"
        assert await ids(session.find_jobs(since=infos["b"].created, until=at)) == "b"
        assert await ids(session.find_jobs(since=datetime.fromtimestamp(0, UTC))) == "edcba"
        assert await ids(session.find_jobs(until=datetime.fromtimestamp(0, UTC))) == ""
        for position in (infos["c"], (at, "c")):
            assert await ids(session.find_jobs(before=position)) == "ba"


async def test_a_status_that_does_not_exist_is_refused_with_those_that_do(opens_inline: Open) -> None:
    problem = r"status must be one of JobStatus.SUBMITTED, .*, not 'bogus'"
    async with opens_inline() as session:
        with pytest.raises(ValueError, match=problem):
            session.find_jobs(status="bogus")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=problem):
            await session.prune(0, "bogus")  # type: ignore[arg-type]


async def test_a_search_for_too_many_words_is_refused(opens_inline: Open) -> None:
    async with opens_inline() as session:
        assert await ids(session.find_jobs(search="d " * 16)) == ""
        with pytest.raises(ValueError, match="search must have at most 16 words, not 17"):
            session.find_jobs(search="d " * 17)


async def test_a_running_job_is_found_by_its_present_status(opens_inline: Open) -> None:
    async with opens_inline() as first, opens_inline() as second:
        job = await first.execute(PIPELINES["daily"], None, job_id="open")
        await job.send_input_params({"x": 1})
        await job.first()  # it is stored with everything before it
        for session in (first, second):
            assert await ids(session.find_jobs(status=JobStatus.RUNNING)) == "open"
            assert await ids(session.find_jobs(status=JobStatus.INTERRUPTED)) == ""
        await job.send_stop_frame()
        await job
        for session in (first, second):
            assert await ids(session.find_jobs(status=JobStatus.RUNNING)) == ""
            assert await ids(session.find_jobs(status=JobStatus.FINISHED)) == "open"


async def test_an_interrupted_job_is_found_as_such(opens_inline: Open) -> None:
    async with opens_inline() as session:
        await session.execute(PIPELINES["daily"], None, job_id="open")
    async with opens_inline() as session:
        assert await ids(session.find_jobs(status=JobStatus.INTERRUPTED)) == "open"
        assert await ids(session.find_jobs(status=JobStatus.RUNNING)) == ""


async def test_a_list_goes_on_behind_damaged_jobs(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline() as session:
        await submit(session)
    execute_sql(store_path, "UPDATE jobs SET created = 'soon' WHERE job_id = 'e'")
    execute_sql(store_path, "UPDATE jobs SET created = 1e300 WHERE job_id = 'b'")
    async with opens_inline() as session:
        found = [info async for info in session.find_jobs()]
        assert "".join(info.job_id for info in found) == "dcaeb"
        assert [info.status for info in found[3:]] == [JobStatus.UNKNOWN] * 2
        assert await ids(session.find_jobs(before=found[2])) == "eb"
        assert await ids(session.find_jobs(before=found[3])) == "b"


async def test_many_jobs_are_read_page_by_page(opens_inline: Open) -> None:
    async with opens_inline(options=LocalOptions(keep_summaries=10, keep_finished=5)) as session:
        for number in range(250):
            await (await session.execute(PIPELINES["daily"], {"x": 1}, job_id=f"{number:03}"))
        found = [info.job_id async for info in session.find_jobs()]
        assert found == [f"{number:03}" for number in range(249, -1, -1)]
        listed = session.find_jobs()
        await anext(listed)
        await listed.aclose()


async def test_a_file_without_names_and_labels_gets_them(opens_inline: Open, store_path: Path) -> None:
    async with opens_inline() as session:
        await submit(session)
    indexes = ("jobs_by_time", "jobs_by_pipeline", "jobs_by_label", "jobs_not_finished")
    execute_sql(store_path, *(f"DROP INDEX {name}" for name in indexes))
    execute_sql(store_path, *(f"ALTER TABLE jobs DROP COLUMN {name}" for name in ("pipeline", "label")))
    execute_sql(store_path, "UPDATE plans SET options = x'c1' WHERE job = (SELECT job FROM jobs WHERE job_id = 'c')")
    async with opens_inline() as session:
        assert await ids(session.find_jobs(pipeline="daily", label="ann")) == "ea"
        assert await ids(session.find_jobs(label="ann")) == "ea", "the options of c are damaged"
        assert await ids(session.find_jobs()) == "edcba"
        assert await session.execute(PIPELINES["daily"], {"x": 1}, job_id="f", label="ann")
        assert await ids(session.find_jobs(label="ann")) == "fea"


@pytest.mark.parametrize("wrong", [{"since": -1}, {"until": "today"}, {"since": float("nan")}], ids=str)
async def test_wrong_times_are_refused_at_once(wrong: dict[str, Any]) -> None:
    async with Session(fed, target="inline") as session:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a number"):
            session.find_jobs(**wrong)
    with pytest.raises(SessionClosed):
        session.find_jobs()
