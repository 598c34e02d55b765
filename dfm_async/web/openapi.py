"""The OpenAPI document of a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

import dfm_async
from dfm_async.model.job_filter import MOST_WORDS
from dfm_async.model.status import JobStatus
from dfm_async.results.event_codec import EVENT_NAMES
from dfm_async.web.paging import CURSOR, STATUS_CHOICES, largest_limit
from dfm_async.web.pipeline_schemas import PipelineSchema, Schema
from dfm_async.web.requests import Cancel, Fork, Inputs, Sent, Submission, WholePipeline
from dfm_async.web.responses import raw_answer
from dfm_async.web.single_results import ARROW
from dfm_async.web.state import Handlers, State
from dfm_async.wire.codec.images import IMAGES

_REF: Final = "#/components/schemas/{model}"
_ROOT: Final = "/the-address-of-the-service"
"""A placeholder for the address in the cached document: it depends on the request."""
_NUMBER: Final = {"type": "integer", "minimum": 0}
_SECONDS: Final = {"type": "number", "minimum": 0}
_TEXT: Final = {"type": "string"}
_MAYBE_TEXT: Final = {"type": ["string", "null"]}
_MAYBE_COUNT: Final = {"type": ["integer", "null"]}
_STREAM_EVENTS: Final = [*EVENT_NAMES.values(), "activity", "interrupted", "end", "drain"]

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
        "status": {"enum": [status.value for status in JobStatus]},
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
        "retry_of": {**_MAYBE_TEXT, "description": "the job whose failed parameter sets it runs again"},
        "fork_of": {**_MAYBE_TEXT, "description": "the job that it is a fork of"},
        "stored": {"type": "boolean", "description": "whether it is in a store"},
        "waits_for": {**_MAYBE_TEXT, "description": "what it waits for, in words"},
        "start_at": {
            "type": ["number", "null"],
            "description": "when it starts, if that was set",
        },
        "waits": {
            "type": "array",
            "description": "parameter sets that wait for events or times, the first 100",
            "items": {
                "type": "object",
                "properties": {
                    "name": {**_TEXT, "description": "the event; empty if only a time"},
                    "frame": {"type": "array", "items": {"type": "integer"}},
                    "node": _TEXT,
                    "until": {"type": ["number", "null"], "description": "seconds since 1970"},
                },
            },
        },
        "events_awaited": {
            "type": "object",
            "description": "the events of its pipeline, each with the JSON schema of its value",
            "additionalProperties": {"type": "object"},
        },
    },
}
_SCHEDULE: Final[Schema] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _TEXT,
        "timetable": {**_TEXT, "description": "when its ticks are, in words"},
        "next_at": {"type": ["number", "null"], "description": "the next tick, in seconds since 1970"},
        "last_job": {**_MAYBE_TEXT, "description": "the job of the last tick that ran"},
        "missed": {"enum": ["skip", "once", "all"], "description": "what happens to missed ticks"},
    },
}
_EVENT: Final[Schema] = {
    "type": "object",
    "required": ["event"],
    "properties": {
        "event": {"enum": _STREAM_EVENTS},
        "offset": {"type": "integer", "minimum": -1, "description": "the position in the log of the job"},
        "place": _MAYBE_TEXT,
        "value": {"description": "of results: the value"},
        "error": {"type": "object", "description": "of failures: type and message"},
        "frame": {"type": "array", "items": {"type": "integer"}},
        "site": _TEXT,
        "node": _TEXT,
        "status": _TEXT,
        "reason": _MAYBE_TEXT,
    },
}


class OpenApi(Handlers):
    """Serves the description of a service, with every registered pipeline."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._made: tuple[object, bytes, bytes] = (None, b"", b"")

    async def document(self, request: Request, _send: Send) -> Response:
        """Return the document."""
        state = self._state
        await state.authorize(request, "list")
        found = await state.schemas(_REF)
        if self._made[0] is not found:
            head, _, tail = msgspec.json.encode(_document(_ROOT, state, *found)).partition(msgspec.json.encode(_ROOT))
            self._made = found, head, tail
        root = request.scope.get("root_path", "") or "/"
        return raw_answer(self._made[1] + msgspec.json.encode(root) + self._made[2])

    async def prepare(self) -> None:
        """Make the schemas that :meth:`merged` needs."""
        await self._state.schemas(_REF)

    def merged(self, document: Schema, prefix: str) -> Schema:
        """Return a copy of an application's document with the routes of the service, which is mounted at a prefix."""
        schemas, definitions = self._state.known_schemas(_REF)
        text = msgspec.json.encode(_document(prefix, self._state, schemas, definitions))
        # The application may have schemas of the same names.
        ours = msgspec.json.decode(text.replace(b'"#/components/schemas/', b'"#/components/schemas/dfm_async.'))
        components = document.get("components", {})
        named = {f"dfm_async.{name}": schema for name, schema in ours["components"]["schemas"].items()}
        paths = {f"{prefix}{path}": _tagged(methods) for path, methods in ours["paths"].items()}
        return {
            **document,
            "paths": {**document.get("paths", {}), **paths},
            "components": {**components, "schemas": {**components.get("schemas", {}), **named}},
        }


