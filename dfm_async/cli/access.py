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
        shown = given if scheme.lower() == "bearer" else request.cookies.get(_COOKIE, "")
        return Principal("token") if _same(shown, self._token) else None


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
            if given and _same(given[-1], self._token):
                answer = RedirectResponse(f"{scope.get('root_path', '')}/", 303, {"referrer-policy": "no-referrer"})
                answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
