"""Requests that start or steer jobs as spans: the beginning of a trace, or a part of the caller's."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.model.events import Scalar
from dfm_async.web.answers import Refusal
from dfm_async.web.endpoints import Handler
from dfm_async.web.state import State

__all__ = ["traced"]


def traced(state: State, path: str, handler: Handler) -> Handler:
    """Runs a handler in a span ``dfm.request``, if anything is traced and nobody else has made a span for it.

    The caller's ``traceparent`` header says which trace the request belongs to.
    """

    async def run(request: Request, send: Send) -> Response | None:
        if state.current is None:
            return await handler(request, send)
        attributes: dict[str, Scalar] = {"http.request.method": request.method, "http.route": path}
        with state.current.traces.request(time.time_ns(), attributes, request.headers) as span:
            try:
                response = await handler(request, send)
            except Refusal as refusal:
                if span is not None:
                    span.refused(refusal.message, {"http.response.status_code": refusal.status})
                raise
            if span is not None and response is not None:
                span.set({"http.response.status_code": response.status_code})
            return response

    return run
