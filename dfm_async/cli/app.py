"""The commands and their options. What they do is imported when they run: ``--help`` has to be quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfm_async.cli.flare.commands import flare as flare_commands
from dfm_async.cli.options import CompatOption, FederationArgument, JsonOption

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from dfm_async.cli.sources import JobSource

__all__ = ["app"]

app = typer.Typer(
    help="Data pipelines over a federation of sites.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the pretty help takes longer to load than everything else
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Target(StrEnum):
    """Where a pipeline runs."""

    LOCAL = "local"
    INLINE = "inline"


class OnError(StrEnum):
    """Whether other work goes on after an error."""

    CONTINUE = "continue"
    STOP = "stop"


def _pipeline_names(context: typer.Context, incomplete: str) -> list[str]:
    from dfm_async.cli.completion import complete_pipelines

    return complete_pipelines(context, incomplete)


PipelineArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PIPELINE",
        help="module:name, file.py:name, a name in the federation's module, or a JSON file (- is standard input). "
        "May be left out if the module has exactly one.",
        show_default=False,
        autocompletion=_pipeline_names,
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Tell only errors on standard error.")]
PlaceOption = Annotated[
    list[str] | None,
    typer.Option("--place", metavar="NAME", help="Write only results of this place. Repeatable.", show_default=False),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FOLDER", help="Write each result to a file in this folder.", show_default=False
    ),
]
_HERE = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option(metavar="URL", envvar="DFM_URL", help="The address of a running service.")]
StoreOption = Annotated[
    str | None, typer.Option(metavar="URL", help="A store file instead, as in sqlite:///jobs.db.", show_default=False)
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A file with the token for the service; else DFM_TOKEN is used.", show_default=False
    ),
]
ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="A module or file with the classes of stored values. Repeatable.",
        show_default=False,
    ),
]
AfterOption = Annotated[
    int, typer.Option(min=-1, metavar="OFFSET", help="Begin behind this offset.", show_default=False)
]
FlareOption = Annotated[
    Path | None,
    typer.Option(
        "--flare",
        metavar="KIT",
        help="Run in a federation on NVIDIA FLARE: the folder of a user's startup kit.",
        show_default=False,
    ),
]
UserOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Whose kit it is, if the kit does not say so itself.", show_default=False),
]
BringCodeOption = Annotated[
    bool, typer.Option("--bring-code", help="With --flare: the code of operations comes from here, if sites allow it.")
]
HomesiteOption = Annotated[str, typer.Option(metavar="NAME", help="The application's own site.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        from dfm_async import __version__

        typer.echo(f"dfm-async {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Tell the version.")] = (
        False
    ),
) -> None:
    """Runs pipelines over a federation of sites, and looks at what runs."""


@app.command()
def run(
    federation: FederationArgument,
    pipeline: PipelineArgument = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="NAME=VALUE", help="A parameter. Repeatable.", show_default=False),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Parameter sets: a .json or .jsonl file, or - for JSON lines on standard input."
        ),
    ] = None,
    target: Annotated[Target, typer.Option(help="Worker processes, or everything in this one.")] = Target.LOCAL,
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Keep the job, as in sqlite:///jobs.db.", show_default=False),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Your id for the job. The same again is the same job.", show_default=False),
    ] = None,
    place: PlaceOption = None,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="Abort the job after so many seconds.", show_default=False),
    ] = None,
    on_error: Annotated[OnError, typer.Option(help="Whether other work goes on after an error.")] = OnError.CONTINUE,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append what ran when and where to this file.", show_default=False),
    ] = None,
    compat: CompatOption = False,
    homesite: HomesiteOption = "home",
    flare: FlareOption = None,
    user: UserOption = None,
    bring_code: BringCodeOption = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a pipeline and write its results."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.exits import BadInput
        from dfm_async.cli.flare.connecting import flare_options
        from dfm_async.cli.references import find_federation, find_pipeline
        from dfm_async.cli.running import Output, Run, run_job

        if pipeline == params == "-":
            raise BadInput("standard input cannot be both the pipeline and its parameters: write one of them to a file")
        options = flare_options(flare, user, bring_code=bring_code)
        if options is not None and store is not None:
            raise BadInput("--store is not for --flare: jobs there live in the federation")
        found, module = find_federation(federation, compat=compat)
        wanted = Run(
            federation=found,
            pipeline=find_pipeline(pipeline, module, found),
            params=tuple(param or ()),
            params_file=params,
            target=target.value,
            homesite=homesite,
            flare=options,
            store=store,
            job_id=job_id,
            deadline=deadline,
            on_error=on_error.value,
            trace=trace,
            output=Output(as_json=as_json, folder=output, places=tuple(place or ()), quiet=quiet),
        )
    run_async(lambda: run_job(wanted))


class Status(StrEnum):
    """The states of a job."""

    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"


def _source(
    url: str, store: str | None, token_file: Path | None, modules: list[str] | None = None
) -> AbstractAsyncContextManager[JobSource]:
    """Where the jobs are that a command looks at."""
    from dfm_async.cli.sources import open_source
    from dfm_async.cli.tokens import client_token

    return open_source(url, store, client_token(token_file, url), tuple(modules or ()))


@app.command()
def jobs(
    url: UrlOption = _HERE,
    store: StoreOption = None,
    token_file: TokenFileOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="How many at most.")] = 50,
    status: Annotated[
        Status | None,
        typer.Option(metavar="STATUS", help=f"Only jobs in this state: {', '.join(Status)}.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the jobs of a service or a store, the newest first."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.looking import list_jobs
        from dfm_async.model.status import JobStatus

        source = _source(url, store, token_file)
    wanted = None if status is None else JobStatus(status.value)
    run_async(lambda: list_jobs(source, limit, wanted, as_json=as_json))


@app.command()
def attach(
    job: JobArgument,
    url: UrlOption = _HERE,
    store: StoreOption = None,
    token_file: TokenFileOption = None,
    modules: ImportOption = None,
    after: AfterOption = -1,
    place: PlaceOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Follow a job of a service or a store, and write its results. Ctrl-C leaves the job alone."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.looking import attach as attach_job
        from dfm_async.cli.running import Output

        source = _source(url, store, token_file, modules)
    wanted = Output(as_json=as_json, folder=output, places=tuple(place or ()), quiet=quiet)
    run_async(lambda: attach_job(source, job, after, wanted))


@app.command()
def logs(
    job: JobArgument,
    url: UrlOption = _HERE,
    store: StoreOption = None,
    token_file: TokenFileOption = None,
    modules: ImportOption = None,
    after: AfterOption = -1,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job: one line per event."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.looking import show_log

        source = _source(url, store, token_file, modules)
    run_async(lambda: show_log(source, job, after, following=following, as_json=as_json))


@app.command(short_help="Cancel a job of a service or a store.")
def cancel(
    job: JobArgument,
    url: UrlOption = _HERE,
    store: StoreOption = None,
    token_file: TokenFileOption = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why.")] = "cancelled from the command line",
    as_json: JsonOption = False,
) -> None:
    """Cancel a job of a service, or end an interrupted job of a store for good."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.looking import cancel as cancel_job

        source = _source(url, store, token_file)
    run_async(lambda: cancel_job(source, job, reason, as_json=as_json))


