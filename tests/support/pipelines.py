"""Small pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dfm_async import Pipeline, PlaceParam, Yield


def pipeline_of(operation: Any, *params: str, name: str | None = None, place: str = "yield", **args: Any) -> Pipeline:
    """Return a pipeline that yields one call of an operation.

    Args:
        operation: the operation.
        params: names of the parameters of the pipeline, which are the first arguments of the call.
        name: the name of the pipeline; that of the operation by default.
        place: the place of the result.
        args: further arguments of the call.
    """
    with Pipeline(name or operation.name) as pipeline:
        Yield(operation(*map(PlaceParam, params), **args), place=place)
    return pipeline


def yielding(expression: Callable[[], Any], *, place: str = "yield") -> Pipeline:
    """Return a pipeline that yields the expression which a function builds."""
    with Pipeline("pipeline") as pipeline:
        Yield(expression(), place=place)
    return pipeline