def _tagged(methods: Schema) -> Schema:
    """Return the operations of a path in a group of their own."""
    return {
        method: {**found, "tags": ["dfm_async"], "operationId": f"dfm_async_{found['operationId']}"}
        for method, found in methods.items()
    }


def _document(
    root: str, state: State, schemas: Mapping[str, PipelineSchema], definitions: Mapping[str, Schema]
) -> Schema:
    bodies: list[type[BaseModel]] = [
        Submission,
        Inputs,
        Fork,
        Sent,
        Cancel,
        *([WholePipeline] if state.allow_pipelines else []),
    ]
    _, own = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = {**definitions, **own["$defs"], "Job": _JOB, "Event": _EVENT, "Error": _ERROR}
    paths = {**(_PAGE if state.page else {}), **_fixed(state.limits.page_size)}
    if state.allow_pipelines:
        paths["/jobs"] = {
            **paths["/jobs"],
            "post": _submission("Run a pipeline", _ref("WholePipeline"), "runPipeline"),
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


def _events(names: list[str], data: Schema, about: str) -> Schema:
    """Return the schema of server-sent events with these names, whose data is JSON."""
    properties = {
        "event": {"enum": names},
        "id": {**_TEXT, "description": "the offset, to reconnect with Last-Event-ID"},
        "data": {**_TEXT, "contentMediaType": "application/json", "contentSchema": data},
    }
    event = {"type": "object", "description": about, "required": ["event", "data"], "properties": properties}
    return {"text/event-stream": {"schema": event}}


_STREAM: Final = _events(
    _STREAM_EVENTS, _ref("Event"), "one for each event of the job, then one that reports how the stream ends"
)
_REFUSED: Final[Schema] = {"default": {"description": "refused", "content": _json(_ref("Error"))}}


def _registered(schema: PipelineSchema) -> Schema:
    sets = {"anyOf": [schema.params, {"type": "array", "items": schema.params}, {"type": "null"}]}
    body = {"allOf": [_ref("Submission"), {"type": "object", "properties": {"params": sets}}]}
    needed = bool(schema.params["required"])
    if needed:
        body["allOf"][1]["required"] = ["params"]
    found = _submission(f"Run {schema.pipeline or schema.name}", body, f"run_{schema.name}", needed)
    about = {"description": schema.params["description"]} if "description" in schema.params else {}
    return {**found, **about, "x-results": schema.results}


def _submission(summary: str, body: Schema, name: str, needed: bool = True) -> Schema:
    content = {**_json(_ref("Job")), **_STREAM}
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [_ACTIVITY],
        "requestBody": {"content": _json(body), "required": needed},
        "responses": {"201": {"description": "the job, or its events", "content": content}, **_REFUSED},
    }


