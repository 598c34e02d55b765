"""Handlers: lists of jobs, and the events of a job, page by page."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.model.status import JobStatus
from dfm_async.web.answers import Refusal, answer
from dfm_async.web.endpoints import choice, whole_number
from dfm_async.web.jobs import info_data
from dfm_async.web.records import LogRecords
from dfm_async.web.state import State
from dfm_async.web.streams import JobReader

__all__ = ["CURSOR", "STATUS_CHOICES", "Pages"]

CURSOR: Final = re.compile(r"^[0-9]+(\.[0-9]+)?~")
"""Where a list of jobs goes on: when the last one was made, and its id."""

_PAGE: Final = 100
"""How much a page has if the client does not say."""
_ANY: Final = "any"
STATUS_CHOICES: Final = (_ANY, *(status.value for status in JobStatus if status is not JobStatus.UNKNOWN))
"""The jobs of which status a list can have."""


class Pages:
    """Answers with one page after the other."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def jobs(self, request: Request, _send: Send) -> Response:
        """Lists the jobs that the client may see, the newest first."""
        state = self._state
        principal = await state.guard.principal(request)
        state.guard.check(principal, "list")
        query = request.query_params
        limit = whole_number(query, "limit", min(_PAGE, state.limits.page_size), 1, state.limits.page_size)
        wanted = choice(query, "status", _ANY, STATUS_CHOICES)
        before = _cursor(query.get("after"))
        found = []
        # By time and id and not by place in the list: jobs come and go between two pages.
        for info in sorted(state.infos(), key=lambda info: (info.created, info.job_id), reverse=True):
            if before is not None and (info.created, info.job_id) >= before:
                continue
            if wanted in (_ANY, info.status.value) and state.guard.sees(principal, info):
                found.append(info)
                if len(found) > limit:
                    break
        page = found[:limit]
        more = f"{page[-1].created!r}~{page[-1].job_id}" if len(found) > limit else None
        return answer({"jobs": [info_data(info) for info in page], "next": more})

    async def events(self, request: Request, _send: Send) -> Response:
        """Gives the events of a job behind an offset; with ``wait``, waits so many seconds for the first of them."""
        state = self._state
        principal = await state.guard.principal(request)
        job, info = await state.job(principal, "read", request.path_params["job_id"])
        query, limits = request.query_params, state.limits
        after = whole_number(query, "after", -1, -1)
        limit = whole_number(query, "limit", min(_PAGE, limits.page_size), 1, limits.page_size)
        wait = whole_number(query, "wait", 0, 0, 60)
        if wait:
            with state.streams.seat(principal) as seat:
                async with seat.reading(job, after) as reader:
                    records = await self._page(reader, state.records_for(principal, info, reader.log), limit, wait)
        else:
            reader = JobReader(job, after)
            try:
                records = await self._page(reader, state.records_for(principal, info, reader.log), limit, 0)
            finally:
                await reader.close()
        ended = job.status.ended and reader.position >= job.info().events - 1
        return answer({"events": records, "next": reader.position, "ended": ended, "status": job.status.value})

    async def _page(self, reader: JobReader, made: LogRecords, limit: int, wait: float) -> list[msgspec.Raw]:
        records: list[msgspec.Raw] = []
        size = 0
        found = await reader.batch(wait, 1) if wait else []
        event = found[0] if found else await reader.stored()
        while event is not None:
            record = made.json(event)
            size += len(record)
            records.append(msgspec.Raw(record))
            reader.position = event.offset
            full = len(records) == limit or size >= self._state.limits.record_bytes
            event = None if full else await reader.stored()
        return records


def _cursor(text: str | None) -> tuple[float, str] | None:
    if text is None:
        return None
    if CURSOR.match(text) is None:
        raise Refusal(422, "query", "after must be what the page before has as 'next'")
    created, _, job_id = text.partition("~")
    return float(created), job_id
