"""Sessions for programs without asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dfm_async
from dfm_async import (
    Federation,
    JobAborted,
    JobFailed,
    JobStatus,
    OperationFailed,
    ParameterError,
    Pipeline,
    PlaceParam,
    Result,
    SessionClosed,
    Yield,
)
from dfm_async.planning import Plan
from dfm_async.sync import Job, Session
from dfm_async.sync.inputs import PulledIterator, _Pulling
from tests.support.sessions import SHORT
from tests.support.waiting import PROMPT

fed = Federation("without asyncio", compat=True)
lab = fed.site("lab")
desk = fed.site("desk")


@lab.operation
@desk.operation
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


@lab.operation
def picky(x: int) -> int:
    if x % 3 == 2:
        raise ValueError(f"no {x}")
    return x


class Gates:
    """What the operations of the test have reached: they run in this process."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)


gates = Gates()


async def _endless() -> None:
    gates.began.release()
    try:
        await asyncio.Event().wait()
    finally:
        gates.cancelled.release()


@lab.operation
async def endless(x: int) -> int:
    await _endless()
    return x


@lab.operation
async def endless_after_0(x: int) -> int:
    if x > 0:
        await _endless()
    return x


@fed.pipeline
def report(day: int, base: int = 1) -> float:
    found = anomaly(day, base)
    Yield(found, place="live")
    return found


with Pipeline("picked") as picked:
    Yield(picky(PlaceParam("x")))
with Pipeline("waiting") as waiting:
    Yield(endless(PlaceParam("x")))


@pytest.fixture
def session() -> Iterator[Session]:
    gates.__init__()  # type: ignore[misc] # new ones
    with Session(fed, target="inline", options=SHORT) as session:
        yield session


def reached(gate: threading.Semaphore, times: int = 1) -> bool:
    return all(gate.acquire(timeout=PROMPT) for _ in range(times))


@contextlib.contextmanager
def ctrl_c_when(ready: Callable[[], object]) -> Iterator[None]:
    """Press Ctrl-C when something has happened."""

    def press() -> None:
        ready()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of a shell
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda at=at: found.update({at: work(at)})) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT)
    return [found[at] for at in range(count)]


# what a script writes


def test_calls_maps_broadcasts_and_runs_return_values(session: Session) -> None:
    assert session.call(anomaly, 17.0, site="desk") == 2.0
    assert list(session.map(anomaly, [16.0, 17.0], base=1.0)) == [15.0, 16.0]
    assert [item.error is None for item in session.map(picky, range(3), errors="yield")] == [True, True, False]
    assert {reply.site: reply.value for reply in session.each(anomaly, 16.0)} == {"lab": 1.0, "desk": 1.0}
    assert session.run(report, 17) == 16.0


def test_errors_of_operations_are_raised(session: Session) -> None:
    with pytest.raises(OperationFailed, match="no 2") as caught:
        session.call(picky, 2)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(OperationFailed, match="no 5"):
        list(session.map(picky, [3, 4, 5]))
    with pytest.raises(ParameterError):
        session.call(picky, "many")  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        session.call(picky)  # type: ignore[call-overload]


def test_the_traceback_of_an_error_has_no_frames_of_the_event_loop(session: Session) -> None:
    with pytest.raises(OperationFailed) as caught:
        session.call(picky, 2)
    files = {Path(frame.path).parent.name for frame in caught.traceback[1:]}
    assert files == {"sync"}
    assert isinstance(caught.value.__cause__, ValueError)


def test_job_yields_results_and_waits(session: Session) -> None:
    job = session.execute(report, [{"day": 2}, {"day": 3}])
    assert {result.value for result in job} == {1, 2}
    assert job.wait(PROMPT) is job.status is JobStatus.FINISHED
    assert sorted(result.value for result in job.results("live")) == [1, 2]
    assert job.first("live").place == "live"
    assert len(job.collect()) == 4
    assert job.wait_until_finished()
    assert job.completed.is_set()
    assert session.reattach(job.job_id).info() == job.info()
    assert [found.job_id for found in session.jobs()] == [job.job_id]
    assert [info.job_id for info in session.find_jobs(pipeline="report")] == [job.job_id]
    assert [type(event).__name__ for event in job.events()][-1] == "StatusChanged"
    assert isinstance(job.plan, Plan)
    assert repr(job).startswith(f"<Job {job.job_id}: finished")
    session.forget(job.job_id)
    assert session.jobs() == session.refresh_jobs() == []