@app.command()
def serve(
    federation: FederationArgument,
    pipelines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PIPELINE",
            help="What clients may run; by default every pipeline of the federation's module.",
            show_default=False,
            autocompletion=_pipeline_names,
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0 takes a free one.")] = 8000,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep jobs, as in sqlite:///jobs.db.", show_default=False)
    ] = None,
    allow_pipelines: Annotated[
        bool, typer.Option("--allow-pipelines", help="Let clients bring pipelines of their own.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file with the token that clients must have; else DFM_TOKEN.", show_default=False
        ),
    ] = None,
    compat: CompatOption = False,
    homesite: HomesiteOption = "home",
    flare: FlareOption = None,
    user: UserOption = None,
    bring_code: BringCodeOption = False,
) -> None:
    """Serve a federation over HTTP, with a live page."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.exits import BadInput
        from dfm_async.cli.flare.connecting import flare_options
        from dfm_async.cli.references import find_federation
        from dfm_async.cli.serving import Serving, chosen_pipelines, serve_federation
        from dfm_async.cli.tokens import server_token

        token = server_token(token_file, host)
        options = flare_options(flare, user, bring_code=bring_code)
        if options is not None and store is not None:
            raise BadInput("--store is not for --flare: jobs there live in the federation")
        found, module = find_federation(federation, compat=compat)
        wanted = Serving(
            federation=found,
            pipelines=chosen_pipelines(pipelines or [], module, found, homesite, allow_none=allow_pipelines),
            homesite=homesite,
            flare=options,
            host=host,
            port=port,
            store=store,
            allow_pipelines=allow_pipelines,
            token=token,
        )
    run_async(lambda: serve_federation(wanted), hears_signals=True)


@app.command()
def demo(quiet: QuietOption = False) -> None:
    """Run an example over three sites, and draw its results."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.demo import demonstrate
    run_async(lambda: demonstrate(quiet=quiet))


