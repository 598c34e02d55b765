"""Requests: queries and bodies, read within limits and validated as a whole."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from dfm_async.base.containers import is_deeper
from dfm_async.model.checks import LAST_MOMENT
from dfm_async.model.info import JobInfo
from dfm_async.web.limits import BodyUpload, WebLimits
from dfm_async.web.responses import Refusal

OnDisconnect = Literal["keep", "cancel"]
"""What happens to a job when the reader of its stream disconnects."""

_ON_DISCONNECT: Final = ("keep", "cancel")
_SETS: Final = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}
_JSON: Final = "application/json"
_QUALITY: Final = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
_LONGEST: Final = 100
_MOST_NAMED: Final = 10
"""The number of unknown parameters that a refusal names, and the length of their names."""
_NUMBER: Final = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,4})?")


# headers and queries


def quality(accept: str, media: str, *, named: bool = False) -> float:
    """Return how much a client wants a media type, from 0 to 1, by its header ``Accept``.

    With ``named``, wildcards do not count.
    """
    found: dict[str, float] = {}
    for part in accept.lower().split(","):
        kind, *options = map(str.strip, part.split(";"))
        given = next((option[2:] for option in options if option.startswith("q=")), "1")
        found[kind] = float(given) if _QUALITY.fullmatch(given) else 0.0
    kinds = (media,) if named else (media, f"{media.partition('/')[0]}/*", "*/*")
    return next((found[kind] for kind in kinds if kind in found), 0.0)


def check_query(query: QueryParams, known: Collection[str]) -> None:
    """Refuse parameters that a route does not have: with a filter that is misspelt, it would return everything."""
    if unknown := [name for name in query if name not in known]:
        names = [repr(name[:_LONGEST]) for name in unknown[:_MOST_NAMED]] + ["..."] * (len(unknown) > _MOST_NAMED)
        has = f"the parameters {', '.join(sorted(known))}" if known else "no parameters"
        raise Refusal(400, "query", f"unknown in the query: {', '.join(names)}. This route has {has}")


def whole_number(query: QueryParams, name: str, default: int, least: int, most: int | None = None) -> int:
    """Return a whole number of a query; refuse one that is out of its range."""
    text = query.get(name)
    if text is None:
        return default
    try:
        found = int(text) if len(text) <= 19 else least - 1
    except ValueError:
        found = least - 1
    if found < least or (most is not None and found > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise Refusal(422, "query", f"{name} must be a whole number {span}")
    return found


def moment(query: QueryParams, name: str) -> float | None:
    """Return a time of a query, in seconds since 1970; None if the query does not have it."""
    text = query.get(name)
    if text is None:
        return None
    found = float(text) if _NUMBER.fullmatch(text) else -1.0
    if not 0 <= found < math.inf:
        raise Refusal(422, "query", f"{name} must be a number of seconds since 1970, such as 1767225600")
    return found


def choice(query: QueryParams, name: str, default: str, options: tuple[str, ...]) -> str:
    """Return one of some words of a query; refuse other words."""
    found = query.get(name, default)
    if found not in options:
        raise Refusal(422, "query", f"{name} must be one of: {', '.join(options)}")
    return found


def flag(query: QueryParams, name: str) -> bool:
    """Return a truth value of a query; False if the query does not have it."""
    return choice(query, name, "false", ("false", "true", "0", "1")) in ("true", "1")


def on_disconnect(request: HTTPConnection) -> str:
    """Return what is to happen to a job when the reader of its stream disconnects.

    Links, and pages of other sites, cannot have the job cancelled.
    """
    found = choice(request.query_params, "on_disconnect", "keep", _ON_DISCONNECT)
    mode, site = (request.headers.get(f"sec-fetch-{name}") for name in ("mode", "site"))
    if found == "cancel" and (mode == "navigate" or site not in (None, "none", "same-origin")):
        raise Refusal(403, "origin", "only a program or a page of this service can use on_disconnect=cancel")
    return found


def read_after(request: HTTPConnection, info: JobInfo) -> int:
    """Return the offset behind which a reader begins, of ``Last-Event-ID`` or the query; refuse that of another log."""
    header = request.headers.get("last-event-id")
    name = "after" if header is None else "Last-Event-ID"
    query = request.query_params if header is None else QueryParams({name: header})
    found = whole_number(query, name, -1, -1)
    if found >= max(info.events, 0):
        last = f"its last event is {info.events - 1}" if info.events else "it has no events yet"
        raise Refusal(422, "query", f"{name} is {found}, but {last}: this is another job, or another log of it")
    return found


# bodies


def _whole(value: Any) -> Any:
    """JSON does not distinguish 3 from 3.0."""
    return int(value) if type(value) is float and value.is_integer() else value


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Submission(_RequestBody):
    """A job to run."""

    params: Annotated[Any, Field(description="one parameter set, several, or null: none yet, the job is open")] = {}
    open: Annotated[bool, Field(description="whether the job stays open for further parameter sets")] = False
    job_id: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$", description="the same again is the same job"),
    ] = None
    priority: Annotated[
        int, Field(ge=-1000, le=1000, description="the highest runs first"), BeforeValidator(_whole)
    ] = 0
    deadline: Annotated[float | None, Field(gt=0, description="seconds until the job is aborted")] = None
    start_at: Annotated[
        float | None, Field(ge=0, le=LAST_MOMENT, description="when the job starts, in seconds since 1970")
    ] = None
    on_error: Annotated[Literal["continue", "stop"], Field(description="whether other work goes on")] = "continue"
    checkpoint: Annotated[
        Literal["marked", "calls"],
        Field(description="which calls are recorded: those that are marked, or all, which needs a store"),
    ] = "marked"
    on_disconnect: Annotated[OnDisconnect, Field(description="when the reader of the response disconnects")] = "keep"


class WholePipeline(Submission):
    """A job to run, with its pipeline."""

    pipeline: Annotated[dict[str, Any], Field(description="a pipeline as JSON")]


class Inputs(_RequestBody):
    """Further parameter sets for an open job."""

    params: Annotated[Any, Field(description="one parameter set, or several", json_schema_extra=_SETS)]
    last: Annotated[bool, Field(description="whether no more will come")] = False


class Fork(_RequestBody):
    """Where a job is forked."""

    from_node: Annotated[str, Field(min_length=1, max_length=1000, description="the first node that runs again")]
    frame: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_whole)]] | None,
        Field(max_length=128, description="one call of it: its parameter set, and its iterations of loops"),
    ] = None
    accept_changes: Annotated[
        bool, Field(description="whether recorded values are used of operations whose code has changed")
    ] = False


class Sent(_RequestBody):
    """An event for a parameter set."""

    value: Annotated[Any, Field(description="the value of the event, of the type that the pipeline declares")] = None
    frame: Annotated[
        int | None,
        Field(description="the number of the parameter set; null if the job has exactly one"),
        BeforeValidator(_whole),
    ] = None


class Cancel(_RequestBody):
    """Why a job is cancelled."""

    reason: Annotated[str | None, Field(max_length=1000)] = None


T = TypeVar("T", bound=_RequestBody)


async def read_body(request: Request, limits: WebLimits, upload: BodyUpload, kind: type[T]) -> T:
    """Read the body of a request, ``{}`` if it is empty; refuse one that is too large, slow or deep, or invalid."""
    _, found = await read_json(request, limits, upload)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise Refusal(422, "body", "the body is invalid", _problems(error, kind)) from error


async def read_json(request: Request, limits: WebLimits, upload: BodyUpload) -> tuple[bytearray, Any]:
    """Read the body of a request: its bytes, and what they mean, ``{}`` if it is empty."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            data = await _bytes(request, limits.body_bytes, upload)
    except TimeoutError:
        raise Refusal(408, "slow", f"the body must arrive within {limits.body_seconds:g} seconds") from None
    found: Any = {}
    if data.strip():
        # Before a page of another site sends this type, the browser has to ask the service; other types it just sends.
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != _JSON:
            raise Refusal(415, "type", f"the content type must be {_JSON}")
        too_deep = Refusal(422, "depth", f"the body may be {limits.json_depth} levels deep")
        try:
            found = msgspec.json.decode(data)
        except RecursionError:
            raise too_deep from None
        except ValueError as error:
            raise Refusal(400, "json", f"the body is not JSON: {error}") from error
        if is_deeper(found, limits.json_depth):  # checked before anything walks it recursively
            raise too_deep
    return data, found


async def _bytes(request: Request, limit: int, upload: BodyUpload) -> bytearray:
    too_large = Refusal(413, "size", f"the body may have {limit} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    found = bytearray()
    try:
        async for part in request.stream():
            if len(found) + len(part) > limit:
                raise too_large
            upload.hold(len(part))
            found += part
    except ClientDisconnect as error:
        raise Refusal(400, "gone", "the client disconnected") from error
    return found


def _problems(error: ValidationError, kind: type[_RequestBody]) -> list[str]:
    found = []
    for problem in error.errors(include_url=False, include_input=False):
        where, text = ".".join(str(part) for part in problem["loc"]), problem["msg"]
        if problem["type"] == "model_type":
            text = "the body must be a JSON object"
        elif problem["type"] == "extra_forbidden":
            text = f"unknown field (the request has: {', '.join(kind.model_fields)})"
            if "params" in kind.model_fields:
                text += f'. Write parameters of the pipeline as {{"params": {{"{where}": ...}}}}'
        found.append(f"{where}: {text}" if where else text)
    return found
