"""Handlers: whether the service is alive, and ready."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.web.answers import Refusal, answer
from dfm_async.web.state import State

__all__ = ["Probes"]


class Probes:
    """Answers monitors of the service. They need no token, and no principal."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def health(self, request: Request, _send: Send) -> Response:
        """Says that the service is alive."""
        self._state.guard.admit(request)
        return answer({"status": "alive"})

    async def ready(self, request: Request, _send: Send) -> Response:
        """Says whether the service takes jobs and streams, and all its sites can serve."""
        self._state.guard.admit(request)
        state = self._state
        if not state.ready:
            message = "the service drains" if state.streams.draining else "the service is not open"
            raise Refusal(503, "not ready", message, retry_after=state.limits.retry)
        unready = state.session.stats().unready
        if unready:
            message = f"sites that cannot serve: {', '.join(unready)}"
            raise Refusal(503, "not ready", message, retry_after=state.limits.retry)
        return answer({"status": "ready"})
