"""Handlers: the files of the live page, and drawings of jobs."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.base.containers import BoundedDict
from dfm_async.base.tasks import in_thread
from dfm_async.drawing import graph_of, svg
from dfm_async.planning.plan import Plan
from dfm_async.web.responses import Refusal
from dfm_async.web.state import Handlers, State

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX: Final = "index.html"
_COMMENT: Final = re.compile(rb"^ *(?:/\*\*(?s:.*?)\*/|//.*)$", re.MULTILINE)
"""A comment with lines of its own."""
_INDENT: Final = re.compile(rb"^ +", re.MULTILINE)
_HEADERS: Final = {
    # Only what the service itself serves: nothing inline, and nothing that comes with values.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but validated each time by its tag
    "vary": "accept-encoding",
}
_DRAWINGS: Final = 32
"""The number of drawings that are kept: many jobs have the same plan."""
_DRAWING_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is served."""

    body: bytes
    packed: bytes
    tag: str
    media: str


class Assets(Handlers):
    """Serves the live page and its files, which are read once, when the first of them is requested."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._files: dict[str, Asset] | None = None

    async def index(self, request: Request, _send: Send) -> Response:
        """Return the page; a browser that brings a token gets a cookie for it."""
        return self._state.guard.enter(request) or await self._serve(request, _INDEX)

    async def file(self, request: Request, _send: Send) -> Response:
        """Return a file of the page."""
        return await self._serve(request, request.path_params["name"])

    async def _serve(self, request: Request, name: str) -> Response:
        await self._state.guard.principal(request)
        if self._files is None:
            self._files = await in_thread(read_assets, "page")
        asset = self._files.get(name)
        if asset is None:
            raise Refusal(404, "file", "there is no such file")
        headers = {**_HEADERS, "etag": asset.tag}
        if asset.tag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.packed, headers={**headers, "content-encoding": "gzip"}, media_type=asset.media)
        return Response(asset.body, headers=headers, media_type=asset.media)


def read_assets() -> dict[str, Asset]:
    """Read the files of the page, by name."""
    found = {}
    for file in files("dfm_async.web").joinpath("page").iterdir():
        media = _TYPES.get(file.name[file.name.rfind(".") :])
        if media is not None:
            body = _lean(file.read_bytes())
            tag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'  # weak: the same for the packed and the plain file
            found[file.name] = Asset(body, gzip.compress(body, mtime=0), tag, media)
    return found


def _lean(body: bytes) -> bytes:
    """Return a file without comments and indentation, which are a tenth of it; its lines keep their numbers."""
    return _INDENT.sub(b"", _COMMENT.sub(lambda found: b"\n" * found[0].count(b"\n"), body))


class Drawings(Handlers):
    """Serves drawings of the pipelines of jobs."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._drawn: BoundedDict[str, str] = BoundedDict(_DRAWINGS)
        self._lock = anyio.Lock()  # one at a time: a client with many requests must not have all drawn side by side

    async def graph(self, request: Request, _send: Send) -> Response:
        """Draw the pipeline of a job over its sites."""
        _, job, _ = await self._state.job(request, "read")
        headers = {**_DRAWING_HEADERS, "etag": f'"{job.plan.hash}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(await self._drawing(job.plan), headers=headers, media_type="image/svg+xml")

    async def _drawing(self, plan: Plan) -> str:
        async with self._lock:
            found = self._drawn.get(plan.hash)
            if found is None:
                # A large one takes a while, during which the loop has to serve others.
                found = self._drawn[plan.hash] = await in_thread(lambda: svg(graph_of(plan)), "drawing")
        return found
