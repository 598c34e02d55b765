"""Handlers: the registered pipelines, and whole pipelines that clients bring along."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.errors import PipelineError, Problem
from dfm_async.federation.federation import Federation
from dfm_async.pipeline.pipeline import Pipeline, is_dfm
from dfm_async.web.answers import Refusal, answer
from dfm_async.web.bodies import Submission, WholePipeline, read_body
from dfm_async.web.jobs import JobHandlers
from dfm_async.web.schemas import PipelineSchema
from dfm_async.web.state import State

__all__ = ["PipelineHandlers", "foreign_pipeline"]


class PipelineHandlers:
    """Answers what is asked about pipelines, and runs those that clients bring along."""

    def __init__(self, state: State, jobs: JobHandlers) -> None:
        self._state = state
        self._jobs = jobs

    async def list(self, request: Request, _send: Send) -> Response:
        """Lists the registered pipelines with the schemas of their parameters and results."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "list")
        schemas, definitions = await state.schemas("#/$defs/{model}")
        found = [_described(schema) for schema in schemas.values()]
        return answer({"pipelines": found, "$defs": definitions})

    async def run(self, request: Request, send: Send) -> Response | None:
        """Runs a pipeline that comes with the request, if that is allowed."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "submit")
        if not state.allow_pipelines:
            raise Refusal(403, "pipelines", "only registered pipelines can be run here")
        with state.uploads.upload(principal) as upload:
            body = await read_body(request, state.limits, upload, WholePipeline)
            pipeline = foreign_pipeline(body.pipeline, state.session.federation)
            submission = Submission.model_construct(**{name: getattr(body, name) for name in Submission.model_fields})
            return await self._jobs.run(request, send, principal, upload, pipeline, submission)


def _described(schema: PipelineSchema) -> dict[str, Any]:
    return {
        "name": schema.name,
        "pipeline": schema.pipeline,
        "params": schema.params,
        "results": schema.results,
    }


def foreign_pipeline(data: dict[str, Any], federation: Federation) -> Pipeline:
    """Reads a pipeline that a client brings along: our own JSON, or DFM's.

    It may use nothing that reaches beyond the operations of the federation: no constants in an encoding of our own,
    which can name classes, and no attributes that lead into the inside of objects.

    Raises:
        PipelineError: it is none, or uses such things; with everything that is wrong.
    """
    if is_dfm(data):  # it has neither
        return federation.pipeline_from_dfm(data)
    found: list[Problem] = []
    stack: list[tuple[str, Any]] = [("$", data)]
    while stack:
        where, node = stack.pop()
        if isinstance(node, dict):
            if node.get("kind") == "constant" and node.get("encoded") is not None:
                found.append(Problem(where, "constants must be plain JSON here"))
            if node.get("kind") == "constant":
                continue  # its value is data, whatever it looks like
            if node.get("kind") == "attribute" and str(node.get("name", "")).startswith("_"):
                found.append(Problem(where, f"the attribute {node['name']!r} cannot be used here"))
            stack.extend((f"{where}.{key}", value) for key, value in node.items())
        elif isinstance(node, list):
            stack.extend((f"{where}[{index}]", value) for index, value in enumerate(node))
    if found:
        raise PipelineError(None, sorted(found, key=str))
    return Pipeline.model_validate(data)
