"""The commands and their options. What they do is imported when they run: ``--help`` has to be quick."""

from __future__ import annotations

import functools
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dfm_async.cli.command_options import (
    CompatOption,
    EventOptions,
    FederationArgument,
    JsonOption,
    Output,
    PipelineArgument,
    QuietOption,
    RunOptions,
    ServeOptions,
    ServiceOptions,
    SourceOptions,
    Work,
    command,
    option,
)
from dfm_async.cli.flare.commands import flare as flare_commands
from dfm_async.model.status import JobStatus

app = typer.Typer(
    help="Data pipelines over a federation of sites.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the pretty help takes longer to load than everything else
    context_settings={"help_option_names": ["-h", "--help"]},
)
_STATUSES = ", ".join(status.value for status in JobStatus)


def _version(wanted: bool) -> None:
    if wanted:
        from dfm_async import __version__

        typer.echo(f"dfm-async {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = (
        False
    ),
) -> None:
    """Run pipelines over a federation of sites, and follow jobs."""


@command(app)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the project.", show_default=False)],
) -> None:
    """Create a project: a federation, a pipeline, and tests."""
    from dfm_async.cli.new import create_project

    create_project(name)


@command(app)
def run(options: RunOptions, output: Output) -> Work:
    """Run a pipeline and write its results."""
    from dfm_async.cli.run import run_pipeline

    return run_pipeline(options, output)


@command(app)
def profile(
    options: RunOptions,
    output: Output,
    flame: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The flame graph: .html (a page), .json (speedscope) or .txt (collapsed stacks)."
        ),
    ] = Path("profile.html"),
) -> Work:
    """Run a pipeline, and profile where its calls spend their time."""
    from dfm_async.cli.profile import profile_pipeline

    return profile_pipeline(options, output, flame)


@command(app)
def jobs(
    source: SourceOptions,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="The maximum number of jobs.")] = 50,
    status: Annotated[JobStatus | None, option(f"Only jobs with this status: {_STATUSES}.", "STATUS")] = None,
    pipeline: Annotated[str | None, option("Only jobs of the pipeline with this name.", "NAME")] = None,
    label: Annotated[str | None, option("Only jobs with this label; in a service, of this principal.", "LABEL")] = None,
    since: Annotated[datetime | None, option("Only jobs that were created at this time or later.", "TIME")] = None,
    until: Annotated[datetime | None, option("Only jobs that were created before this time.", "TIME")] = None,
    search: Annotated[str | None, option("Only jobs with these words in id, pipeline or label.", "WORDS")] = None,
    as_json: JsonOption = False,
) -> Work:
    """List the jobs of a service or a store, the newest first."""
    from dfm_async.cli.jobs import list_jobs
    from dfm_async.model.job_filter import JobFilter

    begin, end = (None if moment is None else moment.timestamp() for moment in (since, until))
    wanted = JobFilter(status=status, pipeline=pipeline, label=label, since=begin, until=end, search=search)
    return list_jobs(source, limit, wanted, as_json=as_json)


@command(app)
def top(
    source: ServiceOptions,
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and exit.")] = False,
    as_json: JsonOption = False,
) -> Work:
    """Show the active jobs of a service, and what they wait for."""
    from dfm_async.cli.top import show_top

    return show_top(source, once=once, as_json=as_json)


@command(app)
def attach(source: EventOptions, output: Output) -> Work:
    """Follow a job of a service or a store, and write its results. Ctrl-C does not affect the job."""
    from dfm_async.cli.jobs import attach as attach_job

    return attach_job(source, output)


@command(app)
def logs(
    source: EventOptions,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    as_json: JsonOption = False,
) -> Work:
    """Show the events of a job, one line per event."""
    from dfm_async.cli.jobs import show_log

    return show_log(source, following=following, as_json=as_json)


@command(app)
def cancel(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.", show_default=False)],
    source: SourceOptions,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="The reason, for the log of the job.")
    ] = "cancelled from the command line",
    as_json: JsonOption = False,
) -> Work:
    """Cancel a job of a service or a store."""
    from dfm_async.cli.jobs import cancel as cancel_job

    return cancel_job(source, job, reason, as_json=as_json)


@command(app)
def send(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.", show_default=False)],
    event: Annotated[str, typer.Argument(metavar="EVENT", help="The name of the event.", show_default=False)],
    source: SourceOptions,
    value: Annotated[
        str, typer.Argument(metavar="[VALUE]", help="The value: JSON, or text if the event accepts text.")
    ] = "null",
    frame: Annotated[int | None, option("The parameter set, if the job has several.", "NUMBER")] = None,
    as_json: JsonOption = False,
) -> Work:
    """Send an event to a job of a service or a store that waits for it."""
    from dfm_async.cli.jobs import send as send_event

    return send_event(source, job, event, value, frame, as_json=as_json)


@command(app)
def retry(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.", show_default=False)],
    source: ServiceOptions,
    as_json: JsonOption = False,
) -> Work:
    """Run the failed parameter sets of a job again, as a new job."""
    from dfm_async.cli.jobs import retry as retry_job

    return retry_job(source, job, as_json=as_json)


