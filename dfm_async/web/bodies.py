"""The bodies of requests: read as far as allowed, and checked as a whole."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from dfm_async.model.depth import is_deeper
from dfm_async.web.answers import Refusal
from dfm_async.web.limits import WebLimits
from dfm_async.web.uploads import Upload

__all__ = ["Cancel", "Inputs", "OnDisconnect", "Submission", "WholePipeline", "read_body"]

OnDisconnect = Literal["keep", "cancel"]
"""What happens to a job when the reader of its stream goes away."""

_SETS: Final = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}


def _whole(value: Any) -> Any:
    """JSON does not tell 3 from 3.0."""
    return int(value) if type(value) is float and value.is_integer() else value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Submission(_Body):
    """A job that is to be run."""

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
    on_error: Annotated[Literal["continue", "stop"], Field(description="whether other work goes on")] = "continue"
    on_disconnect: Annotated[OnDisconnect, Field(description="when the reader of the answer goes away")] = "keep"


class WholePipeline(Submission):
    """A job that is to be run, with its pipeline."""

    pipeline: Annotated[dict[str, Any], Field(description="a pipeline as JSON")]


class Inputs(_Body):
    """Further parameter sets for a job that is open."""

    params: Annotated[Any, Field(description="one parameter set, or several", json_schema_extra=_SETS)]
    last: Annotated[bool, Field(description="whether no more will come")] = False


class Cancel(_Body):
    """Why a job is cancelled."""

    reason: Annotated[str | None, Field(max_length=1000)] = None


T = TypeVar("T", bound=_Body)

_JSON: Final = "application/json"


async def read_body(request: Request, limits: WebLimits, upload: Upload, kind: type[T]) -> T:
    """Reads the body of a request. An empty one is an empty object.

    Raises:
        Refusal: it is too large, too slow, too deep, or not what is needed; with everything that is wrong.
    """
    try:
        async with asyncio.timeout(limits.body_seconds):
            data = await _bytes(request, limits.body_bytes, upload)
    except TimeoutError:
        raise Refusal(408, "slow", f"the body must come within {limits.body_seconds:g} seconds") from None
    found: Any = {}
    if data.strip():
        # Browsers ask before they send this type for a page of another site; other types they just send.
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != _JSON:
            raise Refusal(415, "type", f"the content type must be {_JSON}")
        try:
            found = msgspec.json.decode(data)
        except RecursionError:
            raise _too_deep(limits.json_depth) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal(400, "json", f"the body is not JSON: {error}") from error
        _check_depth(found, limits.json_depth)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise Refusal(422, "body", "the request does not fit", _problems(error)) from error


async def _bytes(request: Request, limit: int, upload: Upload) -> bytearray:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > limit:
        raise _too_large(limit)
    found = bytearray()
    try:
        async for part in request.stream():
            if len(found) + len(part) > limit:
                raise _too_large(limit)
            upload.hold(len(part))
            found += part
    except ClientDisconnect as error:
        raise Refusal(400, "gone", "the client went away") from error
    return found


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "size", f"the body may have {limit} bytes")


def _too_deep(limit: int) -> Refusal:
    return Refusal(422, "depth", f"the body may be {limit} levels deep")


def _check_depth(value: Any, limit: int) -> None:
    """A body that is too deep is refused before anything walks it recursively."""
    if is_deeper(value, limit):
        raise _too_deep(limit)


def _problems(error: ValidationError) -> list[str]:
    found = []
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in problem["loc"])
        found.append(f"{where}: {problem['msg']}" if where else problem["msg"])
    return found