class Format(StrEnum):
    """How a pipeline is drawn."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


@app.command()
def graph(
    federation: FederationArgument,
    pipeline: PipelineArgument = None,
    kind: Annotated[Format, typer.Option("--format", "-f", help="What to draw.")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it to this file.", show_default=False),
    ] = None,
) -> None:
    """Draw a pipeline. A JSON file alone is drawn without sites."""
    from dfm_async.cli.program import plain_errors

    with plain_errors():
        from dfm_async.cli.pictures import picture, write_text

        write_text(picture(federation, pipeline, kind.value), output)


@app.command()
def explain(
    federation: FederationArgument,
    pipeline: PipelineArgument = None,
    as_json: JsonOption = False,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="Measured costs: a profile that was saved.", show_default=False),
    ] = None,
) -> None:
    """Tell where each node of a pipeline runs, why, and what it costs."""
    from dfm_async.cli.program import plain_errors

    with plain_errors():
        from dfm_async.cli.pictures import explain as explained

        for line in explained(federation, pipeline, as_json=as_json, costs=costs):
            typer.echo(line)


@app.command(short_help="Write a typed module of a federation file.")
def stubs(
    federation: Annotated[
        str, typer.Argument(metavar="FEDERATION", help="A federation file (.yaml).", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it to this file.", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; show how the file differs, and fail if it does.")
    ] = False,
    compat: CompatOption = False,
) -> None:
    """Write a typed module of a federation file, for editors and type checkers."""
    from dfm_async.cli.program import plain_errors

    with plain_errors():
        from dfm_async.cli.stubs import write_stubs

        code = write_stubs(federation, output, check=check, compat=compat)
    raise typer.Exit(code)


@app.command(short_help="Check whether pipelines run on this machine.")
def doctor(as_json: JsonOption = False) -> None:
    """Check whether pipelines can run on this machine, and say what to do."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.doctor import examine
    run_async(lambda: examine(as_json=as_json))


@app.command(short_help="Show the timeline of a trace.")
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, one span per line.", show_default=False)],
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Only what belongs to this job.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the timeline.", show_default=False)
    ] = None,
    opening: Annotated[bool, typer.Option("--open/--no-open", help="Open that page, where there is a desktop.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures of each span name as JSON lines.")] = False,
) -> None:
    """Show the timeline of a trace: in the terminal, and as a page on a desktop."""
    from dfm_async.cli.program import plain_errors

    with plain_errors():
        from dfm_async.cli.tracing import show_trace

        show_trace(file, job=job, as_json=as_json, html=html, opening=opening)


app.add_typer(flare_commands, name="flare", short_help="Federations on NVIDIA FLARE: on this machine, and past it.")
