"""Files with pipelines: DFM's JSON, or our own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dfm_async.errors import PipelineError, Problem
from dfm_async.federation.dfm_json.problems import MAX_BYTES
from dfm_async.federation.dfm_json.reading import read_pipeline
from dfm_async.federation.dfm_json.writing import write_pipeline
from dfm_async.pipeline.pipeline import Pipeline, is_dfm

if TYPE_CHECKING:
    from upath import UPath

    from dfm_async.federation.federation import Federation

__all__ = ["load_pipeline", "parse_pipeline", "save_pipeline"]


def load_pipeline(path: str | os.PathLike[str] | UPath, federation: Federation) -> Pipeline:
    """Reads a pipeline from a file.

    Raises:
        PipelineError: the file does not hold a pipeline for this federation; tells where and why.
    """
    with _located(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    try:
        return parse_pipeline(content, federation)
    except PipelineError as error:
        raise PipelineError(str(path), error.problems) from error


def parse_pipeline(content: str | bytes, federation: Federation) -> Pipeline:
    """Reads a pipeline from JSON.

    Raises:
        PipelineError: this is no pipeline for this federation; tells where and why.
    """
    if len(content) > MAX_BYTES:
        raise PipelineError(None, [Problem("", f"is larger than {MAX_BYTES:,} bytes")])
    try:
        data: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PipelineError(None, [Problem("", f"is no JSON: {error}")]) from error
    return read_pipeline(data, federation) if is_dfm(data) else Pipeline.model_validate(data)


def save_pipeline(pipeline: Pipeline, path: str | os.PathLike[str] | UPath, federation: Federation) -> None:
    """Writes a pipeline to a file as DFM's JSON, and makes the folders that lead to it.

    Raises:
        PipelineError: with everything that DFM has no words for; the file is left as it was.
    """
    data = msgspec.json.encode(write_pipeline(pipeline, federation))
    file = _located(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(data, indent=2) + b"\n")


def _located(path: str | os.PathLike[str] | UPath) -> Path | UPath:
    """A path of this machine, or of any file system that fsspec knows if it is a URL."""
    if isinstance(path, Path) or (isinstance(path, str) and "://" not in path):
        return Path(path)
    from upath import UPath  # loads fsspec

    return UPath(path)
