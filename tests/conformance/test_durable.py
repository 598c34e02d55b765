"""Jobs that are written down: read later, by others, and gone on with."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async import (
    DfmError,
    Failure,
    Federation,
    JobAborted,
    JobFailed,
    JobNotFound,
    JobStatus,
    LocalOptions,
    ParameterError,
    Pipeline,
    PipelineError,
    PlaceParam,
    Result,
    ResultLimits,
    Session,
    SessionClosed,
    StatusChanged,
    Yield,
)
from dfm_async.errors import DecodingError, JobInterrupted, JobOwned, QueueFull
from dfm_async.events import FrameCompleted
from dfm_async.session import steering
from dfm_async.session.durable import SessionJobs
from dfm_async.session.steering import OwnedJobs, RemoteSteering
from dfm_async.store import open_store
from dfm_async.wire.codec import Codec
from tests.conftest import Open, TargetName
from tests.store.helpers import sql
from tests.support.pipelines import pipeline_of, yielding
from tests.support.postgres import PostgresServer
from tests.support.stored import counts, fed, site, square, squares, waits
from tests.wire.shapes import SAMPLES, same


@pytest.fixture(params=["inline", "local", "inline-postgres"])
def place(request: pytest.FixtureRequest) -> str:
    """The target, and the database of the store if it is not SQLite. Jobs on FLARE live there, and need no store."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def target(place: str) -> TargetName:
    return "local" if place == "local" else "inline"


@pytest.fixture
def store_url(place: str, store_path: Path, request: pytest.FixtureRequest) -> str:
    if "postgres" not in place:
        return f"sqlite:///{store_path}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.new_database())


@site.operation
async def fail_for(n: int) -> int:
    if n % 2:
        raise ValueError(f"{n} is odd")
    return n


@site.operation
async def unstorable() -> Any:
    return re.compile("a")  # only pickle knows how


@site.operation
async def passed_on(x: Any) -> Any:
    return x


passes = pipeline_of(passed_on, "x")
fails = pipeline_of(fail_for, "n")

with Pipeline("strange") as strange:
    Yield(unstorable(), place="bad")
    Yield(square(3), place="good")


