"""A job as users hold it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dfm_async.errors import DfmError, JobAborted, JobFailed, JobInterrupted, JobNotFound, StoreError
from dfm_async.model.events import Result
from dfm_async.model.info import JobInfo
from dfm_async.model.results import Results
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.rendering import Shown, renderer
from dfm_async.results.record import JobRecord, JobSummary
from dfm_async.results.watching import ActivityReader
from dfm_async.runtime.faults import cancel_task, drop_cancellation, is_our_cancellation
from dfm_async.session.callbacks import Callback, CallbackDispatcher
from dfm_async.session.info_watch import InfoWatch
from dfm_async.session.stream import EventStream, ResultStream
from dfm_async.targets.control import JobControl

if TYPE_CHECKING:
    from dfm_async.session.session import Session

__all__ = ["Job", "check_places", "record_info", "summary_info"]

_log = logging.getLogger(__name__)
_LOOKED_AT = 1000
"""How many events are looked at to find the newest results."""


class Job(Shown):
    """One execution of a pipeline. Made by :meth:`Session.execute` and :meth:`Session.reattach`.

    ``async for result in job`` gives its results, ``await job`` waits for its end. A job is independent of those who
    wait for it or read it: cancelling a task that does so never cancels the job.
    """

    def __init__(
        self,
        session: Session,
        job_id: str,
        record: JobRecord | None,
        after: int | None = None,
    ) -> None:
        self._session = session
        self._job_id = job_id
        self._record = record
        self._after = after
        self._callbacks: asyncio.Task[None] | None = None
        self.callback_errors: list[BaseException] = []
        """What callbacks of this handle raised."""

    @property
    def _coordinator(self) -> JobControl | None:
        """Looked up each time: a job that was interrupted gets another one when it is resumed."""
        return self._session.coordinator(self._job_id)

    def _known(self) -> JobRecord:
        if self._record is None:
            raise JobNotFound(self._job_id)
        return self._record

    # what is known

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job_id

    @property
    def status(self) -> JobStatus:
        """The job's status; UNKNOWN if the session does not know the id."""
        return JobStatus.UNKNOWN if self._record is None else self._record.status

    @property
    def was_found(self) -> bool:
        """Whether the session knows the job."""
        return self._record is not None

    @property
    def completed(self) -> asyncio.Event:
        """Is set when the job has ended, however it did. Never set for an unknown job."""
        return asyncio.Event() if self._record is None else self._record.completion_event

    def info(self) -> JobInfo:
        """Gives what is known of the job at this moment."""
        record = self._known()
        return record_info(record, None if record.status.ended else self._coordinator)

    @property
    def plan(self) -> Plan:
        """The plan that the job runs by.

        Raises:
            JobNotFound: the session does not know the job.
        """
        return self._known().plan

    @property
    def errors(self) -> tuple[DfmError, ...]:
        """The first errors of the job, as far as they are known here; ``info().errors`` tells how many there are."""
        return tuple(self._known().errors)

    def latest(self, count: int = 5) -> Results:
        """The newest results that are in memory, oldest first. Only looks at them: readers still get them all."""
        log = self._known().log
        found: deque[Result] = deque()
        for offset in range(log.readable - 1, max(log.first, log.readable - _LOOKED_AT) - 1, -1):
            event = log.get(offset)
            if type(event) is Result:
                found.appendleft(event)
                if len(found) == count:
                    break
        return Results(found)

    # waiting

    def __await__(self) -> Generator[Any, None, JobStatus]:
        return self._wait().__await__()

    async def _wait(self) -> JobStatus:
        record = self._known()
        await record.wait()
        if self._callbacks is not None:
            await asyncio.wait([self._callbacks])
        await record.load()
        error = record.outcome()
        if error is not None:
            raise error
        return record.status

    async def wait_until_finished(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - the caller's words
        """Waits for the end: True when it has come, False after the timeout. Never raises for a failed job.

        Raises:
            ResultsUnread: the job cannot go on, because its log is full and nobody reads it.
        """
        record = self._known()
        try:
            async with asyncio.timeout(timeout):
                await record.wait()
                if self._callbacks is not None:
                    await asyncio.wait([self._callbacks])
        except TimeoutError:
            return False
        return True

    # reading

    def results(
        self,
        place: str | None = None,
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise", "yield"] = "raise",
    ) -> ResultStream:
        """Gives an iterator over the results.

        Args:
            place: only results of this place.
            after: begin behind this offset.
            ordered: results come in the order of their frames.
            errors: "raise" gives all good results and then raises if the job failed; "yield" gives failures as items.
        """
        record = self._known()
        if errors not in ("raise", "yield"):
            raise ValueError(f"errors must be 'raise' or 'yield', not {errors!r}")
        if place is not None and place not in record.plan.places:
            raise ValueError(f"the pipeline has no place {place!r}; it has: {', '.join(record.plan.places)}")
        return ResultStream(record, place, self._after if after is None else after, ordered, errors)

    def __aiter__(self) -> ResultStream:
        return self.results()

    def events(self, after: int | None = None) -> EventStream:
        """Gives an iterator over everything that happens to the job."""
        return EventStream(self._known(), self._after if after is None else after)

    def changes(self, interval: float = 0.1) -> InfoWatch:
        """Gives an iterator over what is known of the job: first what is known now, then whenever something happened.

        It is a state and not a history: what happens faster than it is read, or than the interval, is joined. The last
        item tells how the job ended. Unlike ``events()`` it reads nothing, so the job never waits for it.

        Args:
            interval: how many seconds lie at least between items.
        """
        return InfoWatch(self, self._known(), interval)

    async def show(self) -> None:
        """Shows the job until it has ended: in a notebook as a view that changes, elsewhere as lines.

        Does not raise for a job that failed. Cancelling it ends the view, not the job. Executed with ``watch=True``, a
        job shows what each of its nodes does.

        Raises:
            ResultsUnread: the job cannot go on, because its log is full and nobody reads it.
        """
        self._known()
        await renderer().show(self)

    def activity(self, interval: float = 0.1) -> ActivityReader:
        """Gives an iterator over what the job's operations do: how often each was called, and which calls have ended.

        Its first item tells everything so far, each further one what has changed. It is a state and not a history:
        changes that come faster than they are read, or than the interval, are joined. It ends with the job.

        Args:
            interval: how many seconds lie at least between items.

        Raises:
            DfmError: the job is not watched here: that is wanted with ``execute(watch=True)``.
        """
        found = self._known().activity
        if found is None:
            raise DfmError(f"job {self._job_id} is not watched: execute it with watch=True, in this session")
        return found.reader(interval)

    @property
    def watched(self) -> bool:
        """Whether there is something to see for :meth:`activity`."""
        return self._record is not None and self._record.activity is not None

    async def collect(self) -> Results:
        """Waits for the end and gives all results, as a list; raises if the job failed."""
        return Results([result async for result in self.results()])

    async def first(self, place: str | None = None) -> Result:
        """Waits for the first result, of one place or of any.

        Raises:
            LookupError: the job finished without one.
        """
        async with self.results(place) as results:
            async for result in results:
                return result
        where = "" if place is None else f" for place {place!r}"
        raise LookupError(f"job {self._job_id} finished without a result{where}")

    # steering

    async def send_input_params(self, params: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Adds one or several parameter sets to a job that is still open. Waits while too many are under way.

        Raises:
            ParameterError: the parameters do not fit the pipeline, or the job takes no more.
        """
        self._known()
        await self._session.send_params(self._job_id, self._coordinator, params)

    async def send_stop_frame(self) -> None:
        """Says that no further parameter set will come; the job ends when all are done."""
        self._known()
        coordinator = self._coordinator
        if coordinator is not None:
            coordinator.stop()
        else:
            await self._session.check_steerable(self._job_id)

    async def cancel(self, reason: str | None = None, grace: float = 5.0) -> dict[str, str]:
        """Stops the job, and returns when every site has confirmed that nothing of it runs any more.

        Operations are cancelled at once; what has not stopped after the grace is killed.

        Returns:
            How each site stopped. "stopped"; "stopped after grace" (an operation took a part of the grace to return);
            "killed" (its process had to be); "retired" (an operation does not return; its process takes no further
            job, and ends with the last of the others that run in it); or "abandoned" (an operation of the application's
            own process does not return, and is left alone). Empty if the job had ended before, or had not begun.
        """
        record = self._known()
        coordinator = self._coordinator
        if record.status is JobStatus.INTERRUPTED:
            await self._session.abort_interrupted(self._job_id, reason or "cancelled")
            return {}
        if coordinator is None and not record.status.ended:
            await self._session.check_steerable(self._job_id)
        if coordinator is None or record.status.terminal:
            return {}
        coordinator.halt(JobStatus.ABORTED, reason or "cancelled", grace)
        coordinator.shorten(grace)
        await record.completion_event.wait()
        return dict(coordinator.outcomes)

    async def detach(self) -> None:
        """Ends the callbacks of this handle. The job goes on; ``session.reattach`` gives a new handle."""
        self._known()
        if self._callbacks is not None:
            cancel_task(self._callbacks)
            await asyncio.wait([self._callbacks])
            self._callbacks = None

    def __repr__(self) -> str:
        if self._record is None:
            return f"<Job {self._job_id}: unknown>"
        record = self._record
        errors = f", {record.error_count} errors" if record.error_count else ""
        state = record.status.value
        coordinator = None if record.status.ended else self._coordinator
        if coordinator is not None:
            state = coordinator.state
        elif record.status is JobStatus.UNKNOWN:
            return f"<Job {self._job_id}: {record.reason}>"
        return f"<Job {self._job_id}: {state}, {record.log.end} events{errors}>"

    # callbacks

    def start_callbacks(
        self,
        spawn: Any,
        dispatcher: CallbackDispatcher,
        default: Callback | None,
        places: Mapping[str, Callback] | None,
    ) -> None:
        """Has the callbacks called for every result, in order."""
        if default is None and not places:
            return
        record = self._known()
        stream = ResultStream(record, None, self._after, False, "raise")
        stream.attach()
        self._callbacks = spawn(self._run_callbacks(stream, dispatcher, default, dict(places or {})))

    async def _run_callbacks(
        self,
        stream: ResultStream,
        dispatcher: CallbackDispatcher,
        default: Callback | None,
        places: dict[str, Callback],
    ) -> None:
        async with stream:
            try:
                async for result in stream:
                    callback = places.get(result.place, default)
                    if callback is not None:
                        args = (result.site, result.node, result.frame, result.place, result.value)
                        await self._call(dispatcher.dispatch(callback, *args), result)
            except (JobFailed, JobAborted, JobInterrupted, StoreError):
                _log.debug("job %s did not end well; whoever waits for it is told", self._job_id)
            await self._call(dispatcher.drain(), None)

    async def _call(self, work: Any, event: Result | None) -> None:
        try:
            await work
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            self.callback_errors.append(error)
            _log.exception("a callback of job %s raised", self._job_id, extra={"job": self._job_id, "result": event})
        await drop_cancellation()


def check_places(places: Iterable[str], plan: Plan) -> None:
    """Refuses places that a pipeline does not have."""
    for place in sorted(set(places) - set(plan.places)):
        raise ValueError(f"the pipeline has no place {place!r}; it has: {', '.join(plan.places)}")


def record_info(record: JobRecord, coordinator: JobControl | None) -> JobInfo:
    """What is known of a job, and of the one who runs it here, if it runs."""
    sets, done = record.sets, record.done
    if sets is None and record.unwritten is None:
        sets = record.next_frame or None
        done = sets if record.status is JobStatus.FINISHED else None
        if record.runs_here and sets is not None:
            done = sets - len(record.open_frames)
    if coordinator is not None:
        sets, done = coordinator.frames.added, coordinator.frames.opened - len(coordinator.frames.open)
    return _info(
        record,
        first=record.log.first if record.log.backing is None else 0,
        events=record.log.readable,
        sets=sets,
        done=done,
        accepts=coordinator is not None and coordinator.accepts,
    )


def summary_info(summary: JobSummary, *, readable: bool) -> JobInfo:
    """What is known of a job that ended long ago; ``readable``: whether its log stands in a store."""
    first = 0 if readable else summary.events
    return _info(summary, first=first, events=summary.events, sets=summary.sets, done=summary.done)


def _info(
    found: JobRecord | JobSummary,
    *,
    first: int,
    events: int,
    sets: int | None = None,
    done: int | None = None,
    accepts: bool = False,
) -> JobInfo:
    return JobInfo(
        job_id=found.job_id,
        status=found.status,
        reason=found.reason,
        pipeline=found.plan.pipeline,
        places=found.plan.places,
        label=found.label,
        created=found.created,
        finished=found.finished,
        first=first,
        events=events,
        errors=found.error_count,
        sets=sets,
        done=done,
        accepts=accepts,
    )
