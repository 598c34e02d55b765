"""``dfm-async run``: runs a pipeline, shows its progress, writes its results."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dfm_async.cli.exits import BadInput, Unwritable, exit_of_status
from dfm_async.cli.following import follow, watched
from dfm_async.cli.params import ParameterFile, ParameterSet, parse_params
from dfm_async.cli.results import FileResults, JsonResults, ResultWriter, TextResults
from dfm_async.cli.streams import StandardOutput
from dfm_async.cli.view import LineView, LiveView, view_of
from dfm_async.errors import JobAborted, JobFailed, JobInterrupted, JobOwned
from dfm_async.federation.federation import Federation
from dfm_async.model.flare import FlareOptions
from dfm_async.model.status import JobStatus
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.planner.plan import Plan, parameter_types
from dfm_async.session.job import Job
from dfm_async.session.session import Session
from dfm_async.telemetry.sinks import FileSink

__all__ = ["Output", "Run", "run_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where results go, and how."""

    as_json: bool = False
    folder: Path | None = None
    places: tuple[str, ...] = ()
    quiet: bool = False

    def writer(self, output: StandardOutput) -> ResultWriter:
        """Makes the one who writes results."""
        if self.folder is not None:
            return FileResults(self.folder, output, as_json=self.as_json)
        return JsonResults(output) if self.as_json else TextResults(output)

    def check_places(self, known: tuple[str, ...]) -> None:
        """Refuses places that a pipeline does not have."""
        for place in self.places:
            if place not in known:
                raise BadInput(f"the pipeline has no place {place!r}; it has: {', '.join(known) or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be run, and how."""

    federation: Federation
    pipeline: Pipeline
    params: tuple[str, ...] = ()
    params_file: str | None = None
    target: Literal["local", "inline"] = "local"
    homesite: str = "home"
    flare: FlareOptions | None = None
    """Where the federation is, if it is past this machine; the target is not used then."""
    store: str | None = None
    job_id: str | None = None
    deadline: float | None = None
    on_error: Literal["continue", "stop"] = "continue"
    trace: Path | None = None
    output: Output = Output()


async def run_job(run: Run) -> int:
    """Runs a job to its end and gives the exit code.

    Being cancelled cancels the job, and waits until it has stopped. A job that is kept in a store is interrupted
    instead: the same command goes on with it.

    Raises:
        DfmError: it cannot be run.
    """
    output = StandardOutput()
    _check_trace(run.trace)
    # Only a job with an id of its own can be found again by the same command.
    job_id = secrets.token_hex(8) if run.job_id is None and run.store is not None else run.job_id
    session = Session(
        run.federation,
        homesite=run.homesite,
        target=run.target if run.flare is None else "flare",
        options=run.flare,
        store=run.store,
        trace=run.trace,
    )
    async with session:
        plan = await session.prepare(run.pipeline)
        run.output.check_places(plan.places)
        file, sets = await _sets(run, plan)
        writer = run.output.writer(output)
        view = view_of(quiet=run.output.quiet, sets=len(sets) if isinstance(sets, list) else None)
        with view.shown(output):
            live = isinstance(view, LiveView)
            try:
                job = await session.execute(
                    plan, sets, job_id=job_id, deadline=run.deadline, on_error=run.on_error, watch=live
                )
            except ValueError as error:  # an id that cannot be one, and the like
                raise BadInput(str(error)) from error
            if job.status is JobStatus.INTERRUPTED:  # left over from before: the same again goes on with it
                rest = None if isinstance(sets, list) else _rest(sets, job.info().sets or 0)
                job = await session.resume(job.job_id, input_params=rest, watch=live)
            try:
                async with watched(job, view), job.events() as events:
                    await follow(events, writer, view, run.output.places)
            except (asyncio.CancelledError, BrokenPipeError, Unwritable):
                if run.store is None:
                    await _cancel(job, view)
                else:
                    _leave(job, view, ours=session.coordinator(job.job_id) is not None)
                raise
        await _tell_end(job, view)
    if file is not None and file.problem is not None:
        raise file.problem
    return exit_of_status(job.status)


def _check_trace(path: Path | None) -> None:
    """Refuses a file that spans cannot be appended to."""
    if path is not None:
        sink = FileSink(path)
        try:
            sink.open()
            sink.close()
        except OSError as error:
            raise BadInput(f"--trace {path}: {error.strerror or error}") from error


async def _sets(run: Run, plan: Plan) -> tuple[ParameterFile | None, list[ParameterSet] | AsyncIterator[ParameterSet]]:
    given: dict[str, Any] = parse_params(run.params, parameter_types(plan, run.federation))
    if run.params_file is None:
        return None, [given]
    file = ParameterFile(run.params_file, given)
    return file, await file.sets()


async def _rest(sets: AsyncIterator[ParameterSet], taken: int) -> AsyncGenerator[ParameterSet, None]:
    """Gives the parameter sets behind those that an interrupted job has taken already."""
    async for found in sets:
        if taken:
            taken -= 1
        else:
            yield found


async def _cancel(job: Job, view: LineView | LiveView) -> None:
    """Cancels a job that nobody wants any more, and waits until every site has confirmed it."""
    view.say("cancelling the job; Ctrl-C again ends at once", "yellow")
    try:
        outcomes = await job.cancel("cancelled from the command line")
    except JobOwned as error:
        view.say(f"process {error.pid} on {error.host} runs the job, and goes on with it", "yellow")
        return
    view.say("job " + job.job_id + " cancelled: " + (", ".join(f"{s} {o}" for s, o in outcomes.items()) or "stopped"))


def _leave(job: Job, view: LineView | LiveView, *, ours: bool) -> None:
    """Say what becomes of a job in a store when the command ends: closing the session interrupts it if it is ours."""
    if ours:
        view.say(f"interrupting job {job.job_id}; Ctrl-C again ends at once", "yellow")
        view.say(f"the same command with --job-id {job.job_id} goes on with it")
    elif not job.status.ended:
        view.say(f"another process runs job {job.job_id}, and goes on with it", "yellow")


async def _tell_end(job: Job, view: LineView | LiveView) -> None:
    view.status = job.status
    try:
        await job
    except JobFailed as error:
        for hidden in error.errors[view.failures :]:  # those that belong to no node have no event
            view.say(f"error: {hidden}", "red")
        view.sum_up(job.job_id)
    except (JobAborted, JobInterrupted) as error:
        view.sum_up(job.job_id, error.reason)
    else:
        view.sum_up(job.job_id)