async def test_a_finished_job_is_read_in_another_session_from_any_offset(opens: Open) -> None:
    async with opens() as session:
        job = await session.execute(squares, [{"n": n} for n in range(20)], job_id="squares")
        assert await job is JobStatus.FINISHED
        events = [event async for event in job.events()]
    async with opens() as session:
        assert [(job.job_id, job.status) for job in session.jobs()] == [("squares", JobStatus.FINISHED)]
        again = await session.reattach("squares")
        assert await again is JobStatus.FINISHED
        assert [event async for event in again.events()] == events
        for after in range(-1, len(events)):
            assert [event async for event in again.events(after=after)] == events[after + 1 :]
        ordered = [r.value async for r in again.results(ordered=True)]
        assert ordered == [n * n for n in range(20)]
        middle = [r.value async for r in again.results(ordered=True, after=events[len(events) // 2].offset)]
        assert sorted(middle) == sorted(e.value for e in events[len(events) // 2 + 1 :] if isinstance(e, Result))


async def test_same_id_and_content_is_the_same_job_after_a_restart(opens: Open) -> None:
    async with opens() as session:
        await (await session.execute(squares, {"n": 4}, job_id="four"))
    async with opens() as session:
        job = await session.execute(squares, {"n": 4}, job_id="four")
        assert job.status is JobStatus.FINISHED
        assert [r.value for r in await job.collect()] == [16]
        with pytest.raises(ParameterError, match="already exists with different content"):
            await session.execute(squares, {"n": 5}, job_id="four")


async def interrupted(opens: Open, folder: Path) -> list[int]:
    """Leaves a job of ten parameter sets behind of which three are done; tells which."""
    async with opens() as session:
        rows = [{"folder": str(folder), "n": n} for n in range(10)]
        job = await session.execute(waits, rows, job_id="long")
        done: list[int] = []
        async for event in job.events():
            if isinstance(event, FrameCompleted):
                done.append(event.frame[0])
                if len(done) == 3:
                    break
    assert job.status is JobStatus.INTERRUPTED
    return done


async def test_closed_session_interrupts_jobs_and_another_resumes_them(opens: Open, tmp_path: Path) -> None:
    done = await interrupted(opens, tmp_path)
    assert sorted(done) == [0, 1, 2]
    (tmp_path / "runs").unlink()
    (tmp_path / "open").touch()
    async with opens() as session:
        (job,) = session.jobs()
        assert job.status is JobStatus.INTERRUPTED
        with pytest.raises(JobInterrupted, match="resume"):
            await job
        with pytest.raises(JobInterrupted):
            await job.collect()
        job = await session.resume("long")
        assert sorted(r.value for r in await job.collect()) == list(range(10))
        assert job.status is JobStatus.FINISHED
        events = [event async for event in job.events()]
        assert [event.offset for event in events] == list(range(len(events)))
        assert Counter(e.frame for e in events if isinstance(e, FrameCompleted)) == {(n,): 1 for n in range(10)}
        story = [e.status for e in events if isinstance(e, StatusChanged)]
        assert story == [JobStatus.RUNNING, JobStatus.INTERRUPTED, JobStatus.RUNNING, JobStatus.FINISHED]
    assert sorted(map(int, (tmp_path / "runs").read_text().split())) == list(range(3, 10))


async def test_an_interrupted_job_can_be_aborted(opens: Open, tmp_path: Path) -> None:
    await interrupted(opens, tmp_path)
    async with opens() as session:
        job = await session.reattach("long")
        assert await job.cancel("not wanted") == {}
        assert job.status is JobStatus.ABORTED
        with pytest.raises(DfmError, match="only interrupted"):
            await session.resume("long")
    async with opens() as session:
        with pytest.raises(JobAborted, match="not wanted"):
            await (await session.reattach("long"))


async def test_a_job_that_was_open_stays_open_when_it_is_resumed(opens: Open) -> None:
    async with opens() as session:
        job = await session.execute(squares, None, autostop=False, job_id="open")
        await job.send_input_params([{"n": 1}, {"n": 2}])
        async with job.results() as results:
            assert sorted([(await anext(results)).value, (await anext(results)).value]) == [1, 4]
    async with opens() as session:
        job = await session.resume("open")
        await job.send_input_params({"n": 3})
        await job.send_stop_frame()
        results_now = await job.collect()
        assert sorted((r.frame, r.value) for r in results_now) == [((0,), 1), ((1,), 4), ((2,), 9)]


async def test_a_job_is_created_as_a_whole_or_not_at_all(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opens() as session:
        store = session._durable.store  # type: ignore[union-attr]
        create, seen = store.create, []

        async def create_and_look(job: Any) -> bool:
            created = await create(job)
            seen.append(await store.find(job.job_id))  # what another process would find, if this one died now
            return created

        monkeypatch.setattr(store, "create", create_and_look)
        assert await (await session.execute(squares, [{"n": n} for n in range(5)])) is JobStatus.FINISHED
        await session.execute(squares, {"n": 1}, autostop=False)
        await session.execute(squares, None)
    assert [(job.frames, job.stopped) for job in seen if job is not None] == [(5, True), (1, False), (0, False)]


async def test_job_that_is_being_created_is_found_whole(opens: Open) -> None:
    async with opens() as session:
        submitting = asyncio.create_task(session.execute(squares, {"n": 3}, job_id="one"))
        found: list[Any] = []
        while not submitting.done():
            found += [await session.reattach("one"), *await session.refresh_jobs()]
        for job in found:
            if job.was_found:
                assert [r.value for r in await job.collect()] == [9]
        assert any(job.was_found for job in found)


async def test_a_job_that_was_refused_after_its_creation_is_not_kept(opens: Open) -> None:
    async with opens() as session:
        with pytest.raises(ValueError, match="no place 'nowhere'"):
            await session.execute(squares, {"n": 1}, job_id="one", place_callbacks={"nowhere": print})
        assert await session.refresh_jobs() == []
        assert await (await session.execute(squares, {"n": 2}, job_id="one")) is JobStatus.FINISHED


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 50])
async def test_a_job_whose_submission_was_cancelled_is_not_kept(opens: Open, turns: int) -> None:
    async with opens() as session:
        submitting = asyncio.create_task(session.execute(squares, {"n": 1}, job_id="one"))
        for _ in range(turns):
            await asyncio.sleep(0)
        submitting.cancel()
        try:
            await submitting
        except asyncio.CancelledError:
            assert await session.refresh_jobs() == []
        else:
            assert [job.job_id for job in await session.refresh_jobs()] == ["one"]


async def test_cancelled_submission_does_not_affect_an_existing_job(opens: Open) -> None:
    async with opens() as session:
        await (await session.execute(squares, {"n": 1}, job_id="one"))
    async with opens() as session:
        session._jobs.forget("one")  # as if another process had made it
        submitting = asyncio.create_task(session.execute(squares, {"n": 1}, job_id="one"))
        await asyncio.sleep(0)
        submitting.cancel()
        await asyncio.wait([submitting])
        assert [job.job_id for job in await session.refresh_jobs()] == ["one"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 50])
async def test_a_session_that_is_closed_keeps_a_job_or_refuses_it(opens: Open, turns: int) -> None:
    async def nothing(*_: object) -> None: ...

    async with opens() as session:
        submitting = [
            asyncio.create_task(session.execute(squares, {"n": 1}, job_id="plain")),
            asyncio.create_task(session.execute(squares, {"n": 1}, job_id="called", default_callback=nothing)),
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
    kept = set()
    for task in submitting:
        try:
            kept.add((await task).job_id)
            assert (await task).status.ended
        except SessionClosed:
            pass
    async with opens() as session:
        assert {job.job_id for job in session.jobs()} == kept
        for job in session.jobs():
            if job.status is JobStatus.INTERRUPTED:
                job = await session.resume(job.job_id)
            assert [r.value for r in await job.collect()] == [1]


async def test_failures_are_written_too(opens: Open) -> None:
    async with opens() as session:
        job = await session.execute(fails, [{"n": n} for n in range(4)], job_id="odd")
        with pytest.raises(JobFailed):
            await job
        events = [event async for event in job.events()]
    async with opens() as session:
        again = await session.reattach("odd")
        with pytest.raises(JobFailed) as caught:
            await again
        assert caught.value.count == 2
        assert sorted(str(error).splitlines()[0] for error in caught.value.errors) == sorted(
            str(e.error).splitlines()[0] for e in events if isinstance(e, Failure) and e.place is None
        )
        assert [type(e) for e in events] == [type(e) async for e in again.events()]
        good = [r.value async for r in again.results(errors="yield") if isinstance(r, Result)]
        assert sorted(good) == [0, 2]


async def test_unstorable_result_is_an_error_of_its_node(opens: Open) -> None:
    async with opens() as session:
        job = await session.execute(strange)
        with pytest.raises(JobFailed, match="cannot be written to a store: stores do not hold pickled values"):
            await job
        assert [getattr(r, "value", r) async for r in job.results("good", errors="yield")] == [9]


async def test_stored_values_are_read_as_what_they_were(opens: Open) -> None:
    async with opens() as session:
        job = await session.execute(passes, [{"x": value} for value in SAMPLES], job_id="x")
        assert await job is JobStatus.FINISHED
    async with opens() as session:
        again = await session.execute(passes, [{"x": value} for value in SAMPLES], job_id="x")
        found = [result.value async for result in again.results(ordered=True)]
    assert len(found) == len(SAMPLES)
    assert [(value, read) for value, read in zip(SAMPLES, found, strict=True) if not same(value, read)] == []


async def test_a_parameter_that_cannot_be_stored_is_refused(opens: Open) -> None:
    anything = yielding(lambda: PlaceParam("x"))
    async with opens() as session:
        with pytest.raises(ParameterError, match="cannot be written to a store: stores do not hold pickled values"):
            await session.execute(anything, {"x": re.compile("a")})
        assert session.jobs() == []


async def test_spilling_log_lets_an_unread_job_finish(opens: Open) -> None:
    limits = ResultLimits(max_items=100, window=50, overflow="spill")
    async with opens() as session:
        job = await session.execute(counts, {"n": 2000}, options=limits)
        assert await job is JobStatus.FINISHED
        assert session.stats().results <= 200
        async with job.results() as slow, job.results() as fast:
            for n in range(2000):
                assert (await anext(fast)).value == n
            assert [r.value async for r in slow] == list(range(2000))


async def test_overflowing_log_fails_only_its_job_and_is_stored(opens: Open, tmp_path: Path) -> None:
    limits = ResultLimits(max_items=20, window=10, overflow="fail")
    async with opens() as session:
        other = await session.execute(waits, {"folder": str(tmp_path), "n": 5})
        job = await session.execute(counts, {"n": 5000}, options=limits, job_id="much")
        async with job.events() as unread:
            unread.attach()
            with pytest.raises(JobFailed, match="nobody has read"):
                await job
            events = [event async for event in unread]
        (tmp_path / "open").touch()
        assert await other is JobStatus.FINISHED
    async with opens() as session:
        again = await session.reattach("much")
        assert again.status is JobStatus.FAILED
        assert [(type(e), e.offset) async for e in again.events()] == [(type(e), e.offset) for e in events]


async def test_spilling_needs_a_store(target: TargetName) -> None:
    async with Session(fed, target=target) as session:
        with pytest.raises(ValueError, match="needs a store"):
            await session.execute(counts, {"n": 1}, options=ResultLimits(overflow="spill"))


async def test_second_session_follows_a_job_without_owning_it(opens: Open, tmp_path: Path) -> None:
    async with opens() as first, opens() as second:
        rows = [{"folder": str(tmp_path), "n": n} for n in range(6)]
        job = await first.execute(waits, rows, job_id="shared")
        other = await second.reattach("shared")
        assert other.was_found
        async with other.results() as results:
            assert sorted([(await anext(results)).value for _ in range(3)]) == [0, 1, 2]
            assert other.status is JobStatus.RUNNING
            with pytest.raises(JobOwned):
                await second.resume("shared")
            (tmp_path / "open").touch()
            assert sorted([r.value async for r in results]) == [3, 4, 5]
        assert await other is JobStatus.FINISHED
        assert await job is JobStatus.FINISHED


async def test_follower_is_notified_when_the_owner_closes(opens: Open, tmp_path: Path) -> None:
    async with opens() as second:
        async with opens() as first:
            job = await first.execute(waits, [{"folder": str(tmp_path), "n": n} for n in (1, 5)], job_id="shared")
            assert (await job.first()).value == 1
            other = await second.reattach("shared")
            waiting = asyncio.create_task(other.collect())
            await asyncio.sleep(0)
        with pytest.raises(JobInterrupted):
            await waiting
        (tmp_path / "open").touch()
        mine = await second.resume("shared")
        assert sorted(r.value for r in await mine.collect()) == [1, 5]


async def test_jobs_of_other_sessions_are_listed_after_a_refresh(opens: Open) -> None:
    async with opens() as first, opens() as second:
        await (await first.execute(squares, {"n": 1}, job_id="new"))
        assert second.jobs() == []
        assert [(j.job_id, j.status) for j in await second.refresh_jobs()] == [("new", JobStatus.FINISHED)]


async def test_a_federation_without_the_operation_cannot_resume(opens: Open, tmp_path: Path) -> None:
    await interrupted(opens, tmp_path)
    poor = Federation("stored")
    poor.site("site")
    async with opens(poor) as session:
        with pytest.raises(PipelineError, match="has no 'wait_for' at site 'site'"):
            await session.resume("long")
    other = Federation("stored")

    async def wait_for(folder: str, number: int) -> int:
        return number

    other.site("site").operation(wait_for)
    async with opens(other) as session:
        with pytest.raises(PipelineError, match="'wait_for' has changed since the plan was made: parameter 'number'"):
            await session.resume("long")
    async with opens() as session:
        assert (await session.reattach("long")).status is JobStatus.INTERRUPTED
        with pytest.raises(JobNotFound):
            await session.resume("nobody")


async def test_a_job_that_could_not_be_submitted_is_not_kept(opens: Open, tmp_path: Path) -> None:
    options = LocalOptions(max_concurrent_jobs=1, queue_limit=1, queue_overflow="fail")
    async with opens(target="local", options=options) as session:
        rows = {"folder": str(tmp_path), "n": 9}
        await session.execute(waits, rows, job_id="one")
        await session.execute(waits, rows, job_id="two")
        with pytest.raises(QueueFull):
            await session.execute(waits, rows, job_id="three")
        assert [job.job_id for job in await session.refresh_jobs()] == ["one", "two"]


async def test_only_a_session_with_a_store_resumes(target: TargetName) -> None:
    async with Session(fed, target=target) as session:
        with pytest.raises(DfmError, match="with a store"):
            await session.resume("any")


async def test_a_stored_value_that_cannot_be_rebuilt_is_an_error_of_the_reader(opens: Open, tmp_path: Path) -> None:
    (tmp_path / "strange_points.py").write_text(
        "import dataclasses\n\n@dataclasses.dataclass\nclass Point:\n    x: int\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        points = Federation("points")

        @points.site("site").operation
        async def make(x: int) -> Any:
            from strange_points import Point  # type: ignore[import-not-found]

            return Point(x)

        pipeline = pipeline_of(make, "x")
        async with opens(points) as session:
            job = await session.execute(pipeline, {"x": 1}, job_id="point")
            assert [r.value.x for r in await job.collect()] == [1]
        sys.modules.pop("strange_points")
        async with opens(points) as session:
            again = await session.reattach("point")
            with pytest.raises(DecodingError, match="'strange_points' is not loaded"):
                await again.collect()
            failures = [event async for event in again.results(errors="yield")]
            assert [type(event) for event in failures] == [Failure]
            import strange_points

            assert [r.value for r in await again.collect()] == [strange_points.Point(1)]
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("strange_points", None)


async def test_listed_jobs_of_another_session_are_followed_too(opens: Open, tmp_path: Path) -> None:
    async with opens() as first:
        job = await first.execute(waits, [{"folder": str(tmp_path), "n": n} for n in (1, 5)], job_id="shared")
        async with opens() as second:
            (listed,) = second.jobs()
            assert not listed.status.ended
            waiting = asyncio.create_task(listed.collect())
            await asyncio.sleep(0)
            (tmp_path / "open").touch()
            assert sorted(r.value for r in await waiting) == [1, 5]
            assert await listed is JobStatus.FINISHED
        assert await job is JobStatus.FINISHED


async def test_a_job_of_another_session_takes_parameter_sets(opens: Open, tmp_path: Path) -> None:
    async with opens() as first, opens() as second:
        (tmp_path / "open").touch()
        job = await first.execute(waits, None, autostop=False, job_id="shared")
        other = await second.reattach("shared")
        assert other.info().accepts
        with pytest.raises(ParameterError, match="unknown parameter 'm'"):
            await other.send_input_params({"m": 1})
        await other.send_input_params([{"folder": str(tmp_path), "n": n} for n in range(100)])
        assert job.info().sets == 100
        await asyncio.gather(*(other.send_input_params({"folder": str(tmp_path), "n": n}) for n in range(100, 110)))
        await other.send_stop_frame()
        assert not job.info().accepts
        with pytest.raises(ParameterError, match="takes no further parameter sets"):
            await other.send_input_params({"folder": str(tmp_path), "n": 1})
        assert sorted(r.value for r in await other.collect()) == list(range(110))
        await other.send_stop_frame()
        assert await other.cancel() == {}
        with pytest.raises(ParameterError, match="takes no further parameter sets"):
            await other.send_input_params({"folder": str(tmp_path), "n": 1})


async def test_a_job_of_another_session_is_cancelled(opens: Open, tmp_path: Path) -> None:
    async with opens() as first, opens() as second:
        job = await first.execute(waits, [{"folder": str(tmp_path), "n": n} for n in (1, 9)], job_id="shared")
        assert (await job.first()).value == 1
        other = await second.reattach("shared")
        outcomes = await other.cancel("enough")
        assert job.status is other.status is JobStatus.ABORTED
        assert set(outcomes.values()) <= {"stopped", "stopped after grace"}
        assert "site" in outcomes
        with pytest.raises(JobAborted, match="enough"):
            await other


async def test_a_job_that_is_resumed_while_it_is_cancelled_is_stopped(
    opens: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opens() as first:
        job = await first.execute(waits, [{"folder": str(tmp_path), "n": n} for n in (1, 9)], job_id="shared")
        assert (await job.first()).value == 1
    async with opens() as second:
        job = await second.reattach("shared")

        async def interrupted(*_: object) -> dict[str, str]:
            monkeypatch.undo()
            await second.resume("shared")
            raise JobInterrupted("shared", "its owner has ended")

        monkeypatch.setattr(RemoteSteering, "cancel", interrupted)
        await job.cancel("enough")
        assert job.status is JobStatus.ABORTED
        assert second.stats().running == 0
        events = [event async for event in job.events()]
        assert isinstance(events[-1], StatusChanged)
        assert events[-1].status is JobStatus.ABORTED


async def test_cancelling_does_not_wait_behind_parameter_sets_that_have_no_room(opens: Open, tmp_path: Path) -> None:
    async with opens() as first, opens() as second:
        await first.execute(waits, None, autostop=False, concurrency=2, job_id="shared")
        other = await second.reattach("shared")
        rows = [{"folder": str(tmp_path), "n": n} for n in range(5, 205)]
        sending = asyncio.create_task(other.send_input_params(rows))
        while (other.info().sets or 0) < 64:  # the first part is taken, the second waits for room
            await anext(aiter(other.changes(0)))
            await second.reattach("shared")
        await other.cancel()
        with pytest.raises(ParameterError, match="takes no further parameter sets"):
            await sending


async def test_requests_whose_sender_is_gone_are_carried_out_by_the_next_owner(
    opens: Open, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").touch()
    rows = [{"folder": str(tmp_path), "n": n} for n in range(3)]
    async with opens() as first:
        await first.execute(waits, None, autostop=False, job_id="shared")
        monkeypatch.setattr(OwnedJobs, "_begin", lambda *_: None)  # it dies before it carries anything out
        codec = Codec.for_store()
        data = [codec.dumps({name: codec.pack(value) for name, value in row.items()}) for row in rows]
        sender = open_store(store_url)
        await sender.open()
        for request in steering.ParamsRequest(data), steering.StopInputRequest():
            assert await sender.request("shared", msgspec.msgpack.encode(request)) is not None
        await sender.close()
    monkeypatch.undo()
    async with opens() as second:
        job = await second.resume("shared")
        assert sorted(r.value for r in await job.collect()) == [0, 1, 2]


async def test_senders_are_notified_when_the_owner_ends(
    opens: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opens() as second:
        async with opens() as first:
            await first.execute(waits, None, autostop=False, job_id="shared")
            other = await second.reattach("shared")
            asked = asyncio.Event()
            monkeypatch.setattr(OwnedJobs, "_begin", lambda *_: asked.set())
            params = {"folder": str(tmp_path), "n": 1}
            calls = [other.send_input_params(params), other.send_stop_frame(), other.cancel("late")]
            tasks = [asyncio.create_task(call) for call in calls]
            await asked.wait()
        monkeypatch.undo()
        with pytest.raises(JobInterrupted, match="0 of 1 parameter sets were taken"):
            await tasks[0]
        with pytest.raises(JobInterrupted):
            await tasks[1]
        assert await tasks[2] == {}
        assert other.status is JobStatus.ABORTED


async def test_a_call_that_is_cancelled_withdraws_its_request(
    opens: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").touch()
    async with opens() as first, opens() as second:
        job = await first.execute(waits, None, autostop=False, job_id="shared")
        other = await second.reattach("shared")
        asked = asyncio.Event()
        monkeypatch.setattr(OwnedJobs, "_begin", lambda *_: asked.set())
        sending = asyncio.create_task(other.send_input_params({"folder": str(tmp_path), "n": 1}))
        await asked.wait()
        sending.cancel()
        await asyncio.wait([sending])
        monkeypatch.undo()
        await other.send_input_params({"folder": str(tmp_path), "n": 2})
        await other.send_stop_frame()
        assert [r.value for r in await job.collect()] == [2]


async def test_a_job_whose_log_is_no_longer_in_memory_is_read_from_the_store(opens: Open) -> None:
    async with opens(options=LocalOptions(keep_finished=1, keep_summaries=2)) as session:
        handles = [await session.execute(squares, {"n": n}, job_id=f"job-{n}") for n in range(6)]
        assert [await handle for handle in handles] == [JobStatus.FINISHED] * 6
        for n, handle in enumerate(handles):
            again = await session.reattach(f"job-{n}", after=0)
            for job in (handle, again):
                assert job.status is JobStatus.FINISHED
                assert [r.value for r in await job.collect()] == [n * n]


async def test_the_label_of_a_job_is_in_the_store(opens: Open) -> None:
    async with opens() as session:
        await (await session.execute(squares, {"n": 2}, job_id="labelled", label="Ada's"))
    async with opens() as session:
        assert [job.info().label for job in session.jobs()] == ["Ada's"]
        assert (await session.reattach("labelled")).info().label == "Ada's"
        assert session.infos() == [job.info() for job in session.jobs()]


async def test_old_jobs_are_deleted_with_their_checkpoints(opens: Open) -> None:
    async with opens() as session, opens() as other:
        for n in range(3):
            await (await session.execute(squares, {"n": n}, job_id=f"job-{n}", checkpoint="calls"))
        assert await other.prune(3600) == 0
        with pytest.raises(ValueError, match="status must be that of jobs that have ended for good, not 'interrupted'"):
            await other.prune(0, JobStatus.INTERRUPTED)
        assert await other.prune(timedelta(0), JobStatus.FAILED) == 0
        assert await other.prune(timedelta(0), JobStatus.FINISHED) == 3
        assert [info.job_id async for info in other.find_jobs()] == []
        (file,) = Path(session.options.checkpoints or "").glob("*.sqlite")  # noqa: ASYNC240
        assert sql(file, "SELECT count(*) FROM checkpoints") == [(0,)]


async def test_a_session_deletes_jobs_that_are_older_than_its_option_says(
    opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opens() as session:
        await (await session.execute(squares, {"n": 2}, job_id="old"))
    pruned, prune = asyncio.Event(), SessionJobs.prune

    async def noted(durable: SessionJobs, before: float, status: JobStatus | None) -> int:
        count = await prune(durable, before, status)
        pruned.set()
        return count

    monkeypatch.setattr(SessionJobs, "prune", noted)
    async with opens(options=LocalOptions(keep_stored_for=0.0)) as session:
        await pruned.wait()
        assert [info async for info in session.find_jobs()] == []


async def test_a_check_finds_plans_that_cannot_be_decoded(opens: Open, place: str, store_path: Path) -> None:
    async with opens() as session:
        for name in "good", "bad":
            await (await session.execute(squares, {"n": 2}, job_id=name))
        steps: list[tuple[int, int | None]] = []
        assert [error async for error in session.check_store(lambda *step: steps.append(step))] == []
        assert steps == [(1, None), (2, None), (1, 2), (2, 2)]
        if "postgres" not in place:
            sql(store_path, "UPDATE plans SET plan = x'00' WHERE job = (SELECT job FROM jobs WHERE job_id = 'bad')")
            (error,) = [error async for error in session.check_store()]
            assert "job bad is damaged: column 'plan' cannot be read" in error.problem
