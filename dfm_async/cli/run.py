"""``dfm-async run``: run a pipeline, show its progress, write its results."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

from dfm_async.base.text import columns
from dfm_async.cli.command_options import Checkpoint, Output, RunOptions, TargetName
from dfm_async.cli.command_runner import BadInput, Exit, Unwritable, exit_of_status
from dfm_async.cli.flare.kits import flare_options
from dfm_async.cli.params import ParameterFile, ParameterSet, parameter_rows, parse_params
from dfm_async.cli.references import find_federation, find_pipeline, set_workers
from dfm_async.cli.reload import Reloading
from dfm_async.cli.results import check_places, writer_of
from dfm_async.cli.terminal import StandardOutput
from dfm_async.cli.view import LineView, LiveView, counted, follow, logged, view_of, watched
from dfm_async.errors import DfmError, JobAborted, JobExists, JobFailed, JobInterrupted, ParameterError
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.checks import moment
from dfm_async.model.policies import RetryPolicy
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import parameter_types
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.telemetry.sinks import FileSink

_EARLIEST: Final = datetime(2001, 9, 9, tzinfo=UTC).timestamp()
_LATEST: Final = datetime(2286, 1, 1, tzinfo=UTC).timestamp()
"""Numbers outside of these are not meant as seconds since 1970, but as a year, a date, or in milliseconds."""

Around: TypeAlias = Callable[[Session], AbstractAsyncContextManager[None]]
"""What the run of a pipeline is entered with."""


def run_pipeline(
    options: RunOptions, output: Output, around: Around = lambda _: contextlib.nullcontext()
) -> Coroutine[Any, Any, int]:
    """Find what to run, and return the coroutine that runs it to its end and returns the exit code.

    Cancellation cancels the job, and waits until it has stopped. A job in a store is interrupted instead: the same
    command resumes it.
    """
    if options.pipeline == options.params == "-":
        raise BadInput("standard input cannot be both the pipeline and its parameters: write one of them to a file")
    flare = flare_options(options)
    federation, module = find_federation(options.federation, compat=options.compat)
    if options.workers is not None and options.target is TargetName.INLINE:
        raise BadInput("--workers cannot be used with --target inline: everything runs in this process")
    if options.checkpoint is Checkpoint.CALLS and options.store is None:
        raise BadInput("--checkpoint calls needs --store, such as sqlite:///jobs.db: calls are recorded beside it")
    set_workers(federation, options.workers)
    session = Session(
        federation,
        homesite=options.homesite,
        target=options.target.value if flare is None else "flare",
        options=flare,
        store=options.store,
        trace=options.trace,
    )
    view = view_of(quiet=output.quiet, sets=None)
    if not options.reload:
        return _run(session, find_pipeline(options.pipeline, module, federation), options, output, view, around)
    if "-" in (options.pipeline, options.params):
        raise BadInput("--reload runs the pipeline again, but standard input can be read only once: give a file")
    if options.job_id is not None:
        raise BadInput("--reload runs the pipeline again as another job: leave out --job-id")
    reloading = Reloading(options, federation, module, lambda text: view.print(text, "red"))
    pipeline = find_pipeline(options.pipeline, module, federation)
    return _run_again(session, pipeline, options, output, view, around, reloading)


async def _run(
    session: Session, pipeline: Pipeline, options: RunOptions, output: Output, view: LineView, around: Around
) -> int:
    _check_trace(options.trace)
    with logged(view):  # also what workers print while they end
        async with session, around(session):
            return await _run_job(session, pipeline, options, output, view)


async def _run_again(
    session: Session,
    pipeline: Pipeline,
    options: RunOptions,
    output: Output,
    view: LineView,
    around: Around,
    reloading: Reloading,
) -> int:
    """Run a pipeline whenever its code changes, until the command is interrupted."""
    _check_trace(options.trace)

    def choose(federation: Federation, module: ModuleType) -> Pipeline:
        set_workers(federation, options.workers)
        return find_pipeline(options.pipeline, module, federation)

    with reloading, logged(view):
        async with session, around(session):
            while True:
                try:
                    await _run_job(session, pipeline, options, output, view.renewed())
                except (BadInput, DfmError) as error:  # perhaps the next change mends it
                    view.print(str(error), "red")
                view.print(f"waiting for changes in {reloading.folder}; Ctrl-C ends", "dim")
                pipeline = await reloading.next(choose)


async def _run_job(session: Session, pipeline: Pipeline, options: RunOptions, output: Output, view: LineView) -> int:
    stdout = StandardOutput()
    # The same command can only find a job whose id it names.
    durable = options.store is not None
    job_id = secrets.token_hex(8) if options.job_id is None and durable else options.job_id
    plan = await session.prepare(pipeline)
    check_places(output, plan.places)
    file, sets = await _sets(options, plan, session.federation)
    writer = writer_of(output, stdout)
    view.sets = len(sets) if isinstance(sets, list) else None
    with view.shown(stdout):
        live = isinstance(view, LiveView)
        try:
            job = await session.execute(
                plan,
                sets,
                job_id=job_id,
                deadline=options.deadline,
                start_at=None if options.start_at is None else _moment(options.start_at),
                on_error=options.on_error.value,
                concurrency=options.concurrency,
                retry=_retry(options.retry),
                watch=live,
                checkpoint=options.checkpoint.value,
            )
        except JobExists as error:
            raise BadInput(f"{error}, or pass the same parameters again") from error
        except ParameterError as error:
            rows = parameter_rows(plan, pipeline, session.federation)
            raise BadInput(f"{error}\n\n{columns(rows)}" if plan.params else str(error)) from error
        except ValueError as error:  # such as an invalid job id
            raise BadInput(str(error)) from error
        if job.status is JobStatus.INTERRUPTED:  # by an earlier run of the same command
            rest = None if isinstance(sets, list) else _rest(sets, job.info().sets or 0)
            job = await session.resume(job.job_id, input_params=rest, watch=live, accept_changes=options.accept_changes)
        try:
            async with watched(job, view), job.events() as events:
                last = await follow(events, writer, view, output.places or (), options.limit)
            if options.limit is not None and (last is None or not last.status.ended):
                await _stop(job, view, options.limit)
                return Exit.SUCCESS
        except (asyncio.CancelledError, BrokenPipeError, Unwritable):
            if durable:
                _leave(job, view, ours=session._coordinator(job.job_id) is not None)
            else:
                await _cancel(job, view)
            raise
    await _show_end(job, view)
    if file is not None and file.problem is not None:
        raise file.problem
    return exit_of_status(job.status)


def _moment(text: str) -> float:
    """Return a moment in seconds since 1970: they are given, or a date and a time with their offset from UTC.

    Raises:
        BadInput: it is neither.
    """
    try:
        seconds = float(text)
        found: float | datetime = seconds
        if _EARLIEST > seconds >= 0 or seconds > _LATEST:
            now = f"{time.time():.0f} is now"
            raise BadInput(
                f"--start-at {text!r} is not a plausible number of seconds since 1970 ({now}). Write a date and a "
                "time with a time zone, such as 2026-11-20T03:00Z"
            )
    except ValueError:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            problem = f"--start-at {text!r} is not a time such as 2026-11-20T03:00Z or 2026-11-20T03:00+01:00"
            raise BadInput(f"{problem}, nor a number of seconds since 1970") from None
        if found.utcoffset() is None:
            local = found.astimezone().isoformat()
            raise BadInput(
                f"--start-at {text!r} has no time zone: add Z for UTC, or an offset, as in {local}"
            ) from None
    try:
        return moment("--start-at", found)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _retry(attempts: int | None) -> RetryPolicy | None:
    """Return the policy for calls whose operation has none, and for lost workers."""
    return None if attempts is None else RetryPolicy(attempts=attempts, on_worker_lost=attempts - 1)


def _check_trace(path: Path | None) -> None:
    """Raise ``BadInput`` if spans cannot be appended to the file."""
    if path is not None:
        sink = FileSink(path)
        try:
            sink.open()
            sink.close()
        except OSError as error:
            raise BadInput(f"--trace {path}: {error.strerror or error}") from error


async def _sets(
    options: RunOptions, plan: Plan, federation: Federation
) -> tuple[ParameterFile | None, list[ParameterSet] | AsyncIterator[ParameterSet]]:
    given = parse_params(options.param or (), parameter_types(plan, federation))
    if options.params is None:
        return None, [given]
    file = ParameterFile(options.params, given)
    return file, await file.sets()


async def _rest(sets: AsyncIterator[ParameterSet], taken: int) -> AsyncGenerator[ParameterSet, None]:
    """Yield the parameter sets after those that an interrupted job has taken."""
    async for found in sets:
        if taken:
            taken -= 1
        else:
            yield found


async def _cancel(job: Job, view: LineView) -> None:
    """Cancel a job, and wait until every site has confirmed that."""
    view.print("cancelling the job; press Ctrl-C again to exit at once", "yellow")
    outcomes = await job.cancel("cancelled from the command line")
    view.print("job " + job.job_id + " cancelled: " + (", ".join(f"{s} {o}" for s, o in outcomes.items()) or "stopped"))


async def _stop(job: Job, view: LineView, limit: int) -> None:
    """Cancel a job that has enough results."""
    await job.cancel(f"stopped after {counted(limit, 'result')}")
    view.print(f"job {job.job_id} stopped after {counted(limit, 'result')}")


def _leave(job: Job, view: LineView, *, ours: bool) -> None:
    """Show what becomes of a job in a store when the command ends: closing the session interrupts our own jobs."""
    if ours:
        view.print(f"interrupting job {job.job_id}; press Ctrl-C again to exit at once", "yellow")
        view.print(f"the same command with --job-id {job.job_id} resumes it")
    elif not job.status.ended:
        view.print(f"another process runs job {job.job_id}, and continues it", "yellow")


async def _show_end(job: Job, view: LineView) -> None:
    view.status = job.status
    try:
        await job
    except JobFailed as error:
        for hidden in error.errors[view.failures :]:  # errors outside of nodes have no event
            view.print(f"error: {hidden}", "red")
        view.summarize(job.job_id)
    except (JobAborted, JobInterrupted) as error:
        view.summarize(job.job_id, error.reason)
    else:
        view.summarize(job.job_id)
