"""``dfm-async graph``, ``explain`` and ``stubs``: describe pipelines and federations without running them."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias

import msgspec
import typer

from dfm_async.base.cores import usable_cores
from dfm_async.base.files import replaced
from dfm_async.base.text import columns
from dfm_async.cli.command_runner import BadInput, Exit, safe_json
from dfm_async.cli.params import parameter_rows
from dfm_async.cli.references import find_federation, find_pipeline
from dfm_async.drawing import graph_of, svg
from dfm_async.federation.federation import Federation
from dfm_async.federation.stubs import stubs
from dfm_async.language.functions import summary_text
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.pool_size import workers_text
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import calls_of, prepare
from dfm_async.planning.profile import Profile
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.core_use import stay_reason

Kind: TypeAlias = Literal["text", "mermaid", "svg"]
"""How a pipeline is drawn."""


def _is_json(reference: str) -> bool:
    return reference == "-" or reference.endswith(".json")


def _found(federation: str, pipeline: str | None) -> tuple[Federation | None, Pipeline]:
    """Return a federation and a pipeline; a JSON file instead of the federation is a pipeline alone."""
    if pipeline is None and _is_json(federation):
        return None, find_pipeline(federation, None)
    found, module = find_federation(federation)
    return found, find_pipeline(pipeline, module, found)


def _plan(federation: Federation, pipeline: Pipeline, costs: Path | None = None) -> Plan:
    return prepare(pipeline, federation, "home", None, 1, None if costs is None else _profile(costs))


def _profile(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def picture(federation: str, pipeline: str | None, kind: Kind) -> str:
    """Draw a pipeline, over the sites of its federation if there is one."""
    sites, found = _found(federation, pipeline)
    if kind == "text":
        return str(found)
    if kind == "svg":
        return svg(graph_of(found if sites is None else _plan(sites, found)))
    return found.to_mermaid() if sites is None else _plan(sites, found).explain().to_mermaid()


def explain(federation: str, pipeline: str | None, *, as_json: bool, costs: Path | None = None) -> Iterator[str]:
    """Yield where each node of a pipeline runs and why: as a table below its description, or as JSON objects.

    ``costs`` is the file of a profile, whose costs replace the configured ones.
    """
    sites, found = _found(federation, pipeline)
    if sites is None:
        raise BadInput("a pipeline alone has no sites: name the federation before it")
    plan = _plan(sites, found, costs)
    if as_json:
        for node in plan.nodes:
            data: dict[str, Any] = {"node": node.label, "site": node.site, "location": str(node.location)}
            inputs = [other.label for other in plan.nodes if other.id in node.inputs]
            data |= {"why": node.why, "depth": node.depth, "inputs": inputs}
            if node.cost is not None:
                data |= {"cost": node.cost, "alternatives": node.alternatives}
            yield safe_json(msgspec.json.encode(data))
    else:
        if text := summary_text(found.description):
            yield text + "\n"
        if plan.params:
            yield columns(parameter_rows(plan, found, sites)) + "\n"
        yield str(plan.explain())


def explain_cores(federation: str, pipeline: str | None, *, as_json: bool) -> Iterator[str]:
    """Yield which calls of a pipeline run in all workers of their site, and why others do not."""
    sites, found = _found(federation, pipeline)
    if sites is None:
        raise BadInput("a pipeline alone has no sites: name the federation before it")
    rows = [("node", "site", "workers", "calls run in")]
    for site, node, _, adapter in calls_of(_plan(sites, found), sites):
        if adapter is None:
            continue
        why = "the application" if site == "home" else stay_reason(Callee(adapter))
        workers = workers_text(sites.sites[site].workers) or str(usable_cores())
        where = f"one process: {why}" if why else "all workers"
        if adapter.limits and (gpus := adapter.limits.gpus) and site != "home":
            where = why = f"processes that see {gpus} GPU{'s' * (gpus > 1)} each: gpus={gpus}"
        if as_json:
            data = {"node": node, "site": site, "workers": workers, "all_workers": not why, "why": why}
            yield safe_json(msgspec.json.encode(data))
        rows.append((node, site, workers, where))
    if not as_json:
        yield columns(rows)


def write_text(text: str, path: Path | None) -> None:
    """Write a text to a file atomically, or to standard output. An existing file keeps its permissions."""
    if path is None:
        typer.echo(text)
        return
    data = (text if text.endswith("\n") else f"{text}\n").encode()
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):  # such as /dev/null, which must stay what it is
            path.write_bytes(data)
        else:
            with replaced(path, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666) as file:
                file.write(data)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error


def write_stubs(federation: str, output: Path | None, *, check: bool, compat: bool) -> int:
    """Write the typed module of a federation to a file or to standard output, or show how the file differs from it."""
    found, module = find_federation(federation, compat=compat)
    if module is not None:
        raise BadInput(f"{federation} is Python, which is typed already: stubs are for federation files (.yaml)")
    folder = Path.cwd() if output is None else output.resolve().parent
    text = stubs(found, PurePath(os.path.relpath(Path(federation).resolve(), folder)), compat=compat)
    if not check:
        write_text(text, output)
        return Exit.SUCCESS
    if output is None:
        raise BadInput("--check compares with a file: name it with --output")
    return _compare(text, output)


def _compare(text: str, output: Path) -> int:
    try:
        there = output.read_text(encoding="utf-8") if output.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{output}: {error}") from error
    lines = difflib.unified_diff(
        there.splitlines(keepends=True), text.splitlines(keepends=True), str(output), "the federation"
    )
    difference = "".join(lines)
    typer.echo(difference, nl=False)
    return Exit.FAILED if difference else Exit.SUCCESS
