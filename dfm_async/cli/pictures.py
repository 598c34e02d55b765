"""``dfm-async graph`` and ``explain``: pipelines and plans, drawn and told."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import typer

from dfm_async.cli.exits import BadInput
from dfm_async.cli.program import safe_json
from dfm_async.cli.references import find_federation, find_pipeline
from dfm_async.drawing import graph_of, svg
from dfm_async.federation.federation import Federation
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.planner.plan import Plan, prepare
from dfm_async.planner.profile import Profile

__all__ = ["Kind", "explain", "picture", "write_text"]

Kind: TypeAlias = Literal["text", "mermaid", "svg"]
"""How a pipeline is drawn."""


def _is_json(reference: str) -> bool:
    return reference == "-" or reference.endswith(".json")


def _found(federation: str, pipeline: str | None) -> tuple[Federation | None, Pipeline]:
    """A federation and a pipeline; a JSON file in the first place is a pipeline alone."""
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
    """Draws a pipeline, over the sites of its federation if there is one.

    Raises:
        BadInput: one of them is not there.
        PipelineError: the pipeline cannot be run.
    """
    sites, found = _found(federation, pipeline)
    if kind == "text":
        return str(found)
    if kind == "svg":
        return svg(graph_of(found if sites is None else _plan(sites, found)))
    return found.to_mermaid() if sites is None else _plan(sites, found).explain().to_mermaid()


def explain(federation: str, pipeline: str | None, *, as_json: bool, costs: Path | None = None) -> Iterator[str]:
    """Tells where each node of a pipeline runs and why: as a table, or as one JSON object per node.

    Args:
        federation: where the federation is.
        pipeline: which pipeline.
        as_json: whether it is told as JSON.
        costs: the file of a profile, whose costs replace the configured ones.

    Raises:
        BadInput: one of them is not there, or cannot be read.
        PipelineError: the pipeline cannot be run.
    """
    sites, found = _found(federation, pipeline)
    if sites is None:
        raise BadInput("where a pipeline runs depends on the federation: give it, too")
    plan = _plan(sites, found, costs)
    if as_json:
        for node in plan.nodes:
            told: dict[str, Any] = {"node": node.label, "site": node.site, "location": node.location, "why": node.why}
            inputs = [other.label for other in plan.nodes if other.id in node.inputs]
            told |= {"depth": node.depth, "inputs": inputs}
            if node.cost is not None:
                told |= {"cost": node.cost, "alternatives": node.alternatives}
            yield safe_json(msgspec.json.encode(told))
    else:
        yield str(plan.explain())


def write_text(text: str, path: Path | None) -> None:
    """Writes a text to a file as a whole, or to standard output. A file that is there keeps who may read it.

    Raises:
        BadInput: the file cannot be written.
    """
    if path is None:
        typer.echo(text)
        return
    data = (text if text.endswith("\n") else f"{text}\n").encode()
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):  # such as /dev/null, which must stay what it is
            path.write_bytes(data)
        else:
            _write_whole(data, path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error


def _write_whole(data: bytes, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
