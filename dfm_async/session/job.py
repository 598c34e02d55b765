"""Jobs, as applications use them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, overload

from dfm_async.base.rendering import Shown, renderer
from dfm_async.engine.job_table import JobControl
from dfm_async.errors import DfmError, JobNotFound
from dfm_async.model.events import Failure, Result, Results
from dfm_async.model.ids import Frame
from dfm_async.model.info import FailedSet, JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.record import JobRecord
from dfm_async.results.watching import ActivityReader
from dfm_async.runtime.operation_errors import cancel_task
from dfm_async.session.callbacks import Callbacks
from dfm_async.session.hints import IN_JOBS, no_attribute
from dfm_async.session.stream import ClosableIterator, EventStream, ResultStream
from dfm_async.session.watch import InfoWatch, Waits, job_info

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

_SEARCHED = 1000
"""The number of events that are searched for the newest results."""


class Steering(Protocol):
    """What a job needs of its session."""

    def coordinator(self, job_id: str) -> JobControl | None:
        """Return what runs a job, while it runs here."""

    def waits(self) -> Waits:
        """Return what explains why jobs wait now."""

    async def send_params(self, job_id: str, params: Any) -> None:
        """Add parameter sets to a job."""

    async def stop_input(self, job_id: str) -> None:
        """Take no further parameter sets for a job."""

    async def send_event(self, job_id: str, name: str, value: Any, frame: int | None) -> None:
        """Send an event to a parameter set of a job."""

    async def cancel(self, record: JobRecord, reason: str, grace: float) -> dict[str, str]:
        """Stop a job; return how each location stopped."""

    async def failures(self, record: JobRecord) -> list[FailedSet]:
        """Return the parameter sets of an ended job that have not succeeded."""

    async def retry_failed(self, record: JobRecord, changed: Mapping[str, Any]) -> Job:
        """Run the failed parameter sets of an ended job again, as a new job with some changed options."""

    async def fork(
        self, record: JobRecord, from_node: str, frame: Frame, changed: Mapping[str, Any], *, accept_changes: bool
    ) -> Job:
        """Run an ended job again from a node on, as a new job with some changed options."""


class Job(Shown, Generic[R_co]):
    """One execution of a pipeline, returned by :meth:`Session.execute` and :meth:`Session.reattach`.

    ``async for result in job`` yields its results, ``await job`` waits for its end. A job is independent of its waiters
    and readers: cancelling a task that waits for it or reads it never cancels the job.

    For type checkers, ``R`` of ``Job[R]`` is what the function of the pipeline returns: ``job.results("result")`` and
    ``job.first("result")`` have values of this type. Values of other places, and of a loop over the job, have the type
    ``Any``.
    """

    def __init__(
        self,
        steering: Steering,
        job_id: str,
        record: JobRecord | None,
        after: int | None = None,
    ) -> None:
        self._steering = steering
        self._job_id = job_id
        self._record = record
        self._after = after
        self._callbacks: asyncio.Task[None] | None = None
        self._callback_errors: list[BaseException] | None = None

    @property
    def callback_errors(self) -> list[BaseException]:
        """The errors that callbacks of this handle raised."""
        if self._callback_errors is None:
            self._callback_errors = []
        return self._callback_errors

    @property
    def _coordinator(self) -> JobControl | None:
        """What runs the job; looked up each time: a job that was interrupted gets another one when it is resumed."""
        return self._steering.coordinator(self._job_id)

    def _known(self) -> JobRecord:
        if self._record is None:
            raise JobNotFound(self._job_id)
        return self._record

    # queries

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
        """An event that is set when the job has ended, in any state. Never set for an unknown job."""
        return asyncio.Event() if self._record is None else self._record.completion_event

    def info(self) -> JobInfo:
        """Return the current state of the job."""
        record = self._known()
        return job_info(record, None if record.status.ended else self._coordinator, self._steering.waits())

    @property
    def plan(self) -> Plan:
        """The plan that the job executes.

        Raises:
            JobNotFound: the session does not know the job.
        """
        return self._known().plan

    @property
    def errors(self) -> tuple[DfmError, ...]:
        """The first errors of the job, as far as they are known here; ``info().errors`` is the number of all errors."""
        return tuple(self._known().errors)

    def latest(self, count: int = 5) -> Results:
        """Return the newest results that are in memory, oldest first. Readers still get all results."""
        log = self._known().log
        found: deque[Result] = deque()
        for offset in range(log.readable - 1, max(log.first, log.readable - _SEARCHED) - 1, -1):
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

    async def wait_until_finished(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - the public name
        """Wait for the end, and return whether the job has ended. Does not raise if the job failed.

        Raises:
            ResultsUnread: the job cannot continue, because its log is full and has no reader.
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

    @overload
    def results(
        self,
        place: Literal["result"],
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise"] = "raise",
    ) -> ResultStream[Result[R_co]]: ...
    @overload
    def results(
        self,
        place: str | None = None,
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise"] = "raise",
    ) -> ResultStream: ...
    @overload
    def results(
        self,
        place: Literal["result"],
        after: int | None = None,
        ordered: bool = False,
        *,
        errors: Literal["yield"],
    ) -> ResultStream[Result[R_co] | Failure]: ...
    @overload
    def results(
        self,
        place: str | None = None,
        after: int | None = None,
        ordered: bool = False,
        *,
        errors: Literal["yield"],
    ) -> ResultStream[Result | Failure]: ...
    @overload
    def results(
        self, place: str | None, after: int | None, ordered: bool, errors: Literal["raise", "yield"]
    ) -> ResultStream[Result | Failure]: ...
    def results(
        self,
        place: str | None = None,
        after: int | None = None,
        ordered: bool = False,
        errors: Literal["raise", "yield"] = "raise",
    ) -> Any:
        """Return an iterator over the results.

        Args:
            place: only results of this place.
            after: begin after this offset.
            ordered: yield results in the order of their frames.
            errors: "raise" yields all successful results and then raises if the job failed; "yield" yields failures as
                items: one for each call that failed, or, with ``place``, one for each result of that place that is
                missing.
        """
        record = self._known()
        if errors not in ("raise", "yield"):
            raise ValueError(f"errors must be 'raise' or 'yield', not {errors!r}")
        if place is not None:
            check_places([place], record.plan)
        return ResultStream(record, place, self._after if after is None else after, ordered, errors)

    if not TYPE_CHECKING:  # type checkers refuse these themselves
        __iter__ = ClosableIterator.__iter__

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name, IN_JOBS)

    def __aiter__(self) -> ResultStream:
        return self.results()

    def events(self, after: int | None = None) -> EventStream:
        """Return an iterator over all events of the job."""
        return EventStream(self._known(), self._after if after is None else after)

    def changes(self, interval: float = 0.1) -> InfoWatch:
        """Return an iterator over the state of the job: first the current one, then each change.

        The iterator yields states, not a history: changes that occur faster than they are read, or than the interval,
        are coalesced. The last item is the state at the end. Unlike ``events()`` it reads no log, so the job never
        waits for it.

        Args:
            interval: the smallest number of seconds between items.
        """
        return InfoWatch(self.info, self._known(), interval)

    async def show(self) -> None:
        """Display the job until it has ended: in a notebook as a live view, elsewhere as lines of text.

        Does not raise if the job fails. Cancelling the call ends the view, not the job. If the job was executed with
        ``watch=True``, the view shows the activity of each node.

        Raises:
            ResultsUnread: the job cannot continue, because its log is full and has no reader.
        """
        self._known()
        await renderer().show(self)

    def activity(self, interval: float = 0.1) -> ActivityReader:
        """Return an iterator over the calls of the job's operations: their numbers, and the calls that have ended.

        The first item contains everything so far, each further item the changes. The iterator yields states, not a
        history: changes that occur faster than they are read, or than the interval, are coalesced. It ends with the
        job.

        Args:
            interval: the smallest number of seconds between items.

        Raises:
            DfmError: the job is not watched here: pass ``watch=True`` to ``execute``.
        """
        found = self._known().activity
        if found is None:
            raise DfmError(f"job {self._job_id} is not watched: execute it with watch=True, in this session")
        return found.reader(interval)

    @property
    def watched(self) -> bool:
        """Whether :meth:`activity` is available."""
        return self._record is not None and self._record.activity is not None

    @overload
    async def collect(
        self, place: Literal["result"], errors: Literal["raise", "skip"] = "raise"
    ) -> Results[Result[R_co]]: ...
    @overload
    async def collect(self, place: Literal["result"], errors: Literal["yield"]) -> list[Result[R_co] | Failure]: ...
    @overload
    async def collect(self, place: str | None = None, errors: Literal["raise", "skip"] = "raise") -> Results: ...
    @overload
    async def collect(self, place: str | None = None, *, errors: Literal["yield"]) -> list[Result | Failure]: ...
    @overload
    async def collect(
        self, place: str | None, errors: Literal["raise", "skip", "yield"]
    ) -> Results | list[Result | Failure]: ...
    async def collect(self, place: str | None = None, errors: Literal["raise", "skip", "yield"] = "raise") -> Any:
        """Wait until the job has ended, and return its results as a list.

        Args:
            place: only results of this place.
            errors: "raise" raises if the job failed; "skip" returns the successful results; "yield" returns failures as
                items, in their order, as :meth:`results` does. An aborted or interrupted job raises in any case.
        """
        if errors == "skip":
            return Results([item async for item in self.results(place, errors="yield") if type(item) is Result])
        if errors == "yield":
            return [item async for item in self.results(place, errors="yield")]
        return Results([result async for result in self.results(place, errors=errors)])

    async def failures(self) -> list[FailedSet]:
        """Wait until the job has ended, and return its failed parameter sets, with their parameters and first errors.

        They include sets that were not completed because the job failed or was aborted.

        Raises:
            DfmError: the parameters are not known here. Without a store, a session keeps up to 64 MiB of them for each
                job, as long as the log of the job.
        """
        record = self._known()
        await record.wait()
        return await self._steering.failures(record)

    async def retry_failed(
        self, label: str | None = None, priority: int | None = None, watch: bool | None = None
    ) -> Job[R_co]:
        """Wait until the job has ended, and run the parameter sets of :meth:`failures` again, as a new job.

        ``info().retry_of`` of the new job is the id of this one. The new job has the options of this one, unless others
        are passed.

        Args:
            label: as in :meth:`Session.execute`.
            priority: as in :meth:`Session.execute`.
            watch: as in :meth:`Session.execute`.

        Raises:
            DfmError: no set has failed, the parameters are not known here, or the job is interrupted: then resume it.
            PipelineError: the federation does not offer the operations of the job, or their parameters have changed.
        """
        record = self._known()
        await record.wait()
        given = {"label": label, "priority": priority, "watch": watch}
        return await self._steering.retry_failed(record, {name: v for name, v in given.items() if v is not None})

    async def fork(
        self,
        from_node: str,
        frame: int | Sequence[int] | None = None,
        accept_changes: bool = False,
        label: str | None = None,
        priority: int | None = None,
        watch: bool | None = None,
    ) -> Job[R_co]:
        """Wait until the job has ended, and run it again from a node, as a new job.

        The calls of the node run again, and all calls that depend on them. Other calls that were recorded are not
        repeated. ``info().fork_of`` of the new job is the id of this one. The new job has the options of this one,
        unless others are passed.

        Args:
            from_node: the node, such as ``train#0``, or its operation, if only one node calls it.
            frame: begin at one call of the node: the index of its parameter set, followed by the index in each
                enclosing loop, from the outermost to the innermost. The new job then has only this parameter set. A
                prefix of a frame selects all calls whose frames begin with it; None selects all calls of the node.
            accept_changes: use recorded values of operations whose code has changed since this job was submitted.
            label: as in :meth:`Session.execute`.
            priority: as in :meth:`Session.execute`.
            watch: as in :meth:`Session.execute`.

        Raises:
            PipelineError: the fork would use recorded values of operations whose code has changed, or the federation
                does not offer the operations of the job.
            ParameterError: there is no such node or parameter set, or no such call is recorded.
            DfmError: the session has no store.
        """
        record = self._known()
        await record.wait()
        given = {"label": label, "priority": priority, "watch": watch}
        changed = {name: v for name, v in given.items() if v is not None}
        return await self._steering.fork(record, from_node, _frame(frame), changed, accept_changes=accept_changes)

    @overload
    async def first(self, place: Literal["result"]) -> Result[R_co]: ...
    @overload
    async def first(self, place: str | None = None) -> Result: ...
    async def first(self, place: str | None = None) -> Result:
        """Wait for the first result, of one place or of any.

        Raises:
            LookupError: the job finished without a result.
        """
        async with self.results(place) as results:
            async for result in results:
                return result
        where = "" if place is None else f" for place {place!r}"
        raise LookupError(f"job {self._job_id} finished without a result{where}")

    # steering

    async def send_input_params(self, params: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add one or several parameter sets to an open job. Wait while too many are in flight.

        With a store, the sets are in the store when this returns, even if another process runs the job.

        Raises:
            ParameterError: the parameters do not fit the pipeline, or the job accepts no more parameter sets.
            JobInterrupted: the job is interrupted. If another process ran it, the message states how many sets were
                accepted.
        """
        self._known()
        await self._steering.send_params(self._job_id, params)

    async def send(self, name: str, value: Any = None, *, frame: int | None = None) -> None:
        """Send an event to a parameter set of the job, where a ``Wait`` for an event of this name consumes it.

        If no ``Wait`` is waiting for the event yet, the job keeps it: up to 1000 events for each parameter set, and 64
        MB for the job. With a store, the event is committed when this returns.

        Args:
            name: the name of the event.
            value: its value, up to 64 kB of JSON. It is checked and converted like a parameter.
            frame: the number of the parameter set; None if the job has exactly one.

        Raises:
            EventsFull: too many events are kept, or the log of the job is full. The event was not sent; try again when
                events were consumed, or results were read.
            ParameterError: the pipeline waits for no event of this name, the value does not fit, the parameter set is
                complete, or the job has ended.
            JobInterrupted: the job is interrupted. The event is not sent.
        """
        self._known()
        await self._steering.send_event(self._job_id, name, value, frame)

    async def send_stop_frame(self) -> None:
        """Declare that there are no further parameter sets; the job ends when all are completed.

        Raises:
            JobInterrupted: the job is interrupted: the process that ran it ended before it recorded the end of the
                input.
        """
        self._known()
        await self._steering.stop_input(self._job_id)

    async def cancel(self, reason: str | None = None, grace: float = 5.0) -> dict[str, str]:
        """Stop the job, and return when every site has confirmed that nothing of the job is running any more.

        Operations are cancelled immediately; those that have not stopped after the grace period are killed.

        Returns:
            For each location, how it stopped. The values are "stopped" (within a second); "stopped after grace" (an
            operation took longer than a second to return); "killed" (its process was killed); "retired" (an operation
            does not return; its process accepts no further jobs, and ends with the last of the others that run in it);
            or "abandoned" (an operation in the application's own process does not return). Empty if the job had already
            ended, or had not started.
        """
        return await self._steering.cancel(self._known(), reason or "cancelled", grace)

    async def detach(self) -> None:
        """End the callbacks of this handle. The job continues; ``session.reattach`` returns a new handle."""
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

    def _start_callbacks(
        self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], callbacks: Callbacks
    ) -> None:
        """Have callbacks called for every result, in order."""
        if callbacks:
            stream = ResultStream(self._known(), None, self._after, False, "raise")
            stream.attach()
            self._callbacks = spawn(callbacks.run(stream, self._job_id, self.callback_errors))


def _frame(given: int | Sequence[int] | None) -> Frame:
    """Return a frame that a caller has given; empty for all."""
    numbers = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"frame must be a number, or several, counted from 0, not {given!r}")
    return numbers


def check_places(places: Iterable[str], plan: Plan) -> None:
    """Refuse places that a pipeline does not have."""
    for place in sorted(set(places) - set(plan.places)):
        raise ValueError(f"the pipeline has no place {place!r}; it has: {', '.join(plan.places)}")
