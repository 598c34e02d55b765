"""Handlers as ASGI applications: what goes wrong in them becomes an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from dfm_async.errors import DfmError
from dfm_async.web.answers import Refusal, refusal_of
from dfm_async.web.limits import WebLimits

__all__ = ["Endpoint", "Handler", "SocketEndpoint", "SocketHandler", "choice", "flag", "unless_gone", "whole_number"]

T = TypeVar("T")

_CLOSING: Final = 1.0
"""For how many seconds a WebSocket that was refused may take to close."""

Handler: TypeAlias = Callable[[Request, Send], Awaitable[Response | None]]
"""Answers a request: gives the answer, or has sent it and gives None."""

SocketHandler: TypeAlias = Callable[[WebSocket], Awaitable[None]]
"""Talks over a WebSocket."""


class Endpoint:
    """Runs a handler. Refusals and errors of the library become answers, wherever the routes are mounted."""

    def __init__(self, handler: Handler, limits: WebLimits) -> None:
        self._handler = handler
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, body := _Body(receive))
        try:
            response = await self._handler(request, send)
        except Refusal as refusal:
            response = refusal.response()
        except DfmError as error:
            response = refusal_of(error, self._limits.retry).response()
        if response is not None:
            if body.unread(request.headers):
                response.headers["connection"] = "close"  # else the server would have to take the rest of it
            await response(scope, receive, send)


class _Body:
    """What a server receives from a client; knows whether the whole body has come."""

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
        """Tells whether there is more of the body than was asked for."""
        return not self._whole and ("transfer-encoding" in headers or headers.get("content-length", "0") != "0")


class SocketEndpoint:
    """Runs a handler of WebSockets. Whoever is refused gets the same answer as over HTTP, if the server can send it."""

    def __init__(self, handler: SocketHandler, limits: WebLimits) -> None:
        self._handler = handler
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        socket = WebSocket(scope, receive, send)
        try:
            await self._handler(socket)
        except Refusal as refusal:
            await _deny(socket, receive, refusal)
        except DfmError as error:
            await _deny(socket, receive, refusal_of(error, self._limits.retry))


async def _deny(socket: WebSocket, receive: Receive, refusal: Refusal) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(refusal.response())
        # Some servers complain of a handshake that was not completed, unless the connection is closed by then. They
        # notify first that the connection is about to close, then that it has.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING):
                for _ in range(2):
                    while (await receive())["type"] != "websocket.disconnect":
                        pass
    else:
        await socket.close(1008, refusal.message[:120])


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Waits for something on behalf of a client, until that has left. The body must have been read.

    Raises:
        Refusal: the client has left; the work was cancelled.
    """
    doing, leaving = asyncio.create_task(work), asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
    if doing.cancelled():
        raise Refusal(400, "gone", "the client went away")
    return doing.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def whole_number(query: QueryParams, name: str, default: int, least: int, most: int | None = None) -> int:
    """Reads a whole number of a query.

    Raises:
        Refusal: it is none, or out of its range.
    """
    text = query.get(name)
    if text is None:
        return default
    try:
        found = int(text) if len(text) <= 19 else least - 1
    except ValueError:
        found = least - 1
    if found < least or (most is not None and found > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise Refusal(422, "query", f"{name} must be a whole number {span}")
    return found


def choice(query: QueryParams, name: str, default: str, options: tuple[str, ...]) -> str:
    """Reads one of some words of a query.

    Raises:
        Refusal: it is another word.
    """
    found = query.get(name, default)
    if found not in options:
        raise Refusal(422, "query", f"{name} must be one of: {', '.join(options)}")
    return found


def flag(query: QueryParams, name: str) -> bool:
    """Reads whether something is wanted; it is not if the query does not say so.

    Raises:
        Refusal: it is no yes or no.
    """
    return choice(query, name, "false", ("false", "true", "0", "1")) in ("true", "1")
