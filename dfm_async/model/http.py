"""Requests to HTTP services, as plain data."""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from dfm_async.model.checks import check_number, whole
from dfm_async.model.policies import RetryPolicy

TEMPLATE: Final = re.compile(r"\{([^{}]*)\}")
"""A parameter in a path."""
FRAMING: Final = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that route and delimit a request: arguments of a call must not set them."""
_CONTROL: Final = re.compile(r"[\x00-\x20\x7f]")
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class _HttpData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Argument(_HttpData, frozen=True, kw_only=True):
    """Where an argument goes.

    Attributes:
        argument: its name in the call.
        name: its name in the request.
        place: the part of the request.
        style: how arrays and objects are written, as OpenAPI names it.
        explode: whether each of their parts has a name of its own.
        json: whether it is written as JSON instead.
        required: whether a request without it makes no sense.
    """

    argument: str
    name: str
    place: Literal["path", "query", "header", "cookie"]
    style: Literal["simple", "form", "spaceDelimited", "pipeDelimited", "deepObject"] = "form"
    explode: bool = False
    json: bool = False
    required: bool = False


class RequestPayload(_HttpData, frozen=True, kw_only=True):
    """What the body of the request is made of.

    Attributes:
        kind: how it is written.
        content_type: its media type.
        argument: the argument that is the whole of it; empty if it is put together.
        properties: the arguments that it is put together from, with their names in it.
        required: those among them, or the whole, that are sent also if they are None.
        always: whether it is sent also if none of them is given.
    """

    kind: Literal["json", "form", "text", "bytes"] = "json"
    content_type: str = "application/json"
    argument: str = ""
    properties: dict[str, str] = {}
    required: tuple[str, ...] = ()
    always: bool = False


class Credential(_HttpData, frozen=True, kw_only=True):
    """A secret that goes with each request.

    Attributes:
        argument: its name in the call. For ``basic`` it is ``user:password``.
        kind: how it is sent.
        name: the name of the header, the cookie, or the part of the query.
    """

    argument: str
    kind: Literal["bearer", "basic", "header", "query", "cookie"]
    name: str = ""


class RequestPlan(_HttpData, frozen=True, kw_only=True):
    """How the requests of one operation are made.

    Attributes:
        method: the method.
        base_url: what all paths of the service begin with.
        path: the path, with the names of its parameters in braces.
        arguments: where the arguments go, besides the body.
        payload: the body.
        credentials: the secrets.
    """

    method: str
    base_url: str
    path: str
    arguments: tuple[Argument, ...] = ()
    payload: RequestPayload | None = None
    credentials: tuple[Credential, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z]+", self.method):
            raise ValueError(f"method must be in capital letters, such as 'GET', not {self.method!r}")
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError("base_url must be an http or https URL with a host")
        if address.username or address.password or address.query or address.fragment:
            raise ValueError("base_url must not have credentials, a query or a fragment: put secrets into the vault")
        if not self.path.startswith("/") or _CONTROL.search(self.path) or "?" in self.path or "#" in self.path:
            raise ValueError(f"path must begin with '/' and have no query or fragment, not {self.path!r}")
        known = {argument.name for argument in self.arguments if argument.place == "path"}
        if missing := sorted(set(TEMPLATE.findall(self.path)) ^ known):
            raise ValueError(f"path {self.path!r}: only in the path, or only among the arguments: {', '.join(missing)}")
        named = [argument.name for argument in self.arguments if argument.place in ("header", "cookie")]
        named += [credential.name for credential in self.credentials if credential.kind in ("header", "cookie")]
        for name in named:
            if not _TOKEN.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name of a header or a cookie")
        for argument in self.arguments:
            if argument.place == "header" and argument.name.lower() in FRAMING:
                raise ValueError(f"{argument.name!r} cannot be an argument: this header decides how requests are sent")


class HttpOptions(_HttpData, frozen=True, kw_only=True):
    """Options of requests to an HTTP service.

    Attributes:
        timeout: how many seconds one try may take, from the connection to the end of the answer.
        connect_timeout: how many of them the connection may take.
        retry: the number of attempts, and the pauses between them. A request is retried if the service could not be
            reached; and, for idempotent methods, if the connection broke, or the service did not answer in time, or
            with 429, 500, 502, 503 or 504. A longer pause of the service (``Retry-After``) has precedence; but one
            longer than ``max_backoff`` is not waited for.
        retry_unsafe: treat also POST and PATCH as idempotent.
        connections: how many requests of one operation and job are in flight at the same time; others wait.
        max_bytes: how large an answer may be, unpacked.
        proxy: the address of a proxy. The environment is ignored.
    """

    timeout: float = 30.0
    connect_timeout: float = 10.0
    retry: RetryPolicy = RetryPolicy(attempts=3, backoff=0.5, max_backoff=60.0)
    retry_unsafe: bool = False
    connections: int = 16
    max_bytes: int = 64 * 1024 * 1024
    proxy: str | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("connections", "max_bytes"):
            whole(name, getattr(self, name))
