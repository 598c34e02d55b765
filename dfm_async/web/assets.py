"""The files of the live page, as browsers get them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.runtime.once import in_thread
from dfm_async.web.answers import Refusal
from dfm_async.web.state import State

__all__ = ["Assets"]

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX: Final = "index.html"
_HEADERS: Final = {
    # Only what the service itself serves, and nothing that stands in the page or comes with values.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but asked for again: the tag tells whether it is still the same
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class _Asset:
    """One file."""

    body: bytes
    packed: bytes
    tag: str
    media: str


class Assets:
    """Answers with the live page and its files. They are read once, when the first of them is wanted."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._found: dict[str, _Asset] | None = None

    async def index(self, request: Request, _send: Send) -> Response:
        """Gives the page; lets a browser in that brings a token."""
        return self._state.guard.enter(request) or await self._give(request, _INDEX)

    async def file(self, request: Request, _send: Send) -> Response:
        """Gives what the page is made of."""
        return await self._give(request, request.path_params["name"])

    async def _give(self, request: Request, name: str) -> Response:
        await self._state.guard.principal(request)
        if self._found is None:
            self._found = await in_thread(_read, "page")
        asset = self._found.get(name)
        if asset is None:
            raise Refusal(404, "file", "there is no such file")
        headers = {**_HEADERS, "etag": asset.tag}
        if asset.tag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.packed, headers={**headers, "content-encoding": "gzip"}, media_type=asset.media)
        return Response(asset.body, headers=headers, media_type=asset.media)


def _read() -> dict[str, _Asset]:
    found = {}
    for file in files("dfm_async.web").joinpath("page").iterdir():
        media = _TYPES.get(file.name[file.name.rfind(".") :])
        if media is not None:
            body = file.read_bytes()
            tag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'  # weak: the same for what is packed and what is not
            found[file.name] = _Asset(body, gzip.compress(body, mtime=0), tag, media)
    return found