def test_failed_job_raises_and_can_be_retried(session: Session) -> None:
    job = session.execute(picked, [{"x": x} for x in range(3)])
    with pytest.raises(JobFailed):
        job.wait()
    assert ["no 2" in str(error) for error in job.errors] == [True]
    assert [found.params for found in job.failures()] == [{"x": 2}]
    again = job.retry_failed()
    assert type(again) is Job
    assert not again.collect(errors="skip")
    assert again.info().retry_of == job.job_id
    with pytest.raises(JobFailed):
        list(job)
    assert sum(isinstance(item, Result) for item in job.results(errors="yield")) == 2


def test_wait_has_a_timeout_and_cancel_ends_the_job(session: Session) -> None:
    job = session.execute(waiting, {"x": 1})
    assert reached(gates.began)
    with pytest.raises(TimeoutError, match=f"job {job.job_id} has not ended within 0.01 s"):
        job.wait(0.01)
    assert not job.wait_until_finished(0.01)
    completed = job.completed
    assert not completed.is_set()
    assert set(job.cancel().values()) == {"stopped"}
    assert completed.wait(PROMPT)
    with pytest.raises(JobAborted):
        job.wait()


def test_open_job_takes_parameter_sets(session: Session) -> None:
    job = session.execute(report, None)
    job.send_input_params({"day": 1})
    assert job.first().value == 0
    job.send_input_params([{"day": 2}, {"day": 3}])
    job.send_stop_frame()
    assert job.wait() is JobStatus.FINISHED


def test_prepared_plan_profile_and_state(session: Session) -> None:
    plan = session.prepare(report)
    with session.profile() as profile:
        session.execute(plan, {"day": 1}).wait()
    assert "anomaly" in str(profile)
    assert "anomaly" in "".join(session.debug_show_nets(plan).values())
    assert session.connected
    assert session.stats().ended == {"finished": 1}
    with session.changes() as changes:
        assert next(changes).status is JobStatus.FINISHED
    with session.health() as health:
        assert isinstance(next(health), dict)
    assert session.federation is fed
    assert repr(session) == "<Session of 'without asyncio' on inline: 0 jobs running, 1 ended>"


# iterators


def test_iterator_of_parameter_sets_is_a_stream(session: Session) -> None:
    given: queue.SimpleQueue[dict[str, int] | None] = queue.SimpleQueue()
    job = session.execute(report, iter(given.get, None))
    with job.results("live") as results:
        for day in (1, 2):  # the next set comes when the result of the last one has
            given.put({"day": day})
            assert next(results).value == day - 1
    given.put(None)
    assert job.wait() is JobStatus.FINISHED


def test_inputs_may_block_and_use_the_session(session: Session) -> None:
    given: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    given.put(16.0)
    values = session.map(anomaly, iter(given.get, None))
    assert next(values) == 1.0
    assert session.call(anomaly, 15.0) == 0.0  # while the inputs wait for the next one
    given.put(None)
    assert list(values) == []
    chained = session.map(anomaly, session.map(anomaly, (float(x) for x in range(100))))
    assert list(chained) == [x - 30.0 for x in range(100)]


def test_inputs_that_are_cancelled_futures_are_an_error_of_their_own(session: Session) -> None:
    def inputs() -> Iterator[float]:
        yield 1.0
        future: concurrent.futures.Future[float] = concurrent.futures.Future()
        future.cancel()
        yield future.result()

    stream = session.map(anomaly, inputs(), site="lab")
    assert next(stream) == -14.0
    with pytest.raises(concurrent.futures.CancelledError):
        next(stream)
    assert session.call(anomaly, 1.0, site="lab") == -14.0


