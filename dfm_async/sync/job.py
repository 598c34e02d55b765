"""Jobs whose methods block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar, overload

from dfm_async.base.loop_thread import LoopThread
from dfm_async.errors import DfmError
from dfm_async.model.events import Activity, Event, Failure, Result, Results
from dfm_async.model.info import FailedSet, JobInfo, ScheduleInfo
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.session.hints import IN_JOBS, no_attribute
from dfm_async.session.job import Job as AsyncJob
from dfm_async.session.job import R_co
from dfm_async.session.mapping import MapStream as AsyncMapStream
from dfm_async.session.schedule import Schedule as AsyncSchedule
from dfm_async.sync.blocking import Blocking, wait
from dfm_async.sync.iterators import Stream

V = TypeVar("V")


async def _ended(job: AsyncJob, timeout: float | None) -> JobStatus:  # noqa: ASYNC109 - the public name
    try:
        async with asyncio.timeout(timeout):
            return await job
    except TimeoutError:
        raise TimeoutError(f"job {job.job_id} has not ended within {timeout:g} s") from None


async def _set(job: AsyncJob, event: threading.Event) -> None:
    await job.completed.wait()
    event.set()


class MapStream(Stream[V]):
    """The values of :meth:`dfm_async.Session.map`. The job starts with the first item."""

    def __init__(self, loop: LoopThread, source: AsyncMapStream[V]) -> None:
        super().__init__(loop, source)
        self._source = source

    @property
    def job(self) -> Job | None:
        """The job that runs the calls; None before the first item."""
        found = self._source.job
        return None if found is None else Job(self._loop, found)


class Schedule(Stream[Any], Generic[V]):
    """A job for each tick of a timetable, returned by ``session.schedule``.

    ``with`` opens it: its ticks run until the block ends, or the session. The jobs that it has started go on.
    ``for job in schedule`` yields the job of each tick, as :class:`dfm_async.session.Schedule` does.
    """

    def __init__(self, loop: LoopThread, source: AsyncSchedule[V]) -> None:
        super().__init__(loop, source)
        self._source = source
        self.name: str = source.name
        self.label: str = source.label

    def __enter__(self) -> Self:
        wait(self._loop, self._source.__aenter__())
        return self

    def __next__(self) -> Job[V]:
        return Job(self._loop, super().__next__())

    @property
    def next_at(self) -> datetime | None:
        """The time of the next tick, in the time zone of the schedule; None if it is not open."""
        return self._loop.call(lambda: self._source.next_at)

    @property
    def last_job(self) -> Job[V] | None:
        """The job of the last tick that ran, here or in another replica; None if there is none."""
        found = self._loop.call(lambda: self._source.last_job)
        return None if found is None else Job(self._loop, found)

    def info(self) -> ScheduleInfo:
        """Return its state at this moment."""
        return self._loop.call(self._source.info)

    def __repr__(self) -> str:
        return self._loop.call(lambda: repr(self._source))


class Job(Blocking[AsyncJob[R_co]], Generic[R_co]):
    """One execution of a pipeline, returned by ``session.execute`` and ``session.reattach``.

    ``for result in job`` yields its results, :meth:`wait` waits for its end. Its methods are those of
    :class:`dfm_async.Job`, and may be called from any thread. Ctrl-C in the main thread ends the wait, not the job.
    What is known of a job can be read after its session was closed, but not its results.
    """

    _completed: threading.Event | None = None

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait for the end, and return the status, as ``await job`` does.

        Raises:
            JobFailed: operations have failed.
            JobAborted: it was cancelled, its worker was lost, or the session was closed.
            JobInterrupted: its application has ended; it can be resumed.
            TimeoutError: it has not ended within ``timeout`` seconds.
        """
        return self._wait(_ended(self._async, timeout))

    @property
    def completed(self) -> threading.Event:
        """Is set when the job has ended, however it did. Never set for an unknown job."""
        if self._completed is None:
            self._completed = event = threading.Event()
            self._loop.spawn(_set(self._async, event))
        if self._call(lambda: self._async.completed.is_set()):
            self._completed.set()
        return self._completed

    def __iter__(self) -> Stream[Result]:
        return self.results()

    if not TYPE_CHECKING:  # type checkers refuse unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name, IN_JOBS)

    # Written by python -m tests.sync.methods, from the methods of dfm_async.Job

    @property
    def callback_errors(self) -> list[BaseException]:
        """The errors that callbacks of this handle raised."""
        return self._call(lambda: self._async.callback_errors)

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._call(lambda: self._async.job_id)

    @property
    def status(self) -> JobStatus:
        """The job's status; UNKNOWN if the session does not know the id."""
        return self._call(lambda: self._async.status)

    @property
    def was_found(self) -> bool:
        """Whether the session knows the job."""
        return self._call(lambda: self._async.was_found)

    def info(self) -> JobInfo:
        """Return the current state of the job.

        See :meth:`dfm_async.Job.info`.
        """
        return self._call(lambda: self._async.info())

    @property
    def plan(self) -> Plan:
        """The plan that the job executes."""
        return self._call(lambda: self._async.plan)

    @property
    def errors(self) -> tuple[DfmError, ...]:
        """The first errors of the job, as far as they are known here; ``info().errors`` is the number of all errors."""
        return self._call(lambda: self._async.errors)

    def latest(self, count: int = 5) -> Results:
        """Return the newest results that are in memory, oldest first. Readers still get all results.

        See :meth:`dfm_async.Job.latest`.
        """
        return self._call(lambda: self._async.latest(count))

    def wait_until_finished(self, timeout: float | None = None) -> bool:
        """Wait for the end, and return whether the job has ended. Does not raise if the job failed.

        See :meth:`dfm_async.Job.wait_until_finished`.
        """
        return self._wait(self._async.wait_until_finished(timeout))

    @overload
    def results(
        self,
        place: Literal["result"],
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise"] = "raise",
    ) -> Stream[Result[R_co]]: ...

    @overload
    def results(
        self,
        place: str | None = None,
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise"] = "raise",
    ) -> Stream[Result]: ...

    @overload
    def results(
        self, place: Literal["result"], after: int | None = None, ordered: bool = False, *, errors: Literal["yield"]
    ) -> Stream[Result[R_co] | Failure]: ...

    @overload
    def results(
        self, place: str | None = None, after: int | None = None, ordered: bool = False, *, errors: Literal["yield"]
    ) -> Stream[Result | Failure]: ...

    @overload
    def results(
        self, place: str | None, after: int | None, ordered: bool, errors: Literal["raise", "yield"]
    ) -> Stream[Result | Failure]: ...

    def results(
        self,
        place: str | None = None,
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise", "yield"] = "raise",
    ) -> Any:
        """Return an iterator over the results.

        See :meth:`dfm_async.Job.results`.
        """
        return Stream(self._loop, self._call(lambda: self._async.results(place, after, ordered, errors)))

    def events(self, after: int | None = None) -> Stream[Event]:
        """Return an iterator over all events of the job.

        See :meth:`dfm_async.Job.events`.
        """
        return Stream(self._loop, self._call(lambda: self._async.events(after)))

    def changes(self, interval: float = 0.1) -> Stream[JobInfo]:
        """Return an iterator over the state of the job: first the current one, then each change.

        See :meth:`dfm_async.Job.changes`.
        """
        return Stream(self._loop, self._call(lambda: self._async.changes(interval)))

    def show(self) -> None:
        """Display the job until it has ended: in a notebook as a live view, elsewhere as lines of text.

        See :meth:`dfm_async.Job.show`.
        """
        return self._wait(self._async.show())

    def activity(self, interval: float = 0.1) -> Stream[Activity]:
        """Return an iterator over the calls of the job's operations: their numbers, and the calls that have ended.

        See :meth:`dfm_async.Job.activity`.
        """
        return Stream(self._loop, self._call(lambda: self._async.activity(interval)))

    @property
    def watched(self) -> bool:
        """Whether :meth:`activity` is available."""
        return self._call(lambda: self._async.watched)

    @overload
    def collect(
        self, place: Literal["result"], errors: Literal["raise", "skip"] = "raise"
    ) -> Results[Result[R_co]]: ...

    @overload
    def collect(self, place: Literal["result"], errors: Literal["yield"]) -> list[Result[R_co] | Failure]: ...

    @overload
    def collect(self, place: str | None = None, errors: Literal["raise", "skip"] = "raise") -> Results: ...

    @overload
    def collect(self, place: str | None = None, *, errors: Literal["yield"]) -> list[Result | Failure]: ...

    @overload
    def collect(
        self, place: str | None, errors: Literal["raise", "skip", "yield"]
    ) -> Results | list[Result | Failure]: ...

    def collect(self, place: str | None = None, errors: Literal["raise", "skip", "yield"] = "raise") -> Any:
        """Wait until the job has ended, and return its results as a list.

        See :meth:`dfm_async.Job.collect`.
        """
        return self._wait(self._async.collect(place, errors))

    def failures(self) -> list[FailedSet]:
        """Wait until the job has ended, and return its failed parameter sets, with their parameters and first errors.

        See :meth:`dfm_async.Job.failures`.
        """
        return self._wait(self._async.failures())

    def retry_failed(
        self, label: str | None = None, priority: int | None = None, watch: bool | None = None
    ) -> Job[R_co]:
        """Wait until the job has ended, and run the parameter sets of :meth:`failures` again, as a new job.

        See :meth:`dfm_async.Job.retry_failed`.
        """
        return Job(self._loop, self._wait(self._async.retry_failed(label, priority, watch)))

    def fork(
        self,
        from_node: str,
        frame: int | Sequence[int] | None = None,
        accept_changes: bool = False,
        label: str | None = None,
        priority: int | None = None,
        watch: bool | None = None,
    ) -> Job[R_co]:
        """Wait until the job has ended, and run it again from a node, as a new job.

        See :meth:`dfm_async.Job.fork`.
        """
        return Job(self._loop, self._wait(self._async.fork(from_node, frame, accept_changes, label, priority, watch)))

    @overload
    def first(self, place: Literal["result"]) -> Result[R_co]: ...

    @overload
    def first(self, place: str | None = None) -> Result: ...

    def first(self, place: str | None = None) -> Result:
        """Wait for the first result, of one place or of any.

        See :meth:`dfm_async.Job.first`.
        """
        return self._wait(self._async.first(place))

    def send_input_params(self, params: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add one or several parameter sets to an open job. Wait while too many are in flight.

        See :meth:`dfm_async.Job.send_input_params`.
        """
        return self._wait(self._async.send_input_params(params))

    def send(self, name: str, value: Any = None, *, frame: int | None = None) -> None:
        """Send an event to a parameter set of the job, where a ``Wait`` for an event of this name consumes it.

        See :meth:`dfm_async.Job.send`.
        """
        return self._wait(self._async.send(name, value, frame=frame))

    def send_stop_frame(self) -> None:
        """Declare that there are no further parameter sets; the job ends when all are completed.

        See :meth:`dfm_async.Job.send_stop_frame`.
        """
        return self._wait(self._async.send_stop_frame())

    def cancel(self, reason: str | None = None, grace: float = 5.0) -> dict[str, str]:
        """Stop the job, and return when every site has confirmed that nothing of the job is running any more.

        See :meth:`dfm_async.Job.cancel`.
        """
        return self._wait(self._async.cancel(reason, grace))

    def detach(self) -> None:
        """End the callbacks of this handle. The job continues; ``session.reattach`` returns a new handle.

        See :meth:`dfm_async.Job.detach`.
        """
        return self._wait(self._async.detach())
