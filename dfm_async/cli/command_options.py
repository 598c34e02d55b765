"""Arguments and options that several commands have, groups of them, and how commands are registered."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_type_hints

import typer

Work: TypeAlias = Coroutine[Any, Any, int] | int | None
"""What a command returns: its exit code, or the coroutine that returns it."""
FLARE_FOLDER: Final = Path(".dfm-flare")
"""Where a federation on this machine runs by default."""
_LARGEST: Final = 1024 * 1024
"""The maximum size of a file whose pipelines are completed, in bytes."""


def command(
    app: typer.Typer, short_help: str | None = None, *, handles_signals: bool = False
) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Register a command; run what it returns, and end the program with its exit code.

    A parameter of the command whose type is a dataclass is replaced by the options that are the fields of that class.

    Args:
        app: where it belongs.
        short_help: its line in the list of commands; by default its docstring.
        handles_signals: whether the command itself handles Ctrl-C.
    """

    def register(function: Callable[..., Work]) -> Callable[..., Work]:
        groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(function).items() if is_dataclass(kind)}

        @functools.wraps(function)
        def run(**given: Any) -> None:
            from dfm_async.cli.command_runner import run_command

            for name, kind in groups.items():
                given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            run_command(lambda: function(**given), handles_signals=handles_signals)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            group = groups.get(parameter.name)
            parameters += [parameter] if group is None else inspect.signature(group, eval_str=True).parameters.values()
        ordered = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        app.command(short_help=short_help)(run)
        return function

    return register


def option(help_text: str, metavar: str, *names: str) -> Any:
    """Return an option whose default is not shown; by default its name is that of the parameter."""
    return typer.Option(*names, metavar=metavar, help=help_text, show_default=False)


# completion in the shell


