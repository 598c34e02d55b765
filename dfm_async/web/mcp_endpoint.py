"""Pipelines as tools for agents, by the Model Context Protocol over HTTP. The only user of the SDK ``mcp``.

The SDK speaks the protocol; each of its requests passes the same checks and limits as other requests of the service.
Clients of the protocol from 2026 on send requests that stand alone. Earlier ones open a session first.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

import dfm_async
from dfm_async.base.signals import Outcome
from dfm_async.base.text import install_hint
from dfm_async.errors import DfmError, SessionClosed
from dfm_async.runtime.operation_errors import ENDS
from dfm_async.session.session import Session
from dfm_async.web.access import Principal
from dfm_async.web.endpoints import Handler, RouteEndpoint, traced
from dfm_async.web.mcp_tools import ToolRequest, ToolResult, Tools
from dfm_async.web.requests import read_json
from dfm_async.web.responses import Refusal, refusal_of
from dfm_async.web.state import Handlers, State
from dfm_async.web.writers import ClientConnection

try:
    import mcp_types as types
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.shared.exceptions import MCPError
    from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
except ImportError as error:
    raise ImportError(f"tools for agents need an extra: {install_hint('mcp')}") from error

_log = logging.getLogger(__name__)

_METHODS: Final = ("POST", "DELETE")
"""The methods of requests. A ``GET`` would open a stream of notifications without a request: there are none."""
_EXCHANGE: Final = "dfm_async.exchange"
"""The key of the exchange in the scope of a request."""
_REFUSED: Final = types.INVALID_REQUEST
_SESSION: Final = "mcp-session-id"
_VERSION: Final = "mcp-protocol-version"
_WITH_SESSIONS: Final = (None, *HANDSHAKE_PROTOCOL_VERSIONS)
"""The versions of the protocol, as requests name them, by which a client opens a session."""
_IDLE: Final = 1800.0
"""The number of seconds without a request after which the session of a client ends."""
_WATCHER: Final = "_shutdown_watcher"

Context = ServerRequestContext[Any, Request]


class McpEndpoint(Handlers):
    """Serves the tools, as an ASGI application: for a route of its own, or to be mounted."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._tools = Tools(state)
        self._sessions = _Sessions(state.limits.streams_per_principal)
        self._manager: StreamableHTTPSessionManager | None = None
        self._endpoint = RouteEndpoint(traced(state, "/mcp", _refusing(self._serve)), state.limits.retry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
        else:
            await self._endpoint(scope, receive, send)

    # lifespan

    @asynccontextmanager
    async def running(self, session: Session) -> AsyncIterator[None]:
        """Run the sessions of clients in a task of its own, so that different tasks can enter and leave."""
        await self._tools.prepare()
        started: Outcome[None] = Outcome()
        task = session._spawn(self._run(session.federation.name, started))
        try:
            await asyncio.wait((started, task), return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                raise SessionClosed("the session was closed while the service opened")
            started.result()
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, name: str, started: Outcome[None]) -> None:
        server: Server[Any] = Server(
            name,
            version=dfm_async.__version__,
            on_list_tools=self._list,
            on_call_tool=self._call,
            get_tool_input_schema=self._tools.input_schema,
        )
        before = _watchers()
        try:
            while True:
                await self._manage(server, started)
        except BaseException as error:
            started.fail(error)
            raise
        finally:
            await _end_watchers(before)

    async def _manage(self, server: Server[Any], started: Outcome[None]) -> None:
        """Run the sessions of clients until this is cancelled, or an error of one of them has ended all."""
        limits = self._state.limits
        manager = StreamableHTTPSessionManager(
            server,
            session_idle_timeout=_IDLE,
            max_sessions=limits.streams,
            max_request_body_size=limits.body_bytes,
        )
        task = asyncio.current_task()
        try:
            async with manager.run():
                self._manager = manager
                started.settle(None)
                await asyncio.Event().wait()  # until it is cancelled
        except BaseException:
            if self._manager is None or (task is not None and task.cancelling()):
                raise
            _log.exception("an error has ended the sessions of all clients of the tools; they can open new ones")
        finally:
            self._manager = None
            self._sessions.forget()

    # requests

    async def _serve(self, request: Request, send: Send) -> Response | None:
        state = self._state
        principal = await state.guard.principal(request)
        if request.method not in _METHODS:
            wrong = Refusal(405, "method", f"{request.method} is not possible at this address")
            response = _protocol_refusal(wrong).response()
            response.headers["allow"] = ", ".join(_METHODS)
            return response
        manager = self._manager
        if manager is None:
            raise Refusal(503, "closed", "the service is not ready: its lifespan has not begun, or has ended")
        await self._tools.prepare()  # the pipelines may have been replaced
        with (
            state.streams.slot(principal) as slot,
            state.uploads.upload(principal) as upload,
            self._sessions.request(principal, request) as answered,
        ):
            body = b"" if request.method == "DELETE" else (await read_json(request, state.limits, upload))[0]
            exchange = ToolRequest(principal)
            connection = ClientConnection((request.receive, send), exchange.state, state.limits)
            receive, write = _receiving(bytes(body), exchange), _sending(connection, answered)
            scope = {**request.scope, _EXCHANGE: exchange}
            with slot.used(exchange.state):
                try:
                    await connection.run(lambda: manager.handle_request(scope, receive, write))
                finally:
                    exchange.end()
            await connection.keep(slot)
        return None

    # the protocol

    async def _list(self, context: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        with _protocol_errors():
            found = self._tools.available(_exchange(context).principal)
        return types.ListToolsResult(
            tools=[
                types.Tool(name=tool.name, title=tool.title, description=tool.description, input_schema=tool.schema)
                for tool in found
            ]
        )

    async def _call(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        report = context.session.report_progress if "progress_token" in (context.meta or {}) else None
        exchange = _exchange(context)
        with _protocol_errors():
            try:
                # First, since those who may not call tools are not to find out their names.
                self._state.guard.check(exchange.principal, "submit")
                if params.name not in self._state.pipelines:
                    raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r} here")
                answer = await self._tools.call(exchange, params.name, params.arguments or {}, report)
            except (Refusal, DfmError) as error:
                refusal = refusal_of(error)
                answer = ToolResult(
                    ["\n".join([refusal.message, *(f"- {problem}" for problem in refusal.problems)])], failed=True
                )
        return types.CallToolResult(
            content=[types.TextContent(text=text) for text in answer.texts],
            structured_content=answer.data,
            is_error=answer.failed,
            _meta=None if answer.job_id is None else {"job_id": answer.job_id},
        )


def _protocol_refusal(error: Refusal | DfmError) -> Refusal:
    """Return a refusal that is also an error of the protocol, so that clients show its message."""
    refusal = refusal_of(error)
    refusal.extra |= {"jsonrpc": "2.0", "id": None, "error": {"code": _REFUSED, "message": refusal.message}}
    return refusal


def _refusing(handler: Handler) -> Handler:
    """Return a handler whose refusals are also errors of the protocol."""

    async def run(request: Request, send: Send) -> Response | None:
        try:
            return await handler(request, send)
        except (Refusal, DfmError) as error:
            raise _protocol_refusal(error) from error

    return run


def _exchange(context: Context) -> ToolRequest:
    assert context.request is not None  # noqa: S101 - requests come over HTTP only
    found: ToolRequest = context.request.scope[_EXCHANGE]
    return found


@contextmanager
def _protocol_errors() -> Iterator[None]:
    """Report refusals as errors of the protocol, and failures: others than an ``Exception`` would end all sessions."""
    try:
        yield
    except (Refusal, DfmError) as error:
        raise MCPError(_REFUSED, refusal_of(error).message) from error
    except (MCPError, *ENDS):
        raise
    except BaseException as error:
        _log.exception("a request of a client of the tools failed")
        raise MCPError(types.INTERNAL_ERROR, "Internal server error") from error


def _receiving(body: bytes, exchange: ToolRequest) -> Receive:
    """Return what the SDK receives from: a body that has arrived already, then the end of the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await exchange.gone.wait()
        return {"type": "http.disconnect"}

    return receive


def _sending(connection: ClientConnection, answered: Callable[[Message], None]) -> Send:
    """Return what the SDK sends to: large bodies are written in pieces, and nothing to clients that are gone."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await connection.write(message.get("body", b""), message.get("more_body", False))
        else:
            answered(message)
            await connection.send(message)

    return send


def _watchers() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == _WATCHER}


async def _end_watchers(before: set[asyncio.Task[Any]]) -> None:
    """End the task that sse-starlette, by which the SDK sends some responses, would leave on the loop.

    Other applications on the loop share it: it stays if it was there ``before``, or while they send responses.
    """
    state = getattr(sys.modules.get("sse_starlette.sse"), "_get_shutdown_state", None)
    if state is not None and state().events:
        return
    found = _watchers() - before
    for task in found:
        task.cancel()
    if found:
        await asyncio.wait(found)


@dataclass(slots=True)
class _ClientSession:
    owner: str
    requests: int = 0
    """The number of requests in flight."""
    used: float = 0.0
    """The time of the loop at which the last one ended."""


class _Sessions:
    """The sessions that clients of earlier protocols have opened: whose they are, and how many a principal has."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, _ClientSession] = {}

    def forget(self) -> None:
        """Forget all sessions: they have ended."""
        self._known.clear()

    @contextmanager
    def request(self, principal: Principal, request: Request) -> Iterator[Callable[[Message], None]]:
        """Admit a request of a session, or one that opens a session; give what takes the start of its response.

        A session of another principal does not exist; one that would be too many is refused.
        """
        given = request.headers.get(_SESSION)
        found = None if given is None else self._known.get(given)
        if given is not None and (found is None or found.owner != principal.id):
            raise Refusal(404, "session", "there is no such session: it has ended, or was never opened here")
        if given is None and request.headers.get(_VERSION) in _WITH_SESSIONS:
            self._check_room(principal)
        if found is not None:
            found.requests += 1
        try:
            yield lambda message: self._answered(principal, request, message)
        finally:
            if found is not None:
                found.requests -= 1
                found.used = asyncio.get_running_loop().time()

    def _check_room(self, principal: Principal) -> None:
        ended = asyncio.get_running_loop().time() - _IDLE
        self._known = {key: found for key, found in self._known.items() if found.requests or found.used > ended}
        own = sum(found.owner == principal.id for found in self._known.values())
        if own >= self._most:
            raise Refusal(429, "sessions", f"you have {own} sessions open, as many as you may have")

    def _answered(self, principal: Principal, request: Request, message: Message) -> None:
        status, given = message["status"], request.headers.get(_SESSION)
        if given is not None and (status == 404 or (request.method == "DELETE" and status < 300)):
            self._known.pop(given, None)
        elif given is None and status < 300 and (opened := Headers(raw=message["headers"]).get(_SESSION)) is not None:
            self._known[opened] = _ClientSession(principal.id, used=asyncio.get_running_loop().time())
