"""Functions as pipelines: called once, with placeholders for their parameters."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, Final

from dfm_async.errors import PipelineError, Problem
from dfm_async.language.builder import PlaceParam, Yield
from dfm_async.language.expressions import Parameter, references
from dfm_async.language.pipeline import RESULT, Pipeline
from dfm_async.language.statements import walk_statements


def pipeline_of(function: Callable[..., Any], name: str | None = None) -> Pipeline[..., Any]:
    """Make a pipeline of a function: its parameters are those of the pipeline, what it returns is the result.

    Raises:
        PipelineError: a parameter is not used.
        TypeError: it is not a plain function, or has parameters such as ``*args``.
    """
    called = name or getattr(function, "__name__", None)
    if called is None or inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"a pipeline is made of a plain function, without async or yield, not of {function!r}")
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"parameter {parameter.name!r} of pipeline {called!r} is {parameter.kind.description}: the parameters "
                "of a pipeline are given by name"
            )
    pipeline: Pipeline[..., Any] = Pipeline(called, description=inspect.getdoc(function) or "")
    with pipeline:
        returned = function(
            **{
                name: PlaceParam(name) if found.default is found.empty else PlaceParam(name, default=found.default)
                for name, found in signature.parameters.items()
            }
        )
        if returned is not None:
            Yield(returned, place=RESULT)
            pipeline.result = RESULT
    taken = [found for found in walk_statements(pipeline.body) if getattr(found, "place", None) == RESULT]
    if len(taken) > 1:
        hint = "is the place of the value that the function returns: yield to another one"
        raise PipelineError(called, [Problem(f"Yield(place={RESULT!r})", hint)])
    used = {
        found.name
        for statement in walk_statements(pipeline.body)
        for _, expression, _ in statement.expressions()
        for found in references(expression)
        if isinstance(found, Parameter)
    }
    unused = [name for name in signature.parameters if name not in used]
    if unused:
        raise PipelineError(called, [Problem(name, "is a parameter that is not used: remove it") for name in unused])
    pipeline.signature = signature
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - annotations can hold anything; one that cannot be read declares nothing
        hints = {}
    pipeline.types = {name: hint for name, hint in hints.items() if name in signature.parameters}
    pipeline.returns = hints.get("return", Any)
    return pipeline


_ARGS: Final = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)


def summary_text(description: str) -> str:
    """Return a docstring without its section ``Args:``."""
    return _ARGS.sub("", description).strip()


def parameter_texts(description: str) -> dict[str, str]:
    """Return what the section ``Args:`` of a docstring tells about each parameter."""
    section = _ARGS.search(description)
    if section is None:
        return {}
    found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
