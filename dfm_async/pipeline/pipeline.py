"""A pipeline: statements with a name. It is data: it can be written to JSON, read back, printed and drawn."""

from __future__ import annotations

import os
from contextvars import Token
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from dfm_async.errors import PipelineError, Problem
from dfm_async.pipeline.builder import Builder
from dfm_async.pipeline.current import building
from dfm_async.pipeline.statements import Statement
from dfm_async.pipeline.text import pipeline_mermaid, pipeline_text

__all__ = ["Pipeline"]


class Pipeline(BaseModel):
    """What is to be computed, written once, over the operations of a federation.

    ``with Pipeline("name") as pipeline:`` records the statements of its block. The result is plain data.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    name: str | None = None
    api_version: str = ""
    mode: Literal["execute"] = "execute"
    body: tuple[Statement, ...] = ()

    _builder: Builder | None = PrivateAttr(default=None)
    _token: Token[Builder | None] | None = PrivateAttr(default=None)

    def __init__(self, name: str | None = None, /, **data: Any) -> None:
        if name is not None:
            data["name"] = name
        super().__init__(**data)

    def __enter__(self) -> Pipeline:
        if self._builder is not None or self.body:
            raise PipelineError(self.name, [Problem("", "is built already; make a new Pipeline")])
        self._builder = Builder(self.name)
        self._token = building.set(self._builder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._builder is not None  # noqa: S101 - __enter__ set both
        assert self._token is not None  # noqa: S101
        building.reset(self._token)
        if kind is None:
            self.body = tuple(self._builder.blocks[0])
        self._builder = self._token = None

    def __str__(self) -> str:
        return pipeline_text(self)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name!r}: {len(self.body)} statements>"

    def to_mermaid(self) -> str:
        """Draws the pipeline as a Mermaid flow chart."""
        return pipeline_mermaid(self)

    def save_to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes the pipeline to a file as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load_from_file(cls, path: str | os.PathLike[str]) -> Pipeline:
        """Reads a pipeline from a JSON file.

        Raises:
            PipelineError: the file does not hold a pipeline; tells where and why.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            problems = [
                Problem(".".join(map(str, found["loc"])) or str(path), found["msg"]) for found in error.errors()
            ]
            raise PipelineError(str(path), problems) from error
