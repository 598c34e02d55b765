"""What to write instead of a wrong call of a session or a job: only mistakes need it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from dfm_async.language.pipeline import Pipeline
from dfm_async.model.checks import unexpected

F = TypeVar("F", bound=Callable[..., Any])

_OF_A_JOB: Final = "results belong to a job: session.execute(...) returns one, and job.results() reads them"
IN_SESSIONS: Final = {"result": _OF_A_JOB, "results": _OF_A_JOB}
"""What to use instead of attributes that a session does not have."""
IN_JOBS: Final = {
    "result": "job.first() returns the first result, job.results() reads all, and session.run(...) returns the result "
    "of a pipeline that was made of a function"
}
"""What to use instead of attributes that a job does not have."""


def no_attribute(owner: object, name: str, hints: Mapping[str, str]) -> NoReturn:
    """Raise the AttributeError for an attribute that does not exist, with a hint if there is one."""
    problem = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in hints:
        raise AttributeError(f"{problem}: {hints[name]}")
    raise AttributeError(problem, name=name, obj=owner)


def keywords_explained(method: F) -> F:
    """Let a method of a session say which option an unknown keyword may mean, or how parameters are passed."""
    known = list(inspect.signature(method).parameters)[1:]

    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            problem = unexpected(unknown[0], known)
            hint = "" if "did you mean" in problem else _passed(method.__name__, args[0] if args else None, unknown)
            raise TypeError(f"session.{method.__name__}() {problem}{hint}")

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await method(self, *args, **kwargs)
    else:

        @functools.wraps(method)
        def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value] # it takes and returns the same


def _passed(method: str, pipeline: object, names: list[str]) -> str:
    """Return how the parameters of a pipeline are passed."""
    params = "{" + ", ".join(f"{name!r}: ..." for name in names) + "}"
    if method == "execute":
        hint = f". Parameters of the pipeline are one dict: session.execute(pipeline, {params})"
        if isinstance(pipeline, Pipeline) and pipeline.signature is not None:
            hint += f", or session.run(pipeline, {', '.join(f'{name}=...' for name in names)}) for its result"
        return hint
    return f". Parameters are passed with the plan: session.execute(plan, {params})" if method == "prepare" else ""