async def test_element_that_arrives_with_the_end_of_the_inputs_is_read() -> None:
    class Late(_Pulling):
        """Has pulled its only element when the reader checks whether it has ended."""

        @property
        def ended(self) -> bool:
            if not self._notified:
                self._notified = True
                self.found.append("last")
            return True

        @ended.setter
        def ended(self, _: bool) -> None: ...

    inputs = PulledIterator[str](())
    inputs._pulling = Late(())
    inputs._pulling.loop = asyncio.get_running_loop()
    assert [element async for element in inputs] == ["last"]


def test_error_of_inputs_is_raised_after_the_values(session: Session) -> None:
    def inputs() -> Iterator[float]:
        yield 16.0
        raise LookupError("no more")

    values = session.map(anomaly, inputs())
    assert next(values) == 1.0
    with pytest.raises(LookupError, match="no more"):
        next(values)
    with pytest.raises(RuntimeError, match="the inputs raised SystemExit"):
        list(session.map(anomaly, (sys.exit() for _ in range(1))))
    assert session.call(anomaly, 15.0) == 0.0


@pytest.mark.parametrize("leave", ["break", "close", "with", "drop", "session"])
def test_leaving_a_map_cancels_the_calls_in_flight(session: Session, leave: str) -> None:
    closed = threading.Event()

    def inputs() -> Iterator[int]:
        try:
            yield from range(3)
            yield 4
        finally:
            closed.set()

    if leave == "break":
        for item in session.map(endless_after_0, inputs(), ordered=False):
            assert item == 0
            assert reached(gates.began, 2)
            break
    else:
        values = session.map(endless_after_0, inputs(), ordered=False)
        assert next(values) == 0
        assert values.job is not None
        assert reached(gates.began, 2)
        if leave == "with":
            with values:
                pass
        elif leave == "drop":
            del values
        elif leave == "close":
            values.close()
            assert list(values) == []
        else:
            session.close()
    assert reached(gates.cancelled, 2)
    assert closed.wait(PROMPT)
    if leave != "session":
        (job,) = session.jobs()
        assert job.completed.wait(PROMPT)
        assert job.status is JobStatus.ABORTED


def test_closing_an_iterator_ends_another_thread_that_reads_it(session: Session) -> None:
    job = session.execute(waiting, {"x": 1})
    results = job.results()
    reading = threading.Thread(target=lambda: list(results))
    reading.start()
    assert reached(gates.began)
    results.close()
    reading.join(PROMPT)
    assert not reading.is_alive()
    assert job.status is JobStatus.RUNNING


def test_threads_share_a_session_and_an_iterator(session: Session) -> None:
    assert in_threads(lambda at: session.call(anomaly, 15.0 + at), 8) == [float(at) for at in range(8)]
    values = session.map(anomaly, (15.0 + x for x in range(500)))
    parts = in_threads(lambda _: list(values), 4)
    assert sorted(value for part in parts for value in part) == [float(x) for x in range(500)]


# Ctrl-C


def test_ctrl_c_cancels_the_call(session: Session) -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: reached(gates.began)):
        session.call(endless, 1)
    assert gates.cancelled.acquire(blocking=False), "the call has ended before the interrupt was raised"
    assert session.jobs()[0].status is JobStatus.ABORTED
    assert session.call(anomaly, 15.0) == 0.0


def test_ctrl_c_ends_the_wait_for_a_job_but_not_the_job(session: Session) -> None:
    job = session.execute(waiting, {"x": 1})
    with pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: reached(gates.began)):
        job.wait()
    assert job.status is JobStatus.RUNNING


def test_ctrl_c_in_a_loop_over_a_map_cancels_it(session: Session) -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: reached(gates.began, 3)):
        for _ in session.map(endless, range(3)):
            pass
    assert reached(gates.cancelled, 3)


# callbacks


