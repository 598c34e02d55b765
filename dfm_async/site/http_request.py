"""Requests of an HTTP service from the arguments of a call: where each goes, and how it is written. Pure."""

from __future__ import annotations

import base64
import datetime as dt
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec

__all__ = ["Argument", "Credential", "Payload", "Request", "RequestPlan", "Signature"]

Place: TypeAlias = Literal["path", "query", "header", "cookie"]
_Pairs: TypeAlias = list[tuple[str, str]]

_SEPARATORS: Final = {"form": ",", "simple": ",", "spaceDelimited": " ", "pipeDelimited": "|"}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_TEMPLATE: Final = re.compile(r"\{([^{}]*)\}")
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Argument(_Data, frozen=True, kw_only=True):
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
    place: Place
    style: Literal["simple", "form", "spaceDelimited", "pipeDelimited", "deepObject"] = "form"
    explode: bool = False
    json: bool = False
    required: bool = False


class Payload(_Data, frozen=True, kw_only=True):
    """What the body of the request is made of.

    Attributes:
        kind: how it is written.
        content_type: what the request says of it.
        argument: the argument that is the whole of it; empty if it is put together.
        properties: the arguments that it is put together from, with their names in it.
        required: those among them, or the whole, that are sent also if they are None.
    """

    kind: Literal["json", "form", "text", "bytes"] = "json"
    content_type: str = "application/json"
    argument: str = ""
    properties: dict[str, str] = {}
    required: tuple[str, ...] = ()


class Credential(_Data, frozen=True, kw_only=True):
    """A secret that goes with each request.

    Attributes:
        argument: its name in the call. For ``basic`` it is ``user:password``.
        kind: how it is sent.
        name: the name of the header, the cookie, or the part of the query.
    """

    argument: str
    kind: Literal["bearer", "basic", "header", "query", "cookie"]
    name: str = ""


class Request(_Data, frozen=True, kw_only=True):
    """A request, without its secrets."""

    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None


class Signature(_Data, frozen=True, kw_only=True):
    """The secrets of a request. Never shown."""

    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    cookies: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return "<Signature>"


class RequestPlan(_Data, frozen=True, kw_only=True):
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
    payload: Payload | None = None
    credentials: tuple[Credential, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z]+", self.method):
            raise ValueError(f"a method is written in capital letters, not {self.method!r}")
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError("base_url must be an address with http or https and a host")
        if address.username or address.password or address.query or address.fragment:
            raise ValueError("base_url must not have credentials, a query or a fragment; secrets belong into the vault")
        if not self.path.startswith("/") or _CONTROL.search(self.path) or "?" in self.path or "#" in self.path:
            raise ValueError(f"a path begins with '/' and has no query, not {self.path!r}")
        known = {argument.name for argument in self.arguments if argument.place == "path"}
        if missing := sorted(set(_TEMPLATE.findall(self.path)) ^ known):
            raise ValueError(f"path {self.path!r} and its parameters do not agree about {', '.join(missing)}")
        named = [argument.name for argument in self.arguments if argument.place in ("header", "cookie")]
        named += [credential.name for credential in self.credentials if credential.kind in ("header", "cookie")]
        for name in named:
            if not _TOKEN.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a header or a cookie")

    def request(self, arguments: Mapping[str, Any]) -> Request:
        """Makes a request.

        Raises:
            ValueError: an argument is missing, or cannot stand where it belongs.
        """
        filled: dict[str, str] = {}
        query: _Pairs = []
        headers: _Pairs = [("Accept", "application/json, */*;q=0.5")]
        cookies: _Pairs = []
        for argument in self.arguments:
            value = arguments.get(argument.argument)
            if value is None:
                if argument.required:
                    raise ValueError(f"{argument.argument!r} is None, and the service needs it")
                continue
            match argument.place:
                case "path":
                    filled[argument.name] = _path_part(argument, value)
                case "query":
                    query += _pairs(argument, value)
                case "header":
                    headers.append((argument.name, _header_text(argument.argument, _joined(argument, value))))
                case "cookie":
                    cookies += [(name, _header_text(argument.argument, text)) for name, text in _pairs(argument, value)]
        content = None if self.payload is None else _content(self.payload, arguments)
        if content is not None and self.payload is not None:
            headers.append(("Content-Type", self.payload.content_type))
        if cookies:
            headers.append(("Cookie", "; ".join(f"{name}={quote(text, safe='')}" for name, text in cookies)))
        path = urlsplit(self.base_url).path.rstrip("/") + _TEMPLATE.sub(lambda m: filled[m[1]], self.path)
        return Request(path=path, query=tuple(query), headers=tuple(headers), content=content)

    def sign(self, arguments: Mapping[str, Any]) -> Signature:
        """Takes the secrets out of the arguments.

        Raises:
            ValueError: one of them is missing, or cannot be sent; does not show it.
        """
        query: _Pairs = []
        headers: _Pairs = []
        cookies: _Pairs = []
        for credential in self.credentials:
            secret = arguments.get(credential.argument)
            if not isinstance(secret, str) or not secret:
                raise ValueError(f"the secret {credential.argument!r} must be a text that is not empty")
            if _CONTROL.search(secret) or (credential.kind != "query" and not secret.isascii()):
                raise ValueError(f"the secret {credential.argument!r} has characters that cannot be sent")
            match credential.kind:
                case "bearer":
                    headers.append(("Authorization", f"Bearer {secret}"))
                case "basic":
                    if ":" not in secret:
                        raise ValueError(f"the secret {credential.argument!r} must be written as user:password")
                    headers.append(("Authorization", f"Basic {base64.b64encode(secret.encode()).decode()}"))
                case "header":
                    headers.append((credential.name, secret))
                case "query":
                    query.append((credential.name, secret))
                case "cookie":
                    cookies.append((credential.name, quote(secret, safe="")))
        return Signature(query=tuple(query), headers=tuple(headers), cookies=tuple(cookies))


