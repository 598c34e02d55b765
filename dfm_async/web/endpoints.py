"""Handlers as ASGI applications: errors become responses, requests that start or steer jobs become spans."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from dfm_async.errors import DfmError
from dfm_async.model.events import Scalar
from dfm_async.runtime.operation_errors import survivable
from dfm_async.web.open_streams import disconnected
from dfm_async.web.requests import check_query
from dfm_async.web.responses import Refusal, refusal_of
from dfm_async.web.state import State

T = TypeVar("T")

_CLOSE_TIMEOUT: Final = 1.0
"""The number of seconds that a refused WebSocket may take to close."""

Handler: TypeAlias = Callable[[Request, Send], Awaitable[Response | None]]
"""Answers a request: returns the response, or sends it and returns None."""

SocketHandler: TypeAlias = Callable[[WebSocket], Awaitable[None]]
"""Serves a WebSocket."""


class RouteEndpoint:
    """Runs a handler. Refusals and errors of the library become responses, wherever the routes are mounted.

    Args:
        handler: answers the requests.
        retry: the number of seconds after which clients may try again what is refused for the time being.
        query: the parameters that the query may have; None if it may have any.
    """

    def __init__(self, handler: Handler, retry: float, query: Collection[str] | None = None) -> None:
        self._handler = handler
        self._retry = retry
        self.query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, body := _BodyReceiver(receive))
        try:
            if self.query is not None:
                check_query(request.query_params, self.query)
            with survivable("a request"):
                response = await self._handler(request, send)
        except (Refusal, DfmError) as error:
            response = refusal_of(error).response(self._retry)
        if response is not None:
            if body.unread(request.headers):
                response.headers["connection"] = "close"  # else the server would have to receive the rest
            await response(scope, receive, send)


class _BodyReceiver:
    """Receives from a client; knows whether the whole body has arrived."""

    __slots__ = ("_receive", "_whole")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._whole = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._whole = True
        return message

    def unread(self, headers: Headers) -> bool:
        """Return whether a part of the body was not received."""
        return not self._whole and ("transfer-encoding" in headers or headers.get("content-length", "0") != "0")


class SocketEndpoint:
    """Runs a handler of WebSockets. A refused client gets the same response as over HTTP, if the server can send it."""

    def __init__(self, handler: SocketHandler, retry: float, query: Collection[str]) -> None:
        self._handler = handler
        self._retry = retry
        self._query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        socket = WebSocket(scope, receive, send)
        try:
            check_query(socket.query_params, self._query)
            with survivable("a WebSocket"):
                await self._handler(socket)
        except (Refusal, DfmError) as error:
            await self._deny(socket, receive, refusal_of(error))

    async def _deny(self, socket: WebSocket, receive: Receive, refusal: Refusal) -> None:
        if "websocket.http.response" not in socket.scope.get("extensions", {}):
            await socket.close(1008, refusal.message[:120])
            return
        await socket.send_denial_response(refusal.response(self._retry))
        # Some servers complain of a handshake that was not completed, unless the connection is closed by then. They
        # notify first that the connection is about to close, then that it has.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                for _ in range(2):
                    await disconnected(receive, "websocket.disconnect")


def traced(state: State, path: str, handler: Handler) -> Handler:
    """Return a handler that runs in a span ``dfm.request``, if anything is traced and there is no span for it already.

    The caller's ``traceparent`` header says which trace the request belongs to.
    """

    async def run(request: Request, send: Send) -> Response | None:
        if state.current is None:
            return await handler(request, send)
        attributes: dict[str, Scalar] = {"http.request.method": request.method, "http.route": path}
        with state.current._traces.request(time.time_ns(), attributes, request.headers) as span:
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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work on behalf of a client; cancel it if the client disconnects. The body must have been read."""
    task, disconnect = asyncio.create_task(work), asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
    if task.cancelled():
        raise Refusal(400, "gone", "the client disconnected")
    return task.result()
