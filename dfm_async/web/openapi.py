"""The OpenAPI document of a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

import dfm_async
from dfm_async.results.event_data import NAMES
from dfm_async.web.answers import answer
from dfm_async.web.bodies import Cancel, Inputs, Submission, WholePipeline
from dfm_async.web.schemas import PipelineSchema, Schema
from dfm_async.web.state import State

__all__ = ["OpenApi"]

_REF: Final = "#/components/schemas/{model}"
_NUMBER: Final = {"type": "integer", "minimum": 0}
_TEXT: Final = {"type": "string"}
_MAYBE_TEXT: Final = {"type": ["string", "null"]}
_MAYBE_COUNT: Final = {"type": ["integer", "null"]}
_FRAME: Final = {"type": "array", "items": {"type": "integer"}}

_ERROR: Final[Schema] = {
    "type": "object",
    "required": ["error", "message"],
    "properties": {"error": _TEXT, "message": _TEXT, "problems": {"type": "array", "items": _TEXT}},
}
_JOB: Final[Schema] = {
    "type": "object",
    "required": ["job_id", "status"],
    "properties": {
        "job_id": _TEXT,
        "status": {"enum": ["submitted", "running", "finished", "failed", "aborted", "interrupted"]},
        "reason": _MAYBE_TEXT,
        "pipeline": _MAYBE_TEXT,
        "places": {"type": "array", "items": _TEXT},
        "principal": _MAYBE_TEXT,
        "created": {"type": "number", "description": "seconds since 1970"},
        "finished": {"type": ["number", "null"]},
        "first": {**_NUMBER, "description": "the offset of the oldest event that can be read"},
        "events": {**_NUMBER, "description": "the offset that the next event will get"},
        "errors": _NUMBER,
        "sets": _MAYBE_COUNT,
        "done": _MAYBE_COUNT,
        "accepts": {"type": "boolean", "description": "whether further parameter sets are taken"},
    },
}
_EVENT: Final[Schema] = {
    "type": "object",
    "required": ["event"],
    "properties": {
        "event": {"enum": [*NAMES.values(), "activity", "end", "drain"]},
        "offset": {"type": "integer", "minimum": -1, "description": "its position in the log of the job"},
        "place": _MAYBE_TEXT,
        "value": {"description": "of results: the value"},
        "error": {"type": "object", "description": "of failures: type and message"},
        "frame": _FRAME,
        "site": _TEXT,
        "node": _TEXT,
        "status": _TEXT,
        "reason": _MAYBE_TEXT,
    },
}


class OpenApi:
    """Describes a service, with every registered pipeline."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def document(self, request: Request, _send: Send) -> Response:
        """Gives the document."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "list")
        schemas, definitions = await state.schemas(_REF)
        root = request.scope.get("root_path", "") or "/"
        fixed = {**_PAGE, **_FIXED} if state.page else _FIXED
        return answer(_document(root, fixed, state.allow_pipelines, schemas, definitions))


def _document(
    root: str,
    fixed: Schema,
    allow_pipelines: bool,
    schemas: Mapping[str, PipelineSchema],
    definitions: Mapping[str, Schema],
) -> Schema:
    bodies: list[type[BaseModel]] = [Submission, Inputs, Cancel, *([WholePipeline] if allow_pipelines else [])]
    _, own = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = {**definitions, **own["$defs"], "Job": _JOB, "Event": _EVENT, "Error": _ERROR}
    paths: Schema = {**fixed}
    if allow_pipelines:
        paths["/jobs"] = {
            **paths["/jobs"],
            "post": _submission("Runs a pipeline", _ref("WholePipeline"), "runPipeline"),
        }
    for name, schema in schemas.items():
        paths[f"/pipelines/{name}/jobs"] = {"post": _registered(schema)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dfm_async", "version": dfm_async.__version__},
        "servers": [{"url": root}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


_REFUSED: Final[Schema] = {"default": {"description": "refused", "content": _json(_ref("Error"))}}


def _registered(schema: PipelineSchema) -> Schema:
    sets = {"anyOf": [schema.params, {"type": "array", "items": schema.params}, {"type": "null"}]}
    body = {"allOf": [_ref("Submission"), {"type": "object", "properties": {"params": sets}}]}
    if schema.params["required"]:
        body["allOf"][1]["required"] = ["params"]
    found = _submission(f"Runs {schema.pipeline or schema.name}", body, f"run_{schema.name}")
    return {**found, "x-results": schema.results}


def _submission(summary: str, body: Schema, name: str) -> Schema:
    content = {**_json(_ref("Job")), "text/event-stream": {"schema": _TEXT}}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"content": _json(body)},
        "responses": {"201": {"description": "the job, or its events", "content": content}, **_REFUSED},
    }


def _query(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": about}


_JOB_ID: Final[Schema] = {"name": "job_id", "in": "path", "required": True, "schema": _TEXT}
_AFTER: Final = _query("after", {"type": "integer", "minimum": -1}, "begin behind this offset")
_LIMIT: Final = _query("limit", {"type": "integer", "minimum": 1}, "how much a page has")
_GONE: Final = _query(
    "on_disconnect", {"enum": ["keep", "cancel"]}, "what happens to the job when the reader goes away"
)

_ACTIVITY: Final = _query(
    "activity", {"enum": ["false", "true", "0", "1"]}, "whether to tell what the operations do, in events without an id"
)


def _get(name: str, summary: str, content: Schema, *parameters: Schema) -> Schema:
    responses = {"200": {"description": summary, "content": content}, **_REFUSED}
    return {"get": {"operationId": name, "summary": summary, "parameters": list(parameters), "responses": responses}}


def _post(name: str, summary: str, status: str, body: str | None = None) -> Schema:
    found: Schema = {
        "operationId": name,
        "summary": summary,
        "parameters": [_JOB_ID],
        "responses": {status: {"description": summary, "content": _json(_ref("Job"))}, **_REFUSED},
    }
    if body is not None:
        found["requestBody"] = {"content": _json(_ref(body))}
    return {"post": found}


def _page(name: str, item: Schema, **more: Any) -> Schema:
    return _json({"type": "object", "properties": {name: {"type": "array", "items": item}, **more}})


_ANYTHING: Final = _json({"type": "object"})
_PLAIN: Final = {"text/plain": {"schema": _TEXT}}
_STREAM: Final = {"text/event-stream": {"schema": {**_TEXT, "description": "events; the data of each is an Event"}}}
_LIVE: Final = {"text/event-stream": {"schema": {**_TEXT, "description": "events: job (a Job), and sites"}}}
_DRAWING: Final = {"image/svg+xml": {"schema": _TEXT}}
_RESUME: Final[Schema] = {"name": "Last-Event-ID", "in": "header", "schema": _TEXT, "description": "as after"}

_FIXED: Final[Schema] = {
    "/stream": _get("streamJobs", "What happens to all jobs, and how the workers are", _LIVE),
    "/health": _get("health", "Whether the service is alive", _ANYTHING),
    "/ready": _get("ready", "Whether jobs and streams are taken", _ANYTHING),
    "/metrics": _get("metrics", "Metrics for Prometheus", _PLAIN),
    "/openapi.json": _get("openapi", "This document", _ANYTHING),
    "/pipelines": _get("listPipelines", "The registered pipelines", _ANYTHING),
    "/jobs": _get(
        "listJobs",
        "Jobs, the newest first",
        _page("jobs", _ref("Job"), next=_MAYBE_TEXT),
        _query("after", _TEXT, "what the page before has as next"),
        _LIMIT,
        _query("status", _TEXT, "only jobs of this status"),
    ),
    "/jobs/{job_id}": _get("showJob", "One job", _json(_ref("Job")), _JOB_ID),
    "/jobs/{job_id}/events": _get(
        "readEvents",
        "Events of a job, page by page",
        _page("events", _ref("Event"), next={"type": "integer"}, ended={"type": "boolean"}, status=_TEXT),
        _JOB_ID,
        _AFTER,
        _LIMIT,
        _query("wait", {"type": "integer", "minimum": 0, "maximum": 60}, "how many seconds to wait for an event"),
    ),
    "/jobs/{job_id}/stream": _get(
        "streamEvents", "Events of a job", _STREAM, _JOB_ID, _AFTER, _RESUME, _GONE, _ACTIVITY
    ),
    "/jobs/{job_id}/graph": _get("drawJob", "A drawing of the pipeline of a job", _DRAWING, _JOB_ID),
    "/jobs/{job_id}/inputs": _post("sendInputs", "Sends further parameter sets", "202", "Inputs"),
    "/jobs/{job_id}/finish": _post("finishInputs", "Says that no more parameter sets will come", "202"),
    "/jobs/{job_id}/resume": _post("resumeJob", "Goes on with an interrupted job", "202"),
    "/jobs/{job_id}/cancel": _post("cancelJob", "Cancels a job", "200", "Cancel"),
}
_PAGE: Final[Schema] = {
    "/": _get("page", "The live page", {"text/html": {"schema": _TEXT}}),
    "/page/{name}": _get(
        "pageFile",
        "What the live page is made of",
        {"*/*": {}},
        {"name": "name", "in": "path", "required": True, "schema": _TEXT},
    ),
}
