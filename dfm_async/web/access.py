"""Access: principals, authorizers and tokens."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from dfm_async.base.addresses import is_loopback
from dfm_async.model.info import JobInfo
from dfm_async.web.responses import Refusal

Action: TypeAlias = Literal["list", "submit", "prioritize", "read", "send", "cancel", "forget", "debug", "metrics"]
"""What a client wants: see jobs and pipelines, submit a job, submit one with a priority above 0, read one, send it
inputs and events or resume it, cancel it, forget it when it has ended, see the tracebacks of its errors, see the
metrics and the state of workers."""

_NOT_BY_DEFAULT: Final = ("debug", "metrics", "prioritize")
_FORWARDED: Final = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "x-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)
_VARIABLE: Final = "DFM_TOKEN"
_SHORTEST: Final = 16
_COOKIE: Final = "dfm_async"


@dataclass(frozen=True, slots=True)
class Principal:
    """A user of the service.

    Attributes:
        id: the id, with which jobs are labelled.
        data: further data of the authorizer.
    """

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Authorizer(Protocol):
    """Identify clients, and decide what they may do. Derive from this class, and implement ``__call__``.

    Attributes:
        query: the names of the query parameters that the authorizer reads, such as ``("key",)``; routes reject other
            unknown ones.
    """

    query: Collection[str] = ()

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        """Return the principal of a request; None if it is not known (the response is 401)."""
        ...

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        """Return whether a principal may perform an action.

        By default a principal may do everything but ``"debug"``, ``"metrics"`` and ``"prioritize"``, with its own jobs.

        Args:
            principal: the principal.
            action: the action.
            job: the job, whose ``label`` is the id of its principal; None if the action is about no particular job.
        """
        return action not in _NOT_BY_DEFAULT and (job is None or job.label == principal.id)

    def only_label(self, principal: Principal) -> str | None:
        """Return the label of the only jobs that a principal may read; None if it may read jobs with other labels.

        Job lists then read only jobs with this label, which must also pass ``allows``. The default is the id of the
        principal, or None if ``allows`` is overridden.

        Args:
            principal: the principal.
        """
        return principal.id if type(self).allows is Authorizer.allows else None


class TokenAuthorizer(Authorizer):
    """Serve clients that have a token; all of them are one principal, which may do everything.

    Programs send ``Authorization: Bearer <token>``. A browser opens ``/?token=<token>`` once, and gets a cookie that is
    derived from the token. The cookie is not sent with requests that pages of other sites make, and no script can
    read it.

    Args:
        token: the token, of at least 16 printable ASCII characters.
    """

    def __init__(self, token: str) -> None:
        if not isinstance(token, str):
            raise TypeError(f"token must be a string, not {type(token).__name__}")
        if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"a token has at least {_SHORTEST} printable ASCII characters and no spaces")
        self._token = token
        # Browsers send cookies to all ports of a host: services with different tokens need different names.
        self._name = f"{_COOKIE}_{hmac.new(token.encode(), b'dfm_async name', hashlib.sha256).hexdigest()[:8]}"
        self._cookie = hmac.new(token.encode(), b"dfm_async cookie", hashlib.sha256).hexdigest()

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        """Return the one principal if a request has the token, or the cookie of a browser that had it."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            known = _same(given.strip(), self._token)
        else:
            known = _same(request.cookies.get(self._name, ""), self._cookie)
            if known:
                _check_site(request)
        return Principal("token") if known else None

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        """Return True: the principal may do everything."""
        return True

    def enter(self, request: Request) -> Response | None:
        """Return the response for a browser that sends the token in the address; None if it does not."""
        # Tokens have no spaces, but may have a plus, which means a space in a query.
        if not _same(request.query_params.get("token", "").replace(" ", "+"), self._token):
            return None
        path = f"{request.scope.get('root_path', '')}/"
        rest = request.url.include_query_params().remove_query_params("token").query
        answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303, {"referrer-policy": "no-referrer"})
        answer.set_cookie(
            self._name, self._cookie, path=path, httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return answer


class LocalAuthorizer(TokenAuthorizer):
    """The authorizer of a service without one: clients need a token, and must be on the same machine.

    A proxy on the same machine makes every client look local, so that the token is what counts; the other checks
    refuse what can be recognised.
    """

    def __init__(self) -> None:
        given = os.environ.get(_VARIABLE, "").strip()
        self.token = given or secrets.token_urlsafe(24)
        """The token."""
        self.generated = not given
        """Whether the token was generated, so that users do not know it yet."""
        super().__init__(self.token)

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        """Return the one principal if a request comes from this machine and has the token."""
        _check_local(request)
        return None if await super().__call__(request) is None else Principal("local")

    def enter(self, request: Request) -> Response | None:
        """Return the response for a browser on this machine that brings the token in the address."""
        _check_local(request)
        return super().enter(request)


class AllowAnyone(Authorizer):
    """Serve all clients as one principal, which may do everything: for tests, and where only trusted programs connect.

    Pages of other sites are rejected if the browser reports the origin of the request. The host name is not checked, so
    a page whose name resolves to this service (DNS rebinding) is served. Do not use this class where browsers run.
    """

    async def __call__(self, request: HTTPConnection, /) -> Principal | None:
        """Return the one principal."""
        _check_site(request)
        return Principal("anyone")

    def allows(self, principal: Principal, action: Action, job: JobInfo | None) -> bool:
        """Return True."""
        return True


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _check_local(request: HTTPConnection) -> None:
    """Refuse a client that is recognisably not on this machine."""
    headers = request.headers
    if not is_loopback(None if request.client is None else request.client.host):
        raise Refusal(403, "loopback", f"without an authorizer only clients on this machine are served. {_ADVICE}")
    if request.scope.get("http_version") == "1.0" or any(name in headers for name in _FORWARDED):
        raise Refusal(403, "loopback", f"without an authorizer clients behind a proxy are not served. {_ADVICE}")
    # A page of some other site whose name leads to this machine must not be able to use the service.
    host = _host_of(f"//{headers.get('host', '')}") or ""
    if not (is_loopback(host) or host.endswith(".localhost")):
        raise Refusal(403, "host", f"without an authorizer the host must be a name of this machine. {_ADVICE}")


_ADVICE: Final = "To serve others: Service(authorizer=...); in tests: Service(authorizer=AllowAnyone())"


def _check_site(request: HTTPConnection) -> None:
    """Refuse a request that a page of another site, or of another port of this host, has made.

    Links that lead to the live page are fine.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin is not None:
        ours = origin.partition("://")[2] == headers.get("host")
    else:  # images, frames and links have no origin, but browsers report their kind
        link = headers.get("sec-fetch-dest") == "document" and _is_page(request)
        ours = link or headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    if not ours:
        raise Refusal(403, "origin", "pages of other sites are not served")


def _is_page(request: HTTPConnection) -> bool:
    return str(request.scope.get("path", "")).removeprefix(str(request.scope.get("root_path", ""))) in ("", "/")


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # brackets that do not fit, and the like
        return None


class Guard:
    """Refuses what the authorizer does not allow."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    @property
    def query(self) -> Collection[str]:
        """The query parameters that the authorizer reads."""
        return self._authorizer.query

    async def principal(self, request: HTTPConnection) -> Principal:
        """Return the principal of a request; refuse a request without one."""
        found = await self._authorizer(request)
        if found is None:
            raise Refusal(401, "unauthenticated", self._how(), challenge="Bearer")
        return found

    def _how(self) -> str:
        if not isinstance(self._authorizer, TokenAuthorizer):
            return "the request has no credentials that this service accepts"
        where = ""
        if isinstance(self._authorizer, LocalAuthorizer):
            generated = self._authorizer.generated
            where = " that the service printed when it started" if generated else f" in its variable {_VARIABLE}"
        how = "send it as 'Authorization: Bearer ...', or open /?token=... in a browser"
        users = "All clients share it; for a token per user, see 'Authorizers' on the page 'Web services' of the guide"
        return f"this service needs the token{where}: {how}. {users}"

    def check_client(self, request: HTTPConnection) -> None:
        """Refuse a client of another machine, for requests without a principal, if only local clients are served."""
        if isinstance(self._authorizer, LocalAuthorizer):
            _check_local(request)

    def enter(self, request: Request) -> Response | None:
        """Return the response for a browser that brings a token in the address; None for other requests."""
        return self._authorizer.enter(request) if isinstance(self._authorizer, TokenAuthorizer) else None

    def check(self, principal: Principal, action: Action) -> None:
        """Refuse an action that is about no particular job, unless it is allowed."""
        if not self._authorizer.allows(principal, action, None):
            raise Refusal(403, "forbidden", f"you may not {action} here")

    def check_job(self, principal: Principal, action: Action, job: JobInfo) -> None:
        """Refuse an action with a job, unless it is allowed; to principals that may not read it, it does not exist."""
        if not self.sees(principal, job):
            raise Refusal(404, "job", "there is no such job")
        if action != "read" and not self._authorizer.allows(principal, action, job):
            raise Refusal(403, "forbidden", f"you may not {action} this job")

    def allows(self, principal: Principal, action: Action, job: JobInfo | None = None) -> bool:
        """Return whether a principal may perform an action."""
        return self._authorizer.allows(principal, action, job)

    def only_label(self, principal: Principal) -> str | None:
        """Return the label of the only jobs that a principal may know of; None if it may know of others."""
        return self._authorizer.only_label(principal)

    def sees(self, principal: Principal, job: JobInfo) -> bool:
        """Return whether a principal may know of a job."""
        return self._authorizer.allows(principal, "read", job)
