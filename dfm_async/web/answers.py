"""What a service answers: JSON, and errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dfm_async.errors import (
    DfmError,
    JobExists,
    JobNotFound,
    JobOwned,
    ParameterError,
    PipelineError,
    QueueFull,
    ResultsExpired,
    SessionClosed,
    StoreError,
)

__all__ = ["Refusal", "answer", "raw_answer", "refusal_of", "route_refusal"]

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that is not granted.

    Attributes:
        status: the status of the answer.
        code: one word for programs.
        message: a sentence for people.
        problems: everything that is wrong, if there may be more than one thing.
        retry_after: after how many seconds to try again, if that makes sense.
        challenge: how a client can authenticate itself, if it has to.
        extra: further members of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        problems: Sequence[str] = (),
        retry_after: float | None = None,
        challenge: str | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message
        self.problems = tuple(problems)
        self.retry_after = retry_after
        self.challenge = challenge
        self.extra = extra

    def response(self) -> Response:
        """Gives the answer."""
        content: dict[str, Any] = {"error": self.code, "message": self.message, **self.extra}
        if self.problems:
            content["problems"] = self.problems
        found = answer(content, self.status)
        if self.retry_after is not None:
            found.headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.challenge is not None:
            found.headers["www-authenticate"] = self.challenge
        return found


def answer(content: Any, status: int = 200) -> Response:
    """Answers with JSON that nobody keeps: it tells of one moment."""
    return raw_answer(msgspec.json.encode(content), status)


def raw_answer(body: bytes, status: int = 200) -> Response:
    """Answers with JSON that is encoded already."""
    return Response(body, status, {"cache-control": "no-store"}, media_type="application/json")


async def route_refusal(request: Request, error: Exception) -> Response:
    """What a client is told who asks for a route that is not there."""
    allowed = getattr(error, "headers", None)
    if not allowed:
        return Refusal(404, "route", "there is nothing at this address; /openapi.json tells what there is").response()
    response = Refusal(405, "method", f"{request.method} is not possible at this address").response()
    response.headers.update(allowed)
    return response


def refusal_of(error: DfmError, retry: float) -> Refusal:
    """What a client is told about an error of the library."""
    match error:
        case JobExists():  # nothing about the other job: it may be somebody else's
            message = f"the job id {error.job_id!r} is taken, by a job with other content or of somebody else"
            return Refusal(409, "exists", message)
        case ParameterError():
            return Refusal(422, "parameters", "the parameters do not fit", error.problems)
        case PipelineError():
            return Refusal(422, "pipeline", "the pipeline cannot be run", [str(found) for found in error.problems])
        case JobNotFound():
            return Refusal(404, "job", "there is no such job")
        case JobOwned():
            return Refusal(409, "owned", "another process runs the job: it can only be read here")
        case QueueFull():
            return Refusal(429, "queue", "too many jobs wait", retry_after=retry)
        case ResultsExpired():
            message = f"event {error.wanted} is gone; the log begins at {error.first}"
            return Refusal(410, "expired", message, first=error.first)
        case StoreError():  # where it is, and what is wrong with it, is nothing for clients
            _log.error("a request could not be answered: %s", error)
            return Refusal(503, "store", "the store of jobs cannot be used at the moment", retry_after=retry)
        case SessionClosed():
            return Refusal(503, "closed", "the service is not ready", retry_after=retry)
        case _:
            return Refusal(409, "refused", str(error))
