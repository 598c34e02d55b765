"""Calls of one operation at every site that offers it: ``session.each``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dfm_async import Federation, JobAborted, JobStatus, OperationFailed, ParameterError, PipelineError
from dfm_async.errors import NotEnoughReplies
from dfm_async.runtime.context import current_context
from tests.conftest import Connect
from tests.support.sessions import LIMIT, SHORT
from tests.support.waiting import file_created, until

fed = Federation("broadcast")
archive, lab, desk = fed.site("archive"), fed.site("lab"), fed.site("desk")


@lab.operation
@archive.operation
def where(x: int) -> tuple[str, int]:
    return current_context().site, x


@lab.operation
@archive.operation
async def gated(folder: str) -> str:
    site = current_context().site
    (Path(folder) / f"{site}.began").touch()
    await file_created(Path(folder) / site)
    return site


@lab.operation
@archive.operation
def picky(bad: str) -> str:
    site = current_context().site
    if site == bad:
        raise ValueError("not here")
    return site


@lab.operation
@archive.operation
def fatal(bad: str) -> str:
    if current_context().site == bad:
        os._exit(3)
    return "alive"


async def test_every_site_that_offers_the_operation_replies(connect: Connect) -> None:
    async with connect(fed) as session:
        replies = [reply async for reply in session.each(where, 5)]
        assert sorted(reply.value for reply in replies) == [("archive", 5), ("lab", 5)]
        assert all(reply.value[0] == reply.site for reply in replies)
        assert len(session.jobs()) == 2


async def test_a_failure_is_a_reply(connect: Connect) -> None:
    async with connect(fed) as session:
        replies = {reply.site: reply async for reply in session.each(picky, "lab", at_least=1)}
        assert replies["archive"].value == "archive"
        assert isinstance(replies["lab"].error, OperationFailed)
        with pytest.raises(OperationFailed, match="not here"):
            _ = replies["lab"].value


async def test_too_few_replies_raise_after_all_have_come(connect: Connect) -> None:
    async with connect(fed) as session:
        seen = []
        with pytest.raises(NotEnoughReplies, match=r"1 of 2 calls succeeded, 2 needed:\n  - lab: ") as caught:
            async for reply in session.each(picky, "lab", at_least=2):
                seen.append(reply.site)
        assert sorted(seen) == ["archive", "lab"]
        assert len(caught.value.failures) == 1


async def test_sites_that_are_late_are_cancelled(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "archive").touch()
    async with asyncio.timeout(4 * LIMIT), connect(fed, options=SHORT) as session:
        assert len([reply async for reply in session.each(where, 1)]) == 2  # their workers run
        replies = {r.site: r async for r in session.each(gated, str(tmp_path), at_least=1, within=2)}
        assert replies["archive"].value == "archive"
        assert isinstance(replies["lab"].error, TimeoutError)
        assert str(replies["lab"].error) == "no reply of site 'lab' within 2 s"
        await until(lambda: [job.status for job in session.jobs()].count(JobStatus.ABORTED) == 1)


@pytest.mark.parametrize("target", ["local"])
async def test_a_lost_site_is_a_reply_with_an_error(connect: Connect) -> None:
    async with connect(fed) as session:
        replies = {reply.site: reply async for reply in session.each(fatal, "lab")}
        assert replies["archive"].value == "alive"
        assert isinstance(replies["lab"].error, JobAborted)


async def test_leaving_the_loop_of_each_cancels_the_other_calls(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "lab").touch()
    async with connect(fed, options=SHORT) as session:
        async for reply in session.each(gated, str(tmp_path)):
            assert reply.site == "lab"
            break
        await until(lambda: {job.status for job in session.jobs()} == {JobStatus.ABORTED, JobStatus.FINISHED})


async def test_a_cancelled_block_of_each_leaves_nothing_running(connect: Connect, tmp_path: Path) -> None:
    async with connect(fed, options=SHORT) as session:

        async def consume() -> None:
            async with session.each(gated, str(tmp_path)) as replies:
                async for _ in replies:
                    pass

        task = asyncio.create_task(consume())
        await file_created(tmp_path / "lab.began")
        await file_created(tmp_path / "archive.began")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [job.status for job in session.jobs()] == [JobStatus.ABORTED] * 2


async def test_late_replies_are_kept_for_the_next_round(connect: Connect, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
        (folder / "archive").touch()
    (second / "lab").touch()
    async with asyncio.timeout(4 * LIMIT), connect(fed, options=SHORT) as session:

        async def replies(folder: Path, at_least: int) -> list[tuple[str, bool]]:
            found = session.each(gated, str(folder), at_least=at_least, late="keep")
            return [(reply.value, reply.late) async for reply in found]

        assert await replies(first, 1) == [("archive", False)]  # it ends although the lab has not replied
        assert await replies(second, 1) == [("archive", False)]
        assert [path.name for path in second.glob("lab.*")] == []  # nor was it called again
        (first / "lab").touch()
        assert sorted(await replies(third, 2)) == [("archive", False), ("lab", True)]
        assert not list(third.glob("lab.*"))
        jobs = session.jobs()
        assert [job.status for job in jobs] == [JobStatus.FINISHED] * 4


async def test_unread_replies_come_first_in_the_next_round_and_sites_are_called_again(
    connect: Connect, tmp_path: Path
) -> None:
    async with asyncio.timeout(4 * LIMIT), connect(fed, options=SHORT) as session:
        async for _ in session.each(where, 1, late="keep"):
            break  # the other one is kept
        await until(lambda: [job.status for job in session.jobs()] == [JobStatus.FINISHED] * 2)
        replies = [reply async for reply in session.each(where, 2, late="keep")]
        assert [(reply.value[1], reply.late) for reply in replies] == [(1, True), (2, False), (2, False)]
        assert "late=True" in repr(replies[0])
        assert len([reply async for reply in session.each(where, 3, late="keep")]) == 2


async def test_a_round_that_keeps_late_replies_ends_after_its_time(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "archive").touch()
    async with asyncio.timeout(4 * LIMIT), connect(fed, options=SHORT) as session:
        assert len([reply async for reply in session.each(where, 1)]) == 2  # their workers run
        seen = []
        with pytest.raises(NotEnoughReplies, match="lab: no reply of site 'lab' within 1 s"):
            async for reply in session.each(gated, str(tmp_path), at_least=2, within=1, late="keep"):
                seen.append(reply.site)
        assert seen == ["archive"]
        late = session.jobs()[-1 if session.jobs()[-1].status is JobStatus.RUNNING else -2]
        assert late.status is JobStatus.RUNNING
    assert late.status is JobStatus.ABORTED  # it ends with the session


async def test_each_refuses_wrong_arguments(connect: Connect) -> None:
    other = Federation("other").site("lab")

    @other.operation
    def unknown(x: int) -> int:
        return x

    async with connect(fed) as session:
        with pytest.raises(TypeError, match="leave site= out"):
            session.each(where, 1, site=lab)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="missing a required argument"):
            session.each(where)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="at_least must be from 1 to 2"):
            session.each(where, 1, at_least=3)
        with pytest.raises(ValueError, match="within must be"):
            session.each(where, 1, within=0)
        with pytest.raises(ValueError, match='late must be "discard" or "keep", not \'later\''):
            session.each(where, 1, late="later")  # type: ignore[call-arg]
        with pytest.raises(PipelineError, match="no site offers operation 'unknown'"):
            session.each(unknown, 1)
        with pytest.raises(ParameterError, match="parameter 'x'"):
            async for _ in session.each(where, "one"):  # type: ignore[call-overload]
                pass
        with pytest.raises(ParameterError, match="parameter 'x'"):
            async for _ in session.each(where, "one", late="keep"):  # type: ignore[call-arg,arg-type]
                pass
        assert len([reply async for reply in session.each(where, 1, late="keep")]) == 2