def test_callbacks_may_block_and_use_the_session(session: Session) -> None:
    found = []

    def callback(site: str, node: str, frame: tuple[int, ...], place: str, data: Any) -> None:
        found.append((place, session.call(anomaly, 15.0 + data), threading.current_thread().name))

    async def asynchronous(*args: Any) -> None:
        found.append((args[3], args[4], threading.current_thread().name))

    job = session.execute(report, {"day": 2}, default_callback=callback, place_callbacks={"live": asynchronous})
    job.wait()
    assert sorted(found) == [("live", 1.0, "dfm-session"), ("result", 1.0, "dfm-callback")]
    assert job.callback_errors == []


# opening and closing


def test_plain_with_on_an_asynchronous_session_names_both_ways() -> None:
    with pytest.raises(TypeError, match=r"'async with Session\(...\)'.*from dfm_async.sync import Session"):
        with dfm_async.Session(fed):
            pass


def test_session_that_is_not_connected_refuses_calls() -> None:
    session = Session(fed, target="inline")
    with pytest.raises(SessionClosed, match="not connected; use 'with Session"):
        session.call(anomaly, 1.0)
    assert not session.connected
    with session:
        with pytest.raises(SessionClosed, match="connected already"):
            session.connect()
        job = session.execute(report, {"day": 1})
        job.wait()
        results = job.results()
        changes = session.changes()
    for call in (lambda: session.call(anomaly, 1.0), job.collect, lambda: next(results), session.connect):
        with pytest.raises(SessionClosed, match="closed"):
            call()
    assert (job.status, job.errors, session.connected) == (JobStatus.FINISHED, (), False)
    results.close()
    changes.close()
    session.close()


def test_session_that_cannot_open_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Session(fed, target="inline", trace=tmp_path / "none" / "trace.jsonl").connect()
    assert [thread for thread in threading.enumerate() if thread.name == "dfm-session"] == []


def test_closing_ends_calls_of_other_threads(session: Session) -> None:
    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def call() -> None:
        try:
            session.call(endless, 1)
        except JobAborted as error:
            failed.put(error)

    calling = threading.Thread(target=call)
    calling.start()
    assert reached(gates.began)
    for closing in [threading.Thread(target=session.close) for _ in range(2)]:
        closing.start()
        closing.join(PROMPT)
        assert not closing.is_alive()
    calling.join(PROMPT)
    assert "the session was closed" in str(failed.get_nowait())


async def test_session_works_beside_a_running_loop() -> None:
    with Session(fed, target="inline") as session:
        assert session.call(anomaly, 16.0) == 1.0
        async with dfm_async.Session(fed, target="inline") as other:
            assert await other.call(anomaly, 16.0) == 1.0


def test_fork_of_a_program_refuses_calls(session: Session) -> None:
    child = os.fork()
    if not child:
        try:
            session.call(anomaly, 1.0)
        except SessionClosed as error:
            os._exit(0 if "which forked this one" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LEFT_OPEN = """
import threading
import time
from dfm_async import Federation
from dfm_async.sync import Session

fed = Federation("left")
site = fed.site("lab")

@site.operation
def forever(x: int) -> int:
    time.sleep(1000)

@site.operation
def double(x: int) -> int:
    return 2 * x

if __name__ == "__main__":
    session = Session(fed)
    session.connect()
    print(session.call(double, 21))
    values = session.map(forever, range(3))
    threading.Thread(target=next, args=(values,), daemon=True).start()
    session.call(double, 1)
    print("end")
"""


def test_session_left_open_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text(LEFT_OPEN)
    began = time.monotonic()
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["42", "end"], "")
    assert time.monotonic() - began < PROMPT


def test_schedules_have_blocking_jobs(session: Session) -> None:
    with session.schedule("often", report, {"day": 20}, every=1) as schedule:
        assert schedule.next_at is not None
        job = next(schedule)
        assert job.wait() is JobStatus.FINISHED
        assert schedule.last_job is not None
        assert "'often'" in repr(schedule)
    assert len(list(schedule)) <= 1  # it ends
