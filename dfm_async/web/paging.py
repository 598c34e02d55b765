"""Handlers: lists of jobs, and the events of a job, page by page."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from dfm_async.errors import DfmError
from dfm_async.model.events import Event
from dfm_async.model.info import JobInfo
from dfm_async.model.status import JobStatus
from dfm_async.web.open_streams import JobReader
from dfm_async.web.records import LogRecords
from dfm_async.web.requests import choice, moment, whole_number
from dfm_async.web.responses import Refusal, answer, info_data
from dfm_async.web.state import Handlers
from dfm_async.web.writers import ClientConnection, response_start

CURSOR: Final = re.compile(r"^[0-9]+(\.[0-9]+)?~")
"""The position in a list of jobs: when the last one was created, and its id."""

_PAGE: Final = 100
"""The number of items of a page if the request does not have a limit."""
_LARGEST: Final = 1000
"""The largest limit of any request: clients need not know how large the pages of a service are."""
_PART: Final = 64 * 1024
"""About how many bytes of a page are encoded at once."""
_OPEN: Final = b'{"events":['
_JSON: Final = "application/json"
_HEADERS: Final = {"cache-control": "no-store"}
_TURN: Final = 100
"""The number of jobs after which other tasks of the loop run."""
_ANY: Final = "any"
STATUS_CHOICES: Final = (_ANY, *(status.value for status in JobStatus if status is not JobStatus.UNKNOWN))
"""The statuses by which a list can be filtered."""


def largest_limit(page_size: int) -> int:
    """Return the largest limit that a request may have. Pages have at most ``page_size`` items all the same."""
    return max(page_size, _LARGEST)


class PageHandlers(Handlers):
    """Serves lists page by page."""

    def _limit(self, query: QueryParams) -> int:
        page_size = self._state.limits.page_size
        return min(whole_number(query, "limit", _PAGE, 1, largest_limit(page_size)), page_size)

    async def jobs(self, request: Request, _send: Send) -> Response:
        """List the jobs that the client may see, the newest first."""
        state = self._state
        principal = await state.authorize(request, "list")
        query = request.query_params
        limit = self._limit(query)
        wanted = choice(query, "status", _ANY, STATUS_CHOICES)
        # Jobs are labelled with their principals: all of these name the label, if they are there.
        labels = {query.get("label"), query.get("principal"), state.guard.only_label(principal)} - {None}
        # The next page begins behind the last job, and not at a number: jobs come and go between two pages.
        since, until, before = moment(query, "since"), moment(query, "until"), _cursor(query.get("after"))
        try:
            jobs = state.session.find_jobs(
                status=None if wanted == _ANY else JobStatus(wanted),
                pipeline=query.get("pipeline"),
                label=next(iter(labels), None),
                since=since,
                until=until,
                search=query.get("search"),
                before=before,
            )
        except ValueError as error:  # too many words
            raise Refusal(422, "query", str(error)) from error
        if len(labels) > 1:
            return answer({"jobs": [], "next": None})
        found: list[JobInfo] = []
        seen = 0
        async with contextlib.aclosing(jobs):
            async for info in jobs:
                if state.guard.sees(principal, info):
                    found.append(info)
                    if len(found) > limit:
                        break
                seen += 1
                if seen % _TURN == 0:
                    await asyncio.sleep(0)  # there may be many jobs of others
        page = found[:limit]
        more = f"{page[-1].created!r}~{page[-1].job_id}" if len(found) > limit else None
        return answer({"jobs": [info_data(info) for info in page], "next": more})

    async def events(self, request: Request, send: Send) -> Response | None:
        """Return the events of a job behind an offset; with ``wait``, wait this many seconds for the first of them."""
        state = self._state
        principal, job, info = await state.job(request, "read")
        query, limits = request.query_params, state.limits
        after = whole_number(query, "after", -1, -1)
        limit = self._limit(query)
        wait = whole_number(query, "wait", 0, 0, 60)
        with contextlib.ExitStack() as stack:
            slot = stack.enter_context(state.streams.slot(principal)) if wait else None
            reader = JobReader(state.session, job, after)
            try:
                page = _EventPage(reader, state.records_for(principal, info, reader.log), limit, limits.record_bytes)
                if slot is not None:
                    with slot.used(reader.state):
                        await page.wait(wait)
                first = await page.part()
                if page.whole:
                    return Response(_OPEN + first + page.tail(), headers=_HEADERS, media_type=_JSON)
                # A large page is written as a stream is: as fast as the client reads it, and counted as one.
                slot = slot or stack.enter_context(state.streams.slot(principal))
                connection = ClientConnection((request.receive, send), reader.state, limits)
                with slot.used(reader.state):
                    headers = [*_HEADERS.items(), ("content-type", _JSON)]
                    raw = [(name.encode(), value.encode()) for name, value in headers]
                    await connection.run(lambda: page.write(connection, first), response_start(200, raw))
            finally:
                await reader.close()
            await connection.keep(slot)
        return None


class _EventPage:
    """Some events of a job as JSON, encoded as fast as they are written.

    Args:
        reader: reads the job.
        records: encodes its events.
        limit: the most events of the page.
        size: the number of bytes of records after which it ends.
    """

    def __init__(self, reader: JobReader, records: LogRecords, limit: int, size: int) -> None:
        self._reader = reader
        self._records = records
        self._left = limit
        self._room = size
        self._next: Event | None = None
        self._empty = True
        self.whole = False
        """Whether the page is complete."""

    async def wait(self, seconds: float) -> None:
        """Wait for the first event."""
        found = await self._reader.batch(seconds, 1)
        if not found and self._reader.interrupted:
            found = await self._reader.batch(seconds, 1)
        self._next = found[0] if found else None

    async def part(self) -> bytes:
        """Return the next records, separated by commas."""
        parts: list[bytes] = []
        size = 0
        while not self.whole and size < _PART:
            event, self._next = self._next or await self._reader.stored(), None
            if event is None:
                self.whole = True
                break
            record = self._records.json(event)
            parts += [record] if self._empty else [b",", record]
            self._empty = False
            self._reader.position = event.offset
            size += len(record)
            self._left -= 1
            self._room -= len(record)
            self.whole = self._left == 0 or self._room <= 0
        return b"".join(parts)

    def tail(self) -> bytes:
        """Return the end of the page, behind the records."""
        job, position = self._reader.job, self._reader.position
        ended = job.status.terminal and position >= job.info().events - 1
        rest = {"next": position, "ended": ended, "status": job.status.value}
        return b"]," + msgspec.json.encode(rest)[1:]

    async def write(self, connection: ClientConnection, first: bytes) -> None:
        """Write the page."""
        await connection.write(_OPEN + first)
        while not self.whole and not self._reader.state.gone:
            try:
                part = await self.part()
            except DfmError:  # the client gets the error when it requests the rest
                break
            await connection.write(part)
            await asyncio.sleep(0)
        await connection.write(self.tail(), more=False)


def _cursor(text: str | None) -> tuple[float, str] | None:
    if text is None:
        return None
    if CURSOR.match(text) is None:
        raise Refusal(422, "query", "after must be the value of 'next' of the previous page")
    created, _, job_id = text.partition("~")
    return float(created), job_id
