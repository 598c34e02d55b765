"""A job in the federation, as the application sees it, with a hub that a test plays."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dfm_async import JobStatus, ParameterError, ResultLimits
from dfm_async.engine.machine import Phase
from dfm_async.errors import DecodingError, DfmError
from dfm_async.model.ids import JobId
from dfm_async.model.job_spec import JobSpec
from dfm_async.results.event_codec import Head, decode_error
from dfm_async.results.record import JobRecord
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.message_parts import TooLarge
from dfm_async.targets.flare.remote_job import RemoteJob
from tests.flare.test_hub import B, codec, plan

LIMITS = ResultLimits(max_items=10, window=4)


class Connection:
    """Records the messages to the hub."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.largest = 1 << 30
        self.journal = False

    def send(self, message: Any) -> None:
        size = len(fm.encode(message))
        if size > self.largest:
            raise TooLarge(f"{size} bytes are more than {self.largest}")
        self.sent.append(message)

    def granted(self) -> int:
        return max((message.until for message in self.sent if isinstance(message, fm.EventsTaken)), default=0)


@pytest.fixture
async def connection() -> Connection:
    return Connection()


@pytest.fixture
async def job(connection: Connection) -> RemoteJob:
    record = JobRecord(JobSpec(job_id=JobId("job"), limits=LIMITS), plan)
    job = RemoteJob(record, codec, detach=False)
    job.connection = connection  # type: ignore[assignment] # it only sends
    job.follow()
    return job


def results(first: int, count: int) -> fm.Events:
    heads = [Head(kind="result", frame=(0, first + n), point=0, at=B) for n in range(count)]
    values = codec.dumps(list(range(count)))
    return fm.Events(
        job_id="job", first=first, heads=heads, values=values, errors=[], end=first + count, size=len(values)
    )


def fill(job: RemoteJob, connection: Connection) -> int:
    """Sends results as far as there is room; gives how many."""
    sent = 0
    while connection.granted() > sent:
        count = connection.granted() - sent
        job.take_events(results(sent, count))
        sent += count
    return sent


async def test_a_log_that_nobody_reads_stops_the_hub(job: RemoteJob, connection: Connection) -> None:
    assert LIMITS.max_items < fill(job, connection) <= 2 * LIMITS.max_items + 1
    assert job.record.log.full


@pytest.mark.parametrize("how", ["halted", "failed", "ended there"])
async def test_the_last_events_of_a_job_come_although_nobody_reads(
    job: RemoteJob, connection: Connection, how: str
) -> None:
    sent = fill(job, connection)
    if how == "halted":
        job.halt(JobStatus.ABORTED, "enough", 1.0)
    elif how == "failed":
        job.fail(DfmError("it is full"))
    else:
        job.take_state(state("finished", sent + 3))
    assert connection.granted() > sent + 1000
    job.take_events(results(sent, 2))
    last = Head(kind="status", status="aborted", text="enough")
    job.take_events(fm.Events(job_id="job", first=sent + 2, heads=[last], values=b"", errors=[], end=sent + 3, size=0))
    assert job.record.completion_event.is_set()
    assert job.record.status is JobStatus.ABORTED


async def test_a_job_whose_last_events_are_not_kept_ends_by_its_state(job: RemoteJob) -> None:
    job.take_state(state("finished", 0))
    assert job.record.status is JobStatus.FINISHED


async def test_a_job_that_the_hub_does_not_know_any_more_ends(job: RemoteJob) -> None:
    job.take_expired(fm.Expired("job", None))
    assert job.record.status is JobStatus.ABORTED
    assert "does not know" in str(job.record.reason)


def state(status: str, end: int) -> fm.JobState:
    found = JobStatus(status)
    return fm.JobState(job_id="job", status=found, phase=Phase.ENDED, added=1, opened=1, open=0, stopped=True, end=end)


async def test_what_is_too_large_for_the_server_is_not_sent(connection: Connection) -> None:
    record = JobRecord(JobSpec(job_id=JobId("job"), limits=LIMITS), plan)
    job = RemoteJob(record, codec, detach=False)
    job.connection = connection  # type: ignore[assignment] # it only sends
    connection.largest = 1000
    job.add([{"x": b"x" * 2000}])
    with pytest.raises(ParameterError, match=r"bytes are more than .* \(max_message_bytes"):
        await job.submit({})
    assert connection.sent == []


async def test_a_further_set_that_is_too_large_fails_its_job(job: RemoteJob, connection: Connection) -> None:
    connection.largest = 1000
    job.add([{"x": b"x" * 2000}])
    (failed,) = (message for message in connection.sent if isinstance(message, fm.Fail))
    assert "a parameter set cannot be sent" in str(decode_error(failed.error))