def _plain(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, Mapping)) or (isinstance(value, Iterable) and not isinstance(value, str)):
        raise ValueError(f"a {type(value).__name__} cannot be written as text here")  # noqa: TRY004 - a value of the call
    return str(value)


def _parts(value: Any) -> list[tuple[str | None, str]]:
    """A value as texts: one, those of an array, or those of an object with their names."""
    if isinstance(value, Mapping):
        return [(str(key), _plain(item)) for key, item in value.items() if item is not None]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(None, _plain(item)) for item in value if item is not None]
    return [(None, _plain(value))]


def _joined(argument: Argument, value: Any) -> str:
    if argument.json:
        return _json(value).decode()
    separator = _SEPARATORS.get(argument.style, ",")
    if isinstance(value, Mapping) and not argument.explode:
        return separator.join(f"{key}{separator}{text}" for key, text in _parts(value))
    return separator.join(text if key is None else f"{key}={text}" for key, text in _parts(value))


def _pairs(argument: Argument, value: Any) -> _Pairs:
    if argument.style == "deepObject" and isinstance(value, Mapping):
        return [(f"{argument.name}[{key}]", text) for key, text in _parts(value)]
    if argument.explode and not argument.json:
        return [(argument.name if key is None else key, text) for key, text in _parts(value)]
    return [(argument.name, _joined(argument, value))]


def _path_part(argument: Argument, value: Any) -> str:
    text = _joined(argument, value)
    if text in ("", ".", ".."):  # these would lead to another path
        raise ValueError(f"{argument.argument!r} is a part of the path and cannot be {text!r}")
    return quote(text, safe="")


def _header_text(argument: str, text: str) -> str:
    if _CONTROL.search(text) or not text.isascii():
        raise ValueError(f"{argument!r} has characters that a header cannot have")
    return text.strip()


def _content(payload: Payload, arguments: Mapping[str, Any]) -> bytes | None:
    if payload.argument:
        value = arguments.get(payload.argument)
        if value is None and payload.argument not in payload.required:
            return None
    else:
        value = {
            name: arguments.get(argument)
            for argument, name in payload.properties.items()
            if arguments.get(argument) is not None or argument in payload.required
        }
        if not value and not payload.required:
            return None
    match payload.kind:
        case "json":
            return _json(value)
        case "form":
            if not isinstance(value, Mapping):
                raise ValueError(f"{payload.argument!r} is a form and must be a dict")  # noqa: TRY004 - as above
            named = [(str(key), text) for key, part in value.items() for _, text in _parts(part)]
            return "&".join(f"{quote(key, safe='')}={quote(text, safe='')}" for key, text in named).encode()
        case "text":
            return _plain(value).encode()
        case "bytes":
            if isinstance(value, (bytes, bytearray, memoryview)):
                return bytes(value)
            return _plain(value).encode()


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=_as_data)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from error


def _as_data(value: Any) -> Any:
    for name, options in (("model_dump", {"mode": "json"}), ("tolist", {})):
        found = getattr(value, name, None)
        if callable(found):
            return found(**options)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
