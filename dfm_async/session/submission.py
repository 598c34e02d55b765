"""Submitting jobs: new ones, interrupted ones that go on, and further parameter sets for those that run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from dfm_async.base.tasks import completed
from dfm_async.base.wall_clock import wall_time
from dfm_async.engine.frames import Row
from dfm_async.engine.job_table import JobControl
from dfm_async.engine.target import AlreadySubmitted, Target
from dfm_async.errors import (
    DfmError,
    JobExists,
    JobInterrupted,
    JobNotFound,
    JobOwned,
    ParameterError,
    StoreError,
)
from dfm_async.federation.federation import Federation
from dfm_async.model.ids import Frame, JobId
from dfm_async.model.info import FailedSet
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.status import JobStatus
from dfm_async.planning.forking import ForkedCalls
from dfm_async.planning.plan import Plan
from dfm_async.results.record import JobRecord, Journal
from dfm_async.results.unfinished import UnfinishedSets
from dfm_async.results.watching import JobActivity
from dfm_async.runtime.operation_errors import cancel_task, is_our_cancellation
from dfm_async.session.callbacks import Callbacks
from dfm_async.session.job import Job
from dfm_async.session.lifecycle import Supervisor
from dfm_async.session.parameters import ParameterSets, event_json, is_stream, stored_row
from dfm_async.session.preparation import Preparation
from dfm_async.session.profiling import SessionProfile
from dfm_async.session.watch import Waits
from dfm_async.telemetry.traces import ApplicationSpan, Traces

if TYPE_CHECKING:
    from dfm_async.session.durable import SessionJobs

_log = logging.getLogger(__name__)

_ROWS: Final = 64
"""The number of parameter sets that are added at once."""

Params: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]] | None
"""One parameter set, several, a stream of them, or none yet."""


class Submission:
    """Submit the jobs of one session, and steer those that run.

    ``grace`` is the grace period of running operations when a resumed job has to stop, in seconds.
    """

    def __init__(
        self,
        *,
        target: Target,
        federation: Federation,
        durable: SessionJobs | None,
        preparation: Preparation,
        params: ParameterSets,
        traces: Traces,
        profile: SessionProfile,
        supervisor: Supervisor,
        grace: float,
    ) -> None:
        self._target = target
        self._federation = federation
        self._jobs = target.jobs
        self._durable = durable
        self._preparation = preparation
        self._params = params
        self._pack_rows = params.pack
        self._traces = traces
        self._profile = profile
        self._supervisor = supervisor
        self._grace = grace

    def waits(self) -> Waits:
        """Return what explains why jobs wait now."""
        return Waits(self._target, self._federation)

    # new jobs

    async def check_params(self, plan: Plan, params: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Check parameter sets.

        Raises:
            ParameterError: they do not fit the pipeline.
        """
        await self._params.pack_in_turns(plan, params)

    async def execute(
        self,
        plan: Plan,
        input_params: Params,
        spec: JobSpec,
        *,
        autostop: bool,
        id_chosen: bool,
        callbacks: Callbacks | None,
        began: tuple[float, int],
    ) -> Job:
        """Start a job; return when it runs, or waits for its turn. See :meth:`Session.execute`.

        If the caller has chosen the id, an equal job with the same id is the same job. ``began`` is when the call
        began: by the clock of the loop, and in nanoseconds since 1970.
        """
        stream = input_params if is_stream(input_params) else None
        given = stream is None and input_params is not None
        rows = await self._params.pack_in_turns(plan, input_params) if given else []  # type: ignore[arg-type]
        if id_chosen:
            spec = msgspec.structs.replace(spec, fingerprint=self._params.fingerprint(plan, input_params))
        record = JobRecord(spec, plan)
        record.activity = JobActivity() if spec.watch else None
        if id_chosen and (known := self._jobs.find(spec.job_id)) is not None:
            return self._same(known, record)
        coordinator = self._target.coordinate(record, self._pack_rows)
        self._add(coordinator, rows, last=autostop and given)
        with self._supervisor.submitting, self._traces.execution(began[1], plan.pipeline) as execution:
            if self._durable is not None and not await self._store(self._durable, coordinator, rows, id_chosen):
                return self._same(await self._durable.find(record.job_id), record)
            job = Job(self, record.job_id, record)
            try:
                self._supervisor.check_open()
                if callbacks is not None:
                    job._start_callbacks(self._supervisor.spawn, callbacks)
                if spec.deadline is not None and spec.start_at is None:
                    coordinator.watch_deadline(began[0])
                await self._launch(coordinator, execution, stream, autostop)
                self._launched(record.job_id, resumed=False)
            except AlreadySubmitted:
                return self._same(await self._target.find(record.job_id), record)
            except BaseException:
                await completed(self._withdraw(coordinator))
                raise
        return job

    async def _launch(
        self,
        coordinator: JobControl,
        execution: ApplicationSpan | None,
        stream: AsyncIterable[Mapping[str, Any]] | None,
        autostop: bool,
    ) -> None:
        if execution is not None:
            plan = coordinator.plan
            coordinator.trace = execution.job(coordinator.record.job_id, plan.pipeline, plan.sites_at)
            self._profile.watch(coordinator)
        if stream is not None:
            self._supervisor.spawn(self._feed(stream, coordinator, autostop))
        await self._target.submit(coordinator)

    def _launched(self, job_id: str, *, resumed: bool) -> None:
        """Let other processes steer a job."""
        if self._durable is not None and self._durable.owned is not None:
            self._durable.owned.launched(job_id, resumed=resumed)

    def _same(self, known: JobRecord | None, wanted: JobRecord) -> Job:
        """Return the job that was submitted before with the same id and the same content."""
        if known is None or known.fingerprint != wanted.fingerprint:
            raise JobExists(wanted.job_id)
        return Job(self, known.job_id, known)

    async def _store(self, durable: SessionJobs, coordinator: JobControl, rows: list[Row], id_chosen: bool) -> bool:
        """Write a new job to the store; False if its id is taken. Cancelled, it leaves nothing there."""
        record, stopped = coordinator.record, coordinator.frames.stopped

        async def undo(created: bool) -> None:
            if created:
                self._jobs.forget(record.job_id)
                await durable.forget(record)

        # Two calls with one id must not run at the same time: the second has to find the job of the first.
        async with durable.lock if id_chosen else contextlib.AsyncExitStack():
            work = durable.create(record, rows, plan=durable.values.plan(record.plan), stopped=stopped)
            return await completed(work, undo, lambda _: durable.store.withdraw(record.job_id))

    async def _withdraw(self, coordinator: JobControl) -> None:
        """Drop a job that was not submitted after all."""
        record = coordinator.record
        self._jobs.forget(record.job_id)
        if self._durable is not None:
            await self._durable.forget(record)
        coordinator.halt(JobStatus.ABORTED, "it was not submitted", coordinator.spec.grace)

    # interrupted jobs

    async def resume(
        self, job_id: str, priority: int, input_params: Params, watch: bool, *, accept_changes: bool
    ) -> Job:
        """Go on with an interrupted job. See :meth:`Session.resume`."""
        assert self._durable is not None  # noqa: S101 - the caller has checked it
        stream = input_params if is_stream(input_params) else None
        start = time.time_ns()
        with self._supervisor.submitting:
            async with self._durable.lock:
                running = self._jobs.coordinator(job_id)
                if running is not None:
                    return Job(self, job_id, running.record)
                known = await self._durable.find(job_id)
                rows: list[Row] = []
                if known is not None:
                    self._durable.check_resumable(job_id, known.status)
                    self._preparation.check_offered(known.plan)
                    if not accept_changes:
                        advice = f"session.resume({job_id!r}, accept_changes=True) runs the rest with it"
                        self._preparation.check_code(known.plan, known.spec.code, advice)
                    if stream is None and input_params is not None:
                        rows = self._params.pack(known.plan, input_params)  # type: ignore[arg-type]
                work = self._durable.take_over(job_id, more=input_params is not None)
                left = await completed(work, self._durable.give_back, asyncio.Task.cancel)
                changed = {"grace": self._grace, "priority": priority, "watch": watch}
                changed |= {"measured": self._profile.measuring, "sampled": self._profile.sampling}
                left.record.spec = msgspec.structs.replace(left.record.spec, **changed)
                left.record.activity = JobActivity() if watch else None
                coordinator = self._target.coordinate(left.record, self._pack_rows)
                waits = itertools.chain.from_iterable(left.history.waits.values())
                coordinator.resume(left.rows, left.frames, left.history.seen, left.history.failed, waits)
                coordinator.frames.stopped = left.stopped
                coordinator.add(rows)
                if left.record.spec.fed and stream is None:
                    coordinator.stop()
            with self._traces.execution(start, left.record.plan.pipeline, resumed=True) as execution:
                try:
                    self._supervisor.check_open()
                    await self._launch(coordinator, execution, stream, left.record.spec.fed)
                    self._launched(job_id, resumed=True)
                except BaseException:
                    coordinator.shut_down("it was not submitted again", coordinator.spec.grace)
                    raise
        return Job(self, job_id, left.record)

    # parameter sets

    def _add(self, coordinator: JobControl, rows: list[Row], *, last: bool = False) -> None:
        """Add parameter sets to a job, and keep them until they succeed, unless the store does."""
        if self._durable is None and rows:
            log = coordinator.record.log
            if log.unfinished is None:
                log.unfinished = UnfinishedSets()
            log.unfinished.add(coordinator.frames.added, rows)
        coordinator.add(rows, last=last)

    async def failures(self, record: JobRecord) -> list[FailedSet]:
        """Return the parameter sets of an ended job that have not succeeded. See :meth:`Job.failures`."""
        if record.status is JobStatus.FINISHED:
            return []
        outcome = record.outcome() or DfmError(f"job {record.job_id} is {record.status.value}")
        if self._durable is not None:
            stored = await self._durable.unfinished(record)
            ended = record.status.terminal  # the sets of an interrupted job can still be done
            found = [(index, params, error) for index, (params, error) in stored.items() if ended or error is not None]
            return [FailedSet(index=index, params=params, error=error or outcome) for index, params, error in found]
        sets = record.log.unfinished
        if sets is None:
            why = "their application keeps them, as long as it keeps the log of the job"
            raise DfmError(f"the parameter sets of job {record.job_id} are not known here: {why}")
        numbers = sets.numbers
        if missing := [index for index in numbers if sets.rows.get(index) is None]:
            which = f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            problem = f"the parameters of set {which} of job {record.job_id} were not kept"
            raise DfmError(f"{problem}: they were too large, or came from another job. Use a store to keep all of them")
        return [
            FailedSet(index=index, params=self._unpacked(sets.rows[index]), error=sets.error(index) or outcome)
            for index in numbers
        ]

    def _unpacked(self, row: Row | None) -> dict[str, Any]:
        codec = self._target.codec
        values = codec.loads(codec.payload([list((row or {}).values())]))
        return dict(zip(row or {}, values[0], strict=True))

    async def retry_failed(self, record: JobRecord, changed: Mapping[str, Any]) -> Job:
        """Run the failed parameter sets of a job again, as a new job. See :meth:`Job.retry_failed`."""
        self._supervisor.check_open()
        if record.status is JobStatus.INTERRUPTED:
            raise DfmError(f"job {record.job_id} is interrupted: session.resume runs the rest of it")
        failed = await self.failures(record)
        if not failed:
            raise DfmError(f"job {record.job_id} has no failed parameter sets")
        await self._preparation.check(record.plan)
        unchanged = self._durable is not None and record.spec.code == self._preparation.code(record.plan)
        params = {found.index: found.params for found in failed}
        return await self._run_again(
            record, params, {"retry_of": record.spec.job_id, **changed}, _every_call if unchanged else None
        )

    async def fork(
        self, record: JobRecord, from_node: str, frame: Frame, changed: Mapping[str, Any], *, accept_changes: bool
    ) -> Job:
        """Run a job again from a node on, as a new job. See :meth:`Job.fork`."""
        self._supervisor.check_open()
        if self._durable is None:
            raise DfmError("only sessions with a store record calls: Session(..., store='sqlite:///jobs.db')")
        plan, before = record.plan, record.spec
        fork = ForkedCalls(plan.nodes, from_node, frame)
        self._preparation.check_offered(plan)
        await self._preparation.check(plan)
        if not accept_changes:
            at = f", {frame[0] if len(frame) == 1 else frame!r}" if frame else ""
            call = f"job.fork({from_node!r}{at}, accept_changes=True)"
            advice = f"fork from a node that calls it, or use its recorded values with {call}"
            self._preparation.check_code(plan, before.code, advice, {node.label for node in fork.kept})
        params = await self._durable.params(record, frame[0] if frame else None)
        if len(frame) > 1:
            recorded = await self._durable.recorded_frames(before, fork.label)
            if not any(found[: len(frame)] == frame for found in recorded):
                raise ParameterError([_not_recorded(record.job_id, fork.label, frame, recorded)])
        return await self._run_again(record, params, {"fork_of": before.job_id, **changed}, fork.is_kept)

    async def _run_again(
        self,
        record: JobRecord,
        params: Mapping[int, Mapping[str, Any]],
        changed: Mapping[str, Any],
        is_kept: Callable[[str, Frame], bool] | None,
    ) -> Job:
        """Run parameter sets of a job as a new job that uses the recorded calls which are kept, if any are."""
        began = asyncio.get_running_loop().time(), time.time_ns()
        spec = msgspec.structs.replace(
            record.spec,
            job_id=JobId(os.urandom(8).hex()),
            created=wall_time(),
            fingerprint=None,
            start_at=None,
            fed=False,
            measured=self._profile.measuring,
            sampled=self._profile.sampling,
            retry_of=None,
            fork_of=None,
            checkpoints="" if self._durable is None else os.urandom(16).hex(),
            code=() if self._durable is None else self._preparation.code(record.plan),
        )
        spec = msgspec.structs.replace(spec, **changed)
        if self._durable is not None and is_kept is not None:
            sets = {index: number for number, index in enumerate(params)}
            await self._durable.reuse_checkpoints(record.spec, spec, sets, is_kept)
        return await self.execute(
            record.plan, list(params.values()), spec, autostop=True, id_chosen=False, callbacks=None, began=began
        )

    async def _feed(self, stream: AsyncIterable[Mapping[str, Any]], coordinator: JobControl, autostop: bool) -> None:
        """Pull parameter sets from the application as fast as the job accepts them. A job that ends closes them."""
        task, pulling = asyncio.current_task(), False

        def ended(_: JobControl) -> None:
            if pulling and task is not None:  # the next one may never come
                cancel_task(task)

        try:
            coordinator.on_end(ended)
            sets = aiter(stream)
            while coordinator.accepts:
                pulling = True
                try:
                    params = await anext(sets)
                except StopAsyncIteration:
                    break
                finally:
                    pulling = False
                self._add(coordinator, self._params.pack(coordinator.plan, params))
                await coordinator.room()
            else:
                return
        except DfmError as error:
            coordinator.fail(error)
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            # The application's own iterator: its failure is the job's.
            failed = ParameterError([f"the stream of parameters raised {type(error).__name__}: {error}"])
            failed.__cause__ = error
            coordinator.fail(failed)
        else:
            if autostop:
                coordinator.stop()
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                try:
                    await close()
                except BaseException as error:
                    if is_our_cancellation(error):
                        raise
                    # The job has what it needs, or has failed already.
                    _log.warning("the stream of parameters raised when it was closed", exc_info=True)

    async def send_params(self, job_id: str, params: Any) -> None:
        """Add parameter sets to a job. See :meth:`Job.send_input_params`."""
        coordinator = self.coordinator(job_id)
        if coordinator is None and self._durable is not None:
            await self._send_elsewhere(self._durable, job_id, params)
            return
        if coordinator is None or not coordinator.accepts:
            closed = "the job accepts no further parameter sets: its input was stopped, or it has ended"
            raise self._refusal(job_id, coordinator, closed)
        rows = await self._params.pack_in_turns(coordinator.plan, params)
        journal = coordinator.record.journal
        for start in range(0, len(rows), _ROWS):
            await coordinator.room()
            if not coordinator.accepts:
                raise coordinator.refusal(f"the job ended: it has taken {start} of {len(rows)} parameter sets")
            self._add(coordinator, rows[start : start + _ROWS])
        await self._written(coordinator.record, journal)

    def _refusal(self, job_id: str, coordinator: JobControl | None, problem: str) -> DfmError:
        """Return the error for what a job does not take: that it is interrupted, or else the problem."""
        steered = coordinator or self._jobs.find(job_id)
        return ParameterError([problem]) if steered is None else steered.refusal(problem)

    async def _written(self, record: JobRecord, journal: Journal | None) -> None:
        """Wait until what was passed to the journal of a job is in the store.

        Raises:
            StoreError: it cannot be written: another process may have taken the job over.
        """
        if self._durable is not None:
            store = self._durable.store
            await store.flush()
            if record.journal is not journal or journal is None:
                problem = f"job {record.job_id} belongs to another process now, or could not be written"
                raise record.unwritten or StoreError(store.path, problem, "Steer it again: it may run elsewhere")

    async def _send_elsewhere(self, durable: SessionJobs, job_id: str, params: Any) -> None:
        """Add parameter sets to a job that another process runs."""
        self._supervisor.check_open()
        record = await durable.find(job_id)
        if record is None:
            raise JobNotFound(job_id)
        rows = await self._params.pack_in_turns(record.plan, params)
        for start in range(0, len(rows), _ROWS):
            try:
                await durable.remote.send(job_id, [stored_row(row) for row in rows[start : start + _ROWS]])
            except JobInterrupted as error:
                taken = f"; {start} of {len(rows)} parameter sets were taken"
                raise JobInterrupted(job_id, error.reason + taken) from error

    async def send_event(self, job_id: str, name: str, value: Any, frame: int | None) -> None:
        """Send an event to a parameter set of a job. See :meth:`Job.send`."""
        if not isinstance(frame, int | None):
            raise ParameterError([f"event {name!r}: frame= is the number of a parameter set, such as 0, not {frame!r}"])
        coordinator = self.coordinator(job_id)
        if coordinator is None:
            await self._send_event_elsewhere(job_id, name, value, frame)
            return
        await coordinator.send_event(name, event_json(coordinator.plan, name, value), frame)
        if self._durable is not None:
            if coordinator.record.journal is not None:
                coordinator.record.journal.flush()
            await self._durable.store.flush()
            if coordinator.record.unwritten is not None:
                raise coordinator.record.unwritten

    async def _send_event_elsewhere(self, job_id: str, name: str, value: Any, frame: int | None) -> None:
        """Send an event to a job that another process may run."""
        record = None
        if self._durable is not None:
            self._supervisor.check_open()
            record = await self._durable.find(job_id)
        if self._durable is None or record is None or record.status.terminal:
            raise self._refusal(job_id, None, f"job {job_id} takes no event {name!r}: it does not run")
        await self._durable.remote.send_event(job_id, name, event_json(record.plan, name, value), frame)

    # steering

    def coordinator(self, job_id: str) -> JobControl | None:
        """Return what runs a job, while it runs here."""
        return self._jobs.coordinator(job_id)

    async def stop_input(self, job_id: str) -> None:
        """Take no further parameter sets for a job. See :meth:`Job.send_stop_frame`."""
        coordinator = self.coordinator(job_id)
        if coordinator is not None:
            record, journal = coordinator.record, coordinator.record.journal
            ended = record.status.terminal
            coordinator.stop()
            if not ended:
                await self._written(record, journal)
        elif self._durable is not None:
            self._supervisor.check_open()
            await self._durable.remote.stop(job_id)

    async def cancel(self, record: JobRecord, reason: str, grace: float) -> dict[str, str]:
        """Stop a job. See :meth:`Job.cancel`."""
        while True:
            coordinator = self.coordinator(record.job_id)
            if coordinator is not None and not coordinator.record.status.ended:
                record = coordinator.record
                coordinator.halt(JobStatus.ABORTED, reason, grace)
                coordinator.shorten(grace)
                await record.completion_event.wait()
                if record.unwritten is None:
                    return dict(coordinator.outcomes)
                # Another process may have taken the job over meanwhile.
            if self._durable is None or record.status.terminal:
                return {}
            self._supervisor.check_open()
            try:
                outcomes = await self._durable.remote.cancel(record.job_id, reason, grace)
            except JobInterrupted:
                with contextlib.suppress(JobOwned):  # it was resumed
                    await self._durable.abort(record.job_id, reason)
                    return {}
            else:
                await self._durable.find(record.job_id)  # its state is known here when this returns
                return outcomes


def _every_call(_node: str, _frame: Frame) -> bool:
    """Keep all recorded calls."""
    return True


def _not_recorded(job_id: str, node: str, frame: Frame, recorded: Sequence[Frame]) -> str:
    """Return why a job cannot be forked at a frame."""
    problem = f"no call of {node} in frame {list(frame)} is recorded of job {job_id}"
    if not recorded:
        return f"{problem}, and no other call of it: execute jobs with checkpoint='calls', or declare checkpoint=True"
    if len(recorded) == 1:
        return f"{problem}: only that in frame {list(recorded[0])} is"
    return f"{problem}: {len(recorded)} are, from {list(recorded[0])} to {list(recorded[-1])}"
