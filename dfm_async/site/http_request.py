"""Build requests of an HTTP service from the arguments of a call. Does no I/O."""

from __future__ import annotations

import base64
import datetime as dt
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec

from dfm_async.model.http import TEMPLATE, Argument, RequestPayload, RequestPlan

_Pairs: TypeAlias = list[tuple[str, str]]

_SEPARATORS: Final = {"form": ",", "simple": ",", "spaceDelimited": " ", "pipeDelimited": "|"}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, without its secrets."""

    path: str
    """As it is sent, like ``query``: what must be escaped is."""
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None


class RequestSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of a request. Never shown."""

    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    cookies: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()
    """Other forms of the secret that a service may repeat: the password alone, and both as they are sent."""

    def __repr__(self) -> str:
        return "<RequestSecrets>"


def make_request(plan: RequestPlan, arguments: Mapping[str, Any]) -> HttpRequest:
    """Return a request.

    Raises:
        ValueError: an argument is missing, or cannot be written in its place.
    """
    filled: dict[str, str] = {}
    query: _Pairs = []
    headers: _Pairs = [("Accept", "application/json, */*;q=0.5")]
    cookies: _Pairs = []
    for argument in plan.arguments:
        value = arguments.get(argument.argument)
        if value is None:
            if argument.required:
                raise ValueError(f"{argument.argument!r} is None, and the service needs it")
            continue
        match argument.place:
            case "path":
                filled[argument.name] = _path_part(argument, value)
            case "query":
                query += _pairs(argument, value, escaped)
            case "header":
                headers.append((argument.name, _header_text(argument.argument, _joined(argument, value))))
            case "cookie":
                cookies += [(name, _header_text(argument.argument, text)) for name, text in _pairs(argument, value)]
    content = None if plan.payload is None else _content(plan.payload, arguments)
    if content is not None and plan.payload is not None:
        headers.append(("Content-Type", plan.payload.content_type))
    if cookies:
        headers.append(("Cookie", "; ".join(f"{name}={escaped(text)}" for name, text in cookies)))
    path = urlsplit(plan.base_url).path.rstrip("/") + TEMPLATE.sub(lambda m: filled[m[1]], plan.path)
    return HttpRequest(path=path, query=query_text(query, str), headers=tuple(headers), content=content)


def sign(plan: RequestPlan, arguments: Mapping[str, Any]) -> RequestSecrets:
    """Return the secrets of a request.

    Raises:
        ValueError: one of them is missing, or cannot be sent; does not show it.
    """
    query: _Pairs = []
    headers: _Pairs = []
    cookies: _Pairs = []
    written: list[str] = []
    for credential in plan.credentials:
        secret = arguments.get(credential.argument)
        if not isinstance(secret, str) or not secret:
            raise ValueError(f"the secret {credential.argument!r} must be a non-empty string")
        if _CONTROL.search(secret) or (credential.kind in ("bearer", "header") and not secret.isascii()):
            raise ValueError(f"the secret {credential.argument!r} has characters that cannot be sent")
        match credential.kind:
            case "bearer":
                headers.append(("Authorization", f"Bearer {secret}"))
            case "basic":
                if ":" not in secret:
                    raise ValueError(f"the secret {credential.argument!r} must be written as user:password")
                encoded = base64.b64encode(secret.encode()).decode()
                headers.append(("Authorization", f"Basic {encoded}"))
                written += (encoded, secret.partition(":")[2])
            case "header":
                headers.append((credential.name, secret))
            case "query":
                query.append((credential.name, secret))
            case "cookie":
                cookies.append((credential.name, escaped(secret)))
    return RequestSecrets(query=tuple(query), headers=tuple(headers), cookies=tuple(cookies), written=tuple(written))


def escaped(text: str) -> str:
    """Return a text as it can be a part of a path or a query."""
    return quote(text, safe="")


def query_text(pairs: Iterable[tuple[str, str]], encode: Callable[[str], str] = escaped) -> str:
    """Return a query of names and values. ``encode`` is applied to the values."""
    return "&".join(f"{quote(name, safe='[]')}={encode(text)}" for name, text in pairs)


def _plain(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, Mapping)) or (isinstance(value, Iterable) and not isinstance(value, str)):
        raise ValueError(f"a value of type {type(value).__name__} cannot be written as text here")  # noqa: TRY004 - a value of the call
    return str(value)


def _parts(value: Any) -> list[tuple[str | None, str]]:
    """Return a value as strings: one, those of an array, or those of an object with their names."""
    if isinstance(value, Mapping):
        return [(str(key), _plain(item)) for key, item in value.items() if item is not None]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(None, _plain(item)) for item in value if item is not None]
    return [(None, _plain(value))]


def _joined(argument: Argument, value: Any, encode: Callable[[str], str] = str) -> str:
    """Return a value as one text. ``encode`` is applied to its parts, but not to the commas between them."""
    if argument.json:
        return encode(_json(value).decode())
    separator = _SEPARATORS.get(argument.style, ",")
    if separator != ",":
        separator = encode(separator)
    parts = [(key if key is None else encode(key), encode(text)) for key, text in _parts(value)]
    if isinstance(value, Mapping) and not argument.explode:
        return separator.join(f"{key}{separator}{text}" for key, text in parts)
    return separator.join(text if key is None else f"{key}={text}" for key, text in parts)


def _pairs(argument: Argument, value: Any, encode: Callable[[str], str] = str) -> _Pairs:
    """Return the names and the values of an argument. ``encode`` is applied to the values."""
    if argument.style == "deepObject" and isinstance(value, Mapping):
        return [(f"{argument.name}[{key}]", encode(text)) for key, text in _parts(value)]
    if argument.explode and not argument.json:
        return [(argument.name if key is None else key, encode(text)) for key, text in _parts(value)]
    return [(argument.name, _joined(argument, value, encode))]


def _path_part(argument: Argument, value: Any) -> str:
    text = _joined(argument, value, escaped)
    if text in ("", ".", ".."):  # these would lead to another path
        raise ValueError(f"{argument.argument!r} is a part of the path and cannot be {text!r}")
    return text


def _header_text(argument: str, text: str) -> str:
    if _CONTROL.search(text) or not text.isascii():
        raise ValueError(f"{argument!r} has characters that a header cannot have")
    return text.strip()


def _content(payload: RequestPayload, arguments: Mapping[str, Any]) -> bytes | None:
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
        if not value and not payload.always:
            return None
    match payload.kind:
        case "json":
            return _json(value)
        case "form":
            if not isinstance(value, Mapping):
                raise ValueError(f"{payload.argument!r} is a form and must be a dict")  # noqa: TRY004 - as above
            named = [(str(key), text) for key, part in value.items() for _, text in _parts(part)]
            return "&".join(f"{escaped(key)}={escaped(text)}" for key, text in named).encode()
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
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")
