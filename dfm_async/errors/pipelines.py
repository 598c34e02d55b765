"""What is wrong with pipelines, their parameters, and the values that travel between operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dfm_async.errors.root import DfmError, declared, listed, public

__all__ = [
    "DecodingError",
    "EncodingError",
    "ParameterError",
    "PartialError",
    "PipelineDenied",
    "PipelineError",
    "PlaceholderError",
    "Problem",
]


@public
@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a pipeline: the statement, what is wrong with it, and what to do."""

    statement: str
    message: str

    def __str__(self) -> str:
        return f"{self.statement}: {self.message}" if self.statement else self.message


@declared()
class PipelineError(DfmError):
    """A pipeline cannot be built or prepared. ``problems`` lists all its problems."""

    pipeline: str | None
    problems: Sequence[Problem]

    def __str__(self) -> str:
        return listed(f"pipeline {self.pipeline!r}" if self.pipeline else "pipeline", self.problems)


@public
class PlaceholderError(PipelineError, TypeError):
    """A placeholder was used as a value while the pipeline is built: in an f-string, a calculation, an ``if``."""


@declared("site {site!r} does not allow the pipeline: {reason}")
class PipelineDenied(DfmError):
    """A site does not allow a pipeline; ``reason`` is the text of the site's authorizer."""

    site: str
    reason: str


@declared("advice beyond {field!r} depends on its value: discover again with {field}={value!r}")
class PartialError(DfmError):
    """Advice depends on a value that has to be chosen first: discover again with that value."""

    field: str
    value: object


@declared()
class ParameterError(DfmError):
    """The parameters of an execution do not fit the pipeline."""

    problems: Sequence[str]

    def __str__(self) -> str:
        return "; ".join(self.problems)


@declared("{path} of type {type_name} cannot be {_destination}: {reason}")
class EncodingError(DfmError):
    """A value cannot be sent between sites, or (``stored``) written to a store.

    ``type_name`` is the type of the part that cannot be encoded, ``path`` its location in the value.
    """

    type_name: str
    path: str
    reason: str
    stored: bool = False

    @property
    def _destination(self) -> str:
        return "written to a store" if self.stored else "sent to another site"


@declared("the value of {node} cannot be rebuilt in the application: {reason}")
class DecodingError(DfmError):
    """A received or stored value cannot be decoded in this process."""

    node: str
    reason: str