async def test_many_sets_go_in_parts_and_none_is_left_out(
    job: RemoteJob, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.remote_job._ROWS", 100)
    job.add([{"x": n} for n in range(500)])
    parts = [message.rows for message in connection.sent if isinstance(message, fm.AddRows)]
    assert len(parts) > 5
    assert [row["x"] for part in parts for row in codec.loads(part)] == list(range(500))


async def test_the_first_sets_go_with_the_job_and_the_others_follow(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfm_async.targets.flare.remote_job._ROWS", 100)
    job = RemoteJob(JobRecord(JobSpec(job_id=JobId("job"), limits=LIMITS), plan), codec, detach=False)
    job.connection = connection  # type: ignore[assignment] # it only sends
    job.add([{"x": n} for n in range(500)])
    job.stop()
    submitting = asyncio.create_task(job.submit({}))
    await asyncio.sleep(0)
    (submit,) = (message for message in connection.sent if isinstance(message, fm.Submit))
    assert not submit.stopped
    job.answered(fm.Submitted("job", "new"))
    await submitting
    parts = [submit.rows, *(message.rows for message in connection.sent if isinstance(message, fm.AddRows))]
    assert [row["x"] for part in parts for row in codec.loads(part)] == list(range(500))
    assert isinstance(connection.sent[-1], fm.StopFrames)


async def test_a_value_that_cannot_be_rebuilt_counts_as_an_error(job: RemoteJob) -> None:
    heads = [Head(kind="result", frame=(0, 0), point=0, at=B)]
    values = msgspec.msgpack.encode([msgspec.msgpack.Ext(99, b"")])
    job.take_events(fm.Events(job_id="job", first=0, heads=heads, values=values, errors=[], end=1, size=len(values)))
    assert job.record.error_count == 1
    assert isinstance(job.record.errors[0], DecodingError)


# hubs that keep a journal


@pytest.fixture
async def lasting(job: RemoteJob, connection: Connection) -> RemoteJob:
    """A job whose hub is lost, when it had parameter sets 0 to 3, and the journal sets 0 and 1."""
    connection.journal = True
    for n in range(4):
        job.add([{"x": n}])
    job.take_stored(fm.RowsStored("job", 0, 2))
    assert job.recoverable
    job.suspend()
    assert job.suspended
    assert job.state == "waits for the federation, which cannot be reached"
    connection.sent.clear()
    return job


def found(added: int, *, end: int = 0, stopped: bool = False) -> fm.Known:
    now = fm.JobState(
        job_id="job",
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        added=added,
        opened=0,
        open=0,
        stopped=stopped,
        end=end,
    )
    return fm.Known(JobSpec(job_id=JobId("job")), b"", 0, end, [], now)


def another() -> Connection:
    connection = Connection()
    connection.journal = True
    return connection


def added(connection: Connection) -> list[int]:
    messages = [message for message in connection.sent if isinstance(message, fm.AddRows)]
    return [row["x"] for message in messages for row in codec.loads(message.rows)]


@pytest.mark.parametrize("stored", [2, 3, 4])
async def test_another_hub_gets_the_sets_that_the_journal_lacks(lasting: RemoteJob, stored: int) -> None:
    connection = another()
    lasting.add([{"x": 4}], last=True)  # while there is no hub
    lasting.recover(connection, found(stored))  # type: ignore[arg-type] # it only sends
    assert not lasting.suspended
    assert added(connection) == list(range(stored, 5))
    assert [message for message in connection.sent if isinstance(message, fm.Follow)] == [fm.Follow("job", 0)]
    assert isinstance(connection.sent[-1], fm.StopFrames)


async def test_another_hub_is_read_from_the_last_offset_on(lasting: RemoteJob) -> None:
    lasting.take_events(results(0, 3))
    connection = another()
    lasting.recover(connection, found(4, end=5))  # type: ignore[arg-type] # as above
    assert connection.sent[0] == fm.Follow("job", 3)
    lasting.take_events(results(3, 2))
    assert lasting.record.log.end == 5


async def test_a_journal_that_lacks_what_was_read_ends_the_job(lasting: RemoteJob) -> None:
    lasting.take_events(results(0, 3))
    lasting.recover(another(), found(4, end=2))  # type: ignore[arg-type] # as above
    assert lasting.record.status is JobStatus.ABORTED
    assert "lacks events" in str(lasting.record.reason)


async def test_sets_of_several_programs_are_not_counted_as_ones_own(lasting: RemoteJob) -> None:
    connection = another()
    lasting.take_state(found(9).state)  # another program has sent some
    lasting.recover(connection, found(9))  # type: ignore[arg-type] # as above
    (failed,) = (message for message in connection.sent if isinstance(message, fm.Fail))
    assert "the last 2 parameter sets that this program has sent may be missing" in str(decode_error(failed.error))


async def test_a_job_that_was_cancelled_meanwhile_is_cancelled_at_the_next_hub(lasting: RemoteJob) -> None:
    connection = another()
    lasting.halt(JobStatus.ABORTED, "enough", 1.0)
    lasting.recover(connection, found(4))  # type: ignore[arg-type] # as above
    assert isinstance(connection.sent[-1], fm.Halt)


@pytest.mark.parametrize("how", ["closed", "not found"])
async def test_a_job_that_no_hub_goes_on_with_is_interrupted(lasting: RemoteJob, how: str) -> None:
    if how == "closed":
        lasting.shut_down("the session was closed", 1.0)
    else:
        lasting.not_found(DfmError("the server does not answer"))
    assert lasting.record.status is JobStatus.INTERRUPTED
    assert "session.reattach" in str(lasting.record.reason)


def written(first: int, *heads: Head) -> fm.Events:
    end = first + len(heads)
    return fm.Events(job_id="job", first=first, heads=list(heads), values=b"", errors=[], end=end, size=0)


async def test_an_interruption_in_the_log_does_not_end_a_job(job: RemoteJob) -> None:
    """An earlier hub has written it at its end."""
    heads = [Head(kind="status", status=status) for status in ("running", "interrupted")]
    job.take_events(written(0, *heads))
    assert not job.record.status.ended
    job.take_events(written(2, Head(kind="status", status="running")))
    job.take_state(state("interrupted", 4))  # the hub cannot write it
    assert not job.record.status.ended
    job.take_events(written(3, Head(kind="frame", frame=(0,))))
    assert job.record.status is JobStatus.INTERRUPTED