@command(app, "Run a job again from a node, as a new job.")
def fork(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.", show_default=False)],
    from_node: Annotated[
        str,
        typer.Option(metavar="NODE", help="The first node that runs again, such as train#0.", show_default=False),
    ],
    source: ServiceOptions,
    frame: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="One call of the node: the index of its parameter set, and of each loop iteration."
        ),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Use recorded values of operations whose code has changed.")
    ] = False,
    as_json: JsonOption = False,
) -> Work:
    """Run a job of a service again from a node, as a new job that uses recorded values of earlier nodes."""
    from dfm_async.cli.jobs import fork as fork_job

    return fork_job(source, job, from_node, frame, accept_changes=accept_changes, as_json=as_json)


@command(app, handles_signals=True)
def serve(options: ServeOptions) -> Work:
    """Serve a federation over HTTP, with a live page."""
    from dfm_async.cli.serve import serve_federation

    return serve_federation(options)


@command(app)
def demo(quiet: QuietOption = False) -> Work:
    """Run an example over three sites, and draw its results."""
    from dfm_async.cli.demo import demonstrate

    return demonstrate(quiet=quiet)


class Format(StrEnum):
    """How a pipeline is drawn."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


@command(app)
def graph(
    federation: FederationArgument,
    pipeline: PipelineArgument = None,
    kind: Annotated[Format, typer.Option("--format", "-f", help="The format of the drawing.")] = Format.TEXT,
    output: Annotated[Path | None, option("Write the drawing to this file.", "FILE", "--output", "-o")] = None,
) -> None:
    """Draw a pipeline. A JSON file alone is drawn without sites."""
    from dfm_async.cli.describe import picture, write_text

    write_text(picture(federation, pipeline, kind.value), output)


@command(app)
def explain(
    federation: FederationArgument,
    pipeline: PipelineArgument = None,
    as_json: JsonOption = False,
    costs: Annotated[Path | None, option("Measured costs: a saved profile.", "FILE", "--costs")] = None,
    cores: Annotated[bool, typer.Option("--cores", help="Show which calls can use all cores of their site.")] = False,
) -> None:
    """Show the site of each node of a pipeline, with the reason."""
    from dfm_async.cli.describe import explain as explained
    from dfm_async.cli.describe import explain_cores

    lines = explain_cores if cores else functools.partial(explained, costs=costs)
    for line in lines(federation, pipeline, as_json=as_json):
        typer.echo(line)


@command(app, "Write a typed module for a federation file.")
def stubs(
    federation: Annotated[
        str, typer.Argument(metavar="FEDERATION", help="A federation file (.yaml).", show_default=False)
    ],
    output: Annotated[Path | None, option("Write the module to this file.", "FILE", "--output", "-o")] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; show how the file differs, and fail if there is a difference."),
    ] = False,
    compat: CompatOption = False,
) -> Work:
    """Write a typed module for a federation file, which editors and type checkers read."""
    from dfm_async.cli.describe import write_stubs

    return write_stubs(federation, output, check=check, compat=compat)


@command(app, "Check whether pipelines run on this machine.")
def doctor(as_json: JsonOption = False) -> Work:
    """Check whether pipelines can run on this machine, and suggest fixes."""
    from dfm_async.cli.doctor import machine_findings, show_findings

    return show_findings(machine_findings(), as_json=as_json)


@command(app, "Show the timeline of a trace.")
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, one span per line.", show_default=False)],
    job: Annotated[str | None, option("Only spans of this job.", "JOB")] = None,
    html: Annotated[Path | None, option("Write a page with the timeline.", "FILE")] = None,
    opening: Annotated[bool, typer.Option("--open/--no-open", help="Open that page if there is a desktop.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the statistics of each span name as JSON lines.")
    ] = False,
) -> None:
    """Show the timeline of a trace: in the terminal, and as a page on a desktop."""
    from dfm_async.cli.trace import show_trace

    show_trace(file, job=job, as_json=as_json, html=html, opening=opening)


app.add_typer(flare_commands, name="flare", short_help="Federations on NVIDIA FLARE: on this machine, and distributed.")

_store = typer.Typer(
    help="Stores of jobs: check, migrate, prune and vacuum them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(_store, name="store", short_help="Check, migrate, prune and vacuum stores of jobs.")
StoreArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The store: sqlite:///jobs.db, postgresql://...", show_default=False)
]


@command(_store, "Report damaged jobs.")
def check(store: StoreArgument, as_json: JsonOption = False) -> Work:
    """Report the damaged jobs of a store. Exits with 1 if there are any."""
    from dfm_async.cli.stores import check as check_store

    return check_store(store, as_json=as_json)


@command(_store, "Delete old jobs.")
def prune(
    store: StoreArgument,
    older_than: Annotated[str, option("The minimum time since the jobs ended, such as 30d or 12h.", "TIME")],
    status: Annotated[JobStatus | None, option("Only jobs with this status, such as finished.", "STATUS")] = None,
) -> Work:
    """Delete jobs that ended some time ago, while other processes use the store. Interrupted jobs are kept."""
    from dfm_async.cli.stores import prune as prune_store

    return prune_store(store, older_than, status)


@command(_store, "Return the space of deleted jobs.")
def vacuum(store: StoreArgument) -> Work:
    """Return the space of deleted jobs to the file system. In SQLite, commits of other processes wait until then."""
    from dfm_async.cli.stores import vacuum as vacuum_store

    return vacuum_store(store)


@command(_store, "Migrate a store to the current format.")
def migrate(store: StoreArgument) -> Work:
    """Migrate a store to the current version of its format, as opening it does. Back up the store first."""
    from dfm_async.cli.stores import migrate as migrate_store

    return migrate_store(store)
