"""Drawings of jobs: their pipelines, over the sites."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.drawing import graph_of, svg
from dfm_async.planner.plan import Plan
from dfm_async.runtime.once import in_thread
from dfm_async.web.state import State

__all__ = ["GraphHandlers"]

_KEPT: Final = 32
"""How many drawings are kept: many jobs have the same plan."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class GraphHandlers:
    """Answers with drawings."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._drawn: OrderedDict[str, str] = OrderedDict()
        self._lock = anyio.Lock()  # one at a time: whoever asks often must not have them all drawn side by side

    async def graph(self, request: Request, _send: Send) -> Response:
        """Draws the pipeline of a job over its sites."""
        principal = await self._state.guard.principal(request)
        job, _ = await self._state.job(principal, "read", request.path_params["job_id"])
        plan = job.plan
        headers = {**_HEADERS, "etag": f'"{plan.hash}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(await self._drawing(plan), headers=headers, media_type="image/svg+xml")

    async def _drawing(self, plan: Plan) -> str:
        async with self._lock:
            found = self._drawn.get(plan.hash)
            if found is None:
                # A large one takes a while, and the loop has others to serve.
                found = self._drawn[plan.hash] = await in_thread(lambda: svg(graph_of(plan)), "drawing")
                while len(self._drawn) > _KEPT:
                    self._drawn.popitem(last=False)
        return found
