"""Responses of a service: JSON, and errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dfm_async.errors import (
    DfmError,
    EventsFull,
    JobExists,
    JobInterrupted,
    JobNotFound,
    JobOwned,
    ParameterError,
    PipelineError,
    QueueFull,
    ResultsExpired,
    SessionClosed,
    StoreError,
)
from dfm_async.model.info import JobInfo

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that is refused. Responses with the status 429 and 503 name the time after which to retry.

    Attributes:
        code: one word for programs.
        message: a sentence for people.
        problems: all problems of the request, if there may be more than one.
        challenge: how a client can authenticate itself, if it has to.
        extra: further members of the response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        problems: Sequence[str] = (),
        challenge: str | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message
        self.problems = tuple(problems)
        self.challenge = challenge
        self.extra = extra

    def response(self, retry: float = 0) -> Response:
        """Return the response; ``retry``: the number of seconds after which a client may try again."""
        content: dict[str, Any] = {"error": self.code, "message": self.message, **self.extra}
        if self.problems:
            content["problems"] = self.problems
        found = answer(content, self.status)
        if self.status in (429, 503):
            found.headers["retry-after"] = str(max(1, round(retry)))
        if self.challenge is not None:
            found.headers["www-authenticate"] = self.challenge
        return found


def answer(content: Any, status: int = 200) -> Response:
    """Return a response with JSON that must not be cached: it describes one moment."""
    return raw_answer(msgspec.json.encode(content), status)


def raw_answer(body: bytes, status: int = 200) -> Response:
    """Return a response with JSON that is already encoded."""
    return Response(body, status, {"cache-control": "no-store"}, media_type="application/json")


def info_data(info: JobInfo) -> dict[str, Any]:
    """Return the description of a job for clients."""
    data = {name: getattr(info, name) for name in info.__struct_fields__ if name != "label"}
    return {**data, "status": info.status.value, "principal": info.label}


async def unknown_route(request: Request, error: Exception) -> Response:
    """Return the response for a route that does not exist."""
    allowed = getattr(error, "headers", None)
    if not allowed:
        return Refusal(404, "route", "there is nothing at this address; /openapi.json lists the routes").response()
    response = Refusal(405, "method", f"{request.method} is not possible at this address").response()
    response.headers.update(allowed)
    return response


def refusal_of(error: DfmError | Refusal) -> Refusal:
    """Return the refusal that reports an error of the library."""
    match error:
        case Refusal():
            return error
        case JobExists():  # nothing about the other job: it may belong to another principal
            message = f"the job id {error.job_id!r} belongs to a job with different content, or of another principal"
            return Refusal(409, "exists", message)
        case EventsFull():
            return Refusal(429, "events", "the job takes no further event for now", error.problems)
        case ParameterError():
            return Refusal(422, "parameters", "the parameters do not fit", error.problems)
        case PipelineError():
            return Refusal(422, "pipeline", "the pipeline cannot be run", [str(found) for found in error.problems])
        case JobNotFound():
            return Refusal(404, "job", "there is no such job")
        case JobOwned():
            return Refusal(409, "owned", "another process runs the job: it can be resumed or deleted when that ends")
        case JobInterrupted():
            message = f"the process that ran the job has ended: {error.reason}. Resume it, or wait until a service does"
            return Refusal(503, "interrupted", message)
        case QueueFull():
            return Refusal(429, "queue", "too many jobs wait for a slot")
        case ResultsExpired():
            message = f"event {error.wanted} has expired; the log begins at {error.first}"
            return Refusal(410, "expired", message, first=error.first)
        case StoreError():  # its location and what is wrong with it are not for clients
            _log.error("cannot answer a request: %s", error)
            return Refusal(503, "store", "the store of jobs cannot be used at the moment")
        case SessionClosed():
            return Refusal(503, "closed", "the service is not ready")
        case _:
            return Refusal(409, "refused", str(error))
