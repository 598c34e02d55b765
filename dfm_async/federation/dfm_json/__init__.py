"""Pipelines in DFM's own JSON, both variants: what nv_dfm_core writes and reads, and the older one.

A class name in such a file is a name and nothing else: it is looked up among the operations of the federation. Nothing
is imported because a pipeline names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dfm_async.errors import PipelineError, Problem
from dfm_async.federation.dfm_json.reading import read_pipeline
from dfm_async.federation.dfm_json.values import MAX_BYTES
from dfm_async.federation.dfm_json.writing import write_pipeline
from dfm_async.language.pipeline import Pipeline, is_dfm

if TYPE_CHECKING:
    from upath import UPath

    from dfm_async.federation.site import FederatedSites

__all__ = ["load_pipeline", "parse_pipeline", "read_pipeline", "save_pipeline", "write_pipeline"]


def load_pipeline(path: str | os.PathLike[str] | UPath, federation: FederatedSites) -> Pipeline:
    """Read a pipeline from a file. A PipelineError lists everything that is wrong, with its place in the file."""
    with _located(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    try:
        return parse_pipeline(content, federation)
    except PipelineError as error:
        raise PipelineError(str(path), error.problems) from error


def parse_pipeline(content: str | bytes, federation: FederatedSites) -> Pipeline:
    """Read a pipeline from JSON: DFM's, or our own. A PipelineError lists everything that is wrong."""
    if len(content) > MAX_BYTES:
        raise PipelineError(None, [Problem("", f"is larger than {MAX_BYTES:,} bytes")])
    try:
        data: Any = msgspec.json.decode(content)
    except (ValueError, RecursionError) as error:
        raise PipelineError(None, [Problem("", f"is not JSON: {error}")]) from error
    return read_pipeline(data, federation) if is_dfm(data) else Pipeline.model_validate(data)


def save_pipeline(pipeline: Pipeline, path: str | os.PathLike[str] | UPath, federation: FederatedSites) -> None:
    """Write a pipeline to a file as DFM's JSON, and create its folders. If DFM cannot express it, write nothing."""
    data = msgspec.json.encode(write_pipeline(pipeline, federation))
    file = _located(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(data, indent=2) + b"\n")


def _located(path: str | os.PathLike[str] | UPath) -> Path | UPath:
    """Return a path of this machine, or of any file system of fsspec if it is a URL."""
    if isinstance(path, Path) or (isinstance(path, str) and "://" not in path):
        return Path(path)
    from upath import UPath  # loads fsspec

    return UPath(path)