def _query(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": about}


_ACCEPT_CHANGES: Final[Schema] = {
    "name": "accept_changes",
    "in": "query",
    "description": "Resume the job although the code of its operations has changed.",
    "schema": {"type": "boolean", "default": False},
}
_JOB_ID: Final[Schema] = {"name": "job_id", "in": "path", "required": True, "schema": _TEXT}
_EVENT_NAME: Final[Schema] = {
    "name": "event",
    "in": "path",
    "required": True,
    "schema": _TEXT,
    "description": "the name of the event",
}
_AFTER: Final = _query("after", {"type": "integer", "minimum": -1}, "begin behind this offset")
_GONE: Final = _query(
    "on_disconnect", {"enum": ["keep", "cancel"]}, "what happens to the job when the reader disconnects"
)
_ACTIVE: Final = _query(
    "active", {"enum": ["false", "true", "0", "1"]}, "whether to begin only with the jobs that have not ended"
)
_ACTIVITY: Final = _query(
    "activity",
    {"enum": ["false", "true", "0", "1"]},
    "whether to report what operations do, in events without an id",
)


def _get(name: str, summary: str, content: Schema, *parameters: Schema) -> Schema:
    responses = {"200": {"description": summary, "content": content}, **_REFUSED}
    return {"get": {"operationId": name, "summary": summary, "parameters": list(parameters), "responses": responses}}


def _post(name: str, summary: str, status: str, body: type[BaseModel] | None = None, *parameters: Schema) -> Schema:
    found: Schema = {
        "operationId": name,
        "summary": summary,
        "parameters": [_JOB_ID, *parameters],
        "responses": {status: {"description": summary, "content": _json(_ref("Job"))}, **_REFUSED},
    }
    if body is not None:
        needed = any(field.is_required() for field in body.model_fields.values())
        found["requestBody"] = {"content": _json(_ref(body.__name__)), "required": needed}
    return {"post": found}


def _page(name: str, item: Schema, **more: Any) -> Schema:
    return _json({"type": "object", "properties": {name: {"type": "array", "items": item}, **more}})


_ANYTHING: Final = _json({"type": "object"})
_PLAIN: Final = {"text/plain": {"schema": _TEXT}}
_RESUME: Final[Schema] = {"name": "Last-Event-ID", "in": "header", "schema": _TEXT, "description": "as after"}

_SEARCH: Final = {"type": "string", "pattern": rf"^\s*(\S+(\s+\S+){{0,{MOST_WORDS - 1}}})?\s*$"}
_OFFSET: Final = {"name": "offset", "in": "path", "required": True, "schema": {**_NUMBER, "maximum": 10**18}}
_LIVE: Final = _events(["job", "sites"], {"type": "object"}, "a Job, or the state of the workers by site")
_DRAWING: Final[Schema] = {"image/svg+xml": {}}
_FORGET: Final[Schema] = {
    "operationId": "forgetJob",
    "summary": "Forget a job that has ended",
    "parameters": [_JOB_ID],
    "responses": {"204": {"description": "the job is forgotten"}, **_REFUSED},
}


def _fixed(page_size: int) -> Schema:
    limit = _query(
        "limit", {"type": "integer", "minimum": 1, "maximum": largest_limit(page_size)}, "the most items of a page"
    )
    return {
        "/stream": _get("streamJobs", "The state of all jobs and workers, and their changes", _LIVE, _ACTIVE),
        "/health": _get("health", "Whether the service is alive", _ANYTHING),
        "/ready": _get("ready", "Whether jobs and streams are taken", _ANYTHING),
        "/stats": _get("stats", "What runs and what waits, and the state of the workers", _ANYTHING),
        "/metrics": _get("metrics", "Metrics for Prometheus", _PLAIN),
        "/schedules": _get("listSchedules", "The schedules of the service", _page("schedules", _SCHEDULE)),
        "/openapi.json": _get("openapi", "This document", _ANYTHING),
        "/pipelines": _get("listPipelines", "The registered pipelines", _ANYTHING),
        "/jobs": _get(
            "listJobs",
            "Jobs, the newest first",
            _page("jobs", _ref("Job"), next=_MAYBE_TEXT),
            _query("after", {**_TEXT, "pattern": CURSOR.pattern}, "the value of next of the previous page"),
            limit,
            _query("status", {"enum": [*STATUS_CHOICES]}, "only jobs of this status"),
            _query("pipeline", _TEXT, "only jobs of the pipeline with this name"),
            _query("principal", _TEXT, "only jobs of this principal"),
            _query("label", _TEXT, "only jobs with this label; services label jobs with their principals"),
            _query("since", _SECONDS, "only jobs that were created then or later, in seconds since 1970"),
            _query("until", _SECONDS, "only jobs that were created before that, in seconds since 1970"),
            _query("search", _SEARCH, "only jobs with all these words in their ids, pipelines or labels"),
        ),
        "/jobs/{job_id}": {**_get("showJob", "One job", _json(_ref("Job")), _JOB_ID), "delete": _FORGET},
        "/jobs/{job_id}/events": _get(
            "readEvents",
            "Events of a job, page by page",
            _page("events", _ref("Event"), next={"type": "integer"}, ended={"type": "boolean"}, status=_TEXT),
            _JOB_ID,
            _AFTER,
            limit,
            _query("wait", {"type": "integer", "minimum": 0, "maximum": 60}, "the seconds to wait for an event"),
        ),
        "/jobs/{job_id}/results/{offset}": _get(
            "readResult",
            "One result of a job; a table also as an Arrow IPC stream, to clients that accept this type",
            {**_json(_ref("Event")), ARROW: {"schema": {"type": "string", "contentMediaType": ARROW}}},
            _JOB_ID,
            _OFFSET,
        ),
        "/jobs/{job_id}/results/{offset}/image": _get(
            "readImage",
            "A preview of a result that is an image",
            {media: {"schema": {"type": "string", "contentMediaType": media}} for media in IMAGES},
            _JOB_ID,
            _OFFSET,
        ),
        "/jobs/{job_id}/stream": _get(
            "streamEvents", "Events of a job", _STREAM, _JOB_ID, _AFTER, _RESUME, _GONE, _ACTIVITY
        ),
        "/jobs/{job_id}/graph": _get("drawJob", "A drawing of the pipeline of a job", _DRAWING, _JOB_ID),
        "/jobs/{job_id}/inputs": _post("sendInputs", "Send further parameter sets", "202", Inputs),
        "/jobs/{job_id}/events/{event}": _post(
            "sendEvent", "Send an event to a parameter set that waits for it, or will", "202", Sent, _EVENT_NAME
        ),
        "/jobs/{job_id}/finish": _post("finishInputs", "Close the inputs: no more parameter sets will come", "202"),
        "/jobs/{job_id}/resume": _post("resumeJob", "Resume an interrupted job", "202", None, _ACCEPT_CHANGES),
        "/jobs/{job_id}/retry": _post("retryJob", "Run the failed parameter sets again, as a new job", "201"),
        "/jobs/{job_id}/fork": _post("forkJob", "Run a job again from a node on, as a new job", "201", Fork),
        "/jobs/{job_id}/cancel": _post("cancelJob", "Cancel a job", "200", Cancel),
    }


_PAGE: Final[Schema] = {
    "/": _get("page", "The live page", {"text/html": {}}),
    "/page/{name}": _get(
        "pageFile",
        "A file of the live page",
        {"*/*": {}},
        {"name": "name", "in": "path", "required": True, "schema": _TEXT},
    ),
}