def _complete_pipelines(context: typer.Context, incomplete: str) -> list[str]:
    path = Path(str(context.params.get("federation") or "").partition(":")[0])
    try:
        if path.suffix != ".py" or path.stat().st_size > _LARGEST:
            return []
        found = pipelines_in(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return []
    return [name for name in found if name.startswith(incomplete)]


def pipelines_in(source: str) -> list[str]:
    """Return the names of the pipelines at the top level of a file: their own, else those of their variables.

    The file is parsed, not imported: pressing Tab must not run code.
    """
    found: dict[str, None] = {}
    for statement in ast.parse(source).body:
        for made, variable in _assigned(statement):
            name = _pipeline_name(made)
            if name is not None:
                found[name or variable] = None
    return list(found)


def _assigned(statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(statement, ast.With):
        for item in statement.items:
            if isinstance(item.optional_vars, ast.Name):
                yield item.context_expr, item.optional_vars.id
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        yield statement.value, statement.targets[0].id


def _pipeline_name(made: ast.expr) -> str | None:
    """Return the name in a call of ``Pipeline``, empty if there is none; None for any other expression."""
    if not isinstance(made, ast.Call):
        return None
    called = made.func.attr if isinstance(made.func, ast.Attribute) else getattr(made.func, "id", None)
    if called != "Pipeline":
        return None
    first = made.args[0] if made.args else None
    name = first.value if isinstance(first, ast.Constant) else ""
    return name if isinstance(name, str) else ""


# single options

FederationArgument = Annotated[
    str,
    typer.Argument(
        metavar="FEDERATION",
        help="package.module:name, file.py[:name], or a federation file (.yaml).",
        show_default=False,
    ),
]
PipelineArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PIPELINE",
        help="module:name, file.py:name, a name in the federation's module, or a JSON file (- is standard input). "
        "Can be omitted if the module has exactly one.",
        show_default=False,
        autocompletion=_complete_pipelines,
    ),
]
CompatOption = Annotated[
    bool,
    typer.Option("--compat", help="For a federation file: provide the names that adapters import from nv_dfm_core."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON lines.")]
HomesiteOption = Annotated[str, typer.Option(metavar="NAME", help="The application's own site.")]
FolderOption = Annotated[Path, typer.Option(metavar="DIR", help="The folder of the federation and its kits.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show only errors on standard error.")]


class TargetName(StrEnum):
    """Where a pipeline runs."""

    LOCAL = "local"
    INLINE = "inline"


class Checkpoint(StrEnum):
    """Which calls are recorded."""

    MARKED = "marked"
    CALLS = "calls"


class OnError(StrEnum):
    """Whether other work continues after an error."""

    CONTINUE = "continue"
    STOP = "stop"


# groups of options


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """A federation, and where its pipelines run."""

    federation: FederationArgument
    compat: CompatOption = False
    homesite: HomesiteOption = "home"
    store: Annotated[str | None, option("Keep jobs in this store, as in sqlite:///jobs.db.", "URL")] = None
    flare: Annotated[
        Path | None, option("Run in a federation on NVIDIA FLARE: the folder of a user's startup kit.", "KIT")
    ] = None
    user: Annotated[str | None, option("The user of the kit, if the kit does not name one.", "NAME")] = None
    bring_code: Annotated[
        bool,
        typer.Option("--bring-code", help="With --flare: send the code of operations with the job, if sites allow it."),
    ] = False
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume jobs although the code of their operations has changed."),
    ] = False
    workers: Annotated[
        str | None, option("The maximum number of worker processes of each site, or the range, as in 1-8.", "N|MIN-MAX")
    ] = None
    reload: Annotated[
        bool, typer.Option("--reload", help="Use the new code when source files of the federation change.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(SessionOptions):
    """What to run, and how."""

    pipeline: PipelineArgument = None
    param: Annotated[list[str] | None, option("A parameter. Repeatable.", "NAME=VALUE", "--param", "-p")] = None
    params: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Parameter sets: a .json or .jsonl file, or - for JSON lines on standard input."
        ),
    ] = None
    target: Annotated[TargetName, typer.Option(help="Worker processes, or everything in this process.")] = (
        TargetName.LOCAL
    )
    job_id: Annotated[
        str | None, option("The id of the job. Repeating the command with it finds the same job.", "ID")
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="Abort the job after this time.", show_default=False),
    ] = None
    start_at: Annotated[
        str | None,
        option("Start the job at this time, such as 2026-11-20T03:00+01:00 or ...Z, or in seconds since 1970.", "TIME"),
    ] = None
    checkpoint: Annotated[
        Checkpoint, typer.Option(help="With --store: record the calls that are marked with checkpoint=True, or all.")
    ] = Checkpoint.MARKED
    on_error: Annotated[OnError, typer.Option(help="Whether other work continues after an error.")] = OnError.CONTINUE
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, metavar="N", help="Run at most this many parameter sets at a time."),
    ] = None
    retry: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            metavar="N",
            help="The maximum number of attempts of calls that fail or lose their worker.",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after this many results.")] = None
    trace: Annotated[Path | None, option("Append a trace to this file.", "FILE")] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(SessionOptions):
    """What to serve, and where."""

    pipelines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PIPELINE",
            help="The pipelines that clients may run; by default all of the federation's module.",
            show_default=False,
            autocompletion=_complete_pipelines,
        ),
    ] = None
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0 means any free port.")] = 8000
    idle_after: Annotated[
        float | None,
        typer.Option(
            min=0, max=31_622_400, metavar="SECONDS", help="The time after which idle workers above the minimum end."
        ),
    ] = None
    allow_pipelines: Annotated[
        bool, typer.Option("--allow-pipelines", help="Let clients submit their own pipelines.")
    ] = False
    mcp: Annotated[bool, typer.Option("--mcp", help="Offer the pipelines as tools for agents, at /mcp.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="With --store: resume the jobs that were interrupted.")] = (
        False
    )
    token_file: Annotated[
        Path | None, option("A file with the token that clients need; by default DFM_TOKEN.", "FILE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """A service that runs."""

    url: Annotated[str, typer.Option(metavar="URL", envvar="DFM_URL", help="The address of a running service.")] = (
        "http://127.0.0.1:8000"
    )
    token_file: Annotated[
        Path | None, option("A file with the token for the service; by default DFM_TOKEN.", "FILE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ServiceOptions):
    """The jobs of other processes: of a service, or of a store."""

    store: Annotated[str | None, option("Use a store instead of a service, as in sqlite:///jobs.db.", "URL")] = None


@dataclass(frozen=True, kw_only=True)
class EventOptions(SourceOptions):
    """The events of a job."""

    job: Annotated[str, typer.Argument(metavar="JOB", help="The id of the job.", show_default=False)]
    modules: Annotated[
        list[str] | None,
        option("A module or file with the classes of stored values. Repeatable.", "MODULE", "--import"),
    ] = None
    after: Annotated[
        int, typer.Option(min=-1, metavar="OFFSET", help="Begin after this offset.", show_default=False)
    ] = -1


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where and how results are written."""

    places: Annotated[list[str] | None, option("Write only results of this place. Repeatable.", "NAME", "--place")] = (
        None
    )
    folder: Annotated[
        Path | None, option("Write each result to a file in this folder.", "FOLDER", "--output", "-o")
    ] = None
    as_json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What to start on this machine, and how."""

    federation: Annotated[
        str | None,
        typer.Argument(
            metavar="FEDERATION",
            help="A federation file (.yaml), package.module:name, or file.py[:name]; by default an example.",
            show_default=False,
        ),
    ] = None
    folder: FolderOption = FLARE_FOLDER
    homesite: HomesiteOption = "home"
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Applications may send code to all sites.")] = False
    kits: Annotated[Path | None, option("Where startup kits are cached, if not in DIR.", "DIR")] = None
    compat: CompatOption = False
    as_json: JsonOption = False
