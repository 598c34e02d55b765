"""Who is served by ``dfm-async serve --token-file``: whoever has the token, as a program or with a browser."""

from __future__ import annotations

import secrets
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dfm_async.web import Authorizer, Principal

__all__ = ["BrowserEntrance", "TokenAuthorizer"]

_COOKIE: Final = "dfm_token"


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


class TokenAuthorizer(Authorizer):
    """Knows everybody who has the token as one and the same: by a header, or by the cookie of a browser."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        """Tells whether a request has the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.cookies.get(_COOKIE, "") if _from_our_page(request) else ""
        return Principal("token") if _same(given, self._token) else None


def _from_our_page(request: HTTPConnection) -> bool:
    """Whether the cookie counts: browsers send it also for pages of other ports of this host, which are not ours."""
    headers = request.headers
    origin = headers.get("origin")
    if origin is None:  # so it is for images, frames and the like, but browsers tell what they are; links are fine
        return headers.get("sec-fetch-site") != "same-site" or headers.get("sec-fetch-dest") == "document"
    return origin.partition("://")[2] == headers.get("host")


class BrowserEntrance:
    """Lets browsers in, which cannot be told to send a header: ``/?token=...`` makes the token a cookie.

    The cookie is not sent with requests that pages of other sites make, and no script can read it.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a browser that brings the token, and leaves everything else to the service."""
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/":
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
            # Tokens have no spaces, but may have a plus, which means one in a query.
            if given and _same(given[-1].replace(" ", "+"), self._token):
                answer = RedirectResponse(f"{scope.get('root_path', '')}/", 303, {"referrer-policy": "no-referrer"})
                answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
