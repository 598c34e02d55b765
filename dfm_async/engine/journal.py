"""Write a job to a store, and read it again.

Nothing here is ever unpickled: a file is untrusted input. Values are encoded without pickle at their site already,
so that one which cannot be stored is an error of the node that produced it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, get_args

import msgspec

from dfm_async.engine.frames import Row
from dfm_async.engine.waits import WaitEvent
from dfm_async.errors import DfmError, SessionClosed, StoreError
from dfm_async.model.events import Event, Failure
from dfm_async.model.ids import Frame
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.results.event_codec import (
    EVENT_NAMES,
    EventBatch,
    Head,
    Run,
    events_of,
    pack_error,
    result_events,
    unpack_error,
)
from dfm_async.results.seen import Seen
from dfm_async.store.base import Entry, Store
from dfm_async.wire.codec import Codec

_RESULTS: Final = 1
"""An entry of results: the head has the location and the runs, the payload the values."""
_EVENTS: Final = 2
"""An entry of other events: the head has what scanning needs, the payload the errors."""

WAIT_EVENTS: Final = frozenset(EVENT_NAMES[kind] for kind in get_args(WaitEvent))
"""The kinds of events that a set has to know when it runs again."""

_codec = Codec.for_store()
_ResultsHead = tuple[int, list[Run]]
_encode = msgspec.msgpack.Encoder().encode
_results_head: Final = msgspec.msgpack.Decoder(_ResultsHead)
_events_head: Final = msgspec.msgpack.Decoder(list[Head])


class StoredValues(Protocol):
    """How values are stored: sessions know them, the hub of a federation only forwards them."""

    def row(self, row: Row) -> bytes:
        """Return the bytes of a parameter set."""

    def load_row(self, data: bytes, plan: Plan) -> Row:
        """Return a parameter set, packed for the sites.

        Raises:
            EncodingError, ValueError: it cannot be read, or does not fit the plan.
        """

    def batch(self, values: Sequence[Any]) -> bytes:
        """Return the bytes of results."""

    def load_batch(self, data: bytes) -> Sequence[Any]:
        """Return results."""

    def load_plan(self, data: bytes) -> Plan:
        """Return the plan of a job."""


class JobJournal:
    """Write one job. Consecutive events of one turn of the loop make one entry.

    ``failed`` is called when the store refuses something, ``spawn`` starts a task.
    """

    def __init__(
        self,
        store: Store,
        values: StoredValues,
        job_id: str,
        failed: Callable[[StoreError], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._store = store
        self._values = values
        self._spawn = spawn
        self._calls: list[Callable[[], None]] = []
        self._job_id = job_id
        self._refused = failed
        self._batch = EventBatch()
        self._first = 0
        self._handle: asyncio.Handle | None = None

    def event(self, event: Event, point: int) -> None:
        """Write one event."""
        if not self._batch.heads:
            self._first = event.offset
            self._handle = asyncio.get_running_loop().call_soon(self.flush)
        self._batch.add(event, point)

    def flush(self) -> None:
        """Pass what was collected to the store."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._batch.heads:
            batch, self._batch = self._batch, EventBatch()
            heads = batch.heads
            payload = _codec.dumps([pack_error(error) for error in batch.errors]) if batch.errors else b""
            entry = Entry(self._first, len(heads), _EVENTS, _encode(heads), payload)
            failed = sum(head.kind == "failure" and head.point < 0 for head in heads)
            done = sum(head.kind == "frame" for head in heads)
            self._write(self._store.append, entry, errors=failed, done=done)

    def _write(self, write: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            write(self._job_id, *arguments, **options)
        except StoreError as error:  # it is closed, or a value is larger than it can hold
            self._refused(error)

    def results(
        self, first: int, at: int, runs: Sequence[Run], values: Sequence[Any], payload: bytes, broken: int
    ) -> None:
        """Write results from an offset on."""
        self.flush()
        if not payload:
            payload = self._values.batch(values)
        entry = Entry(first, len(values), _RESULTS, _encode((at, runs)), payload)
        self._write(self._store.append, entry, errors=broken)

    def params(self, first: int, rows: Sequence[Any]) -> None:
        """Write parameter sets."""
        self._write(self._store.add_params, first, [self._values.row(row) for row in rows])

    def stopped(self) -> None:
        """Write that no further parameter set will come."""
        self._write(self._store.update, stopped=True)

    def when_written(self, call: Callable[[], None]) -> None:
        """Call back when everything so far is written; never, if it cannot be."""
        self._calls.append(call)
        if len(self._calls) == 1:
            work = self._flush_store()
            try:
                self._spawn(work)
            except SessionClosed:  # the job is about to be interrupted
                work.close()

    async def _flush_store(self) -> None:
        calls, self._calls = self._calls, []
        with contextlib.suppress(StoreError):  # the job is notified of it
            await self._store.flush()
            for call in calls:
                call()

    def status(self, status: JobStatus, reason: str | None, finished: float | None) -> None:
        """Write the status, in the same commit as the events before it."""
        self.flush()
        self._write(self._store.update, status=status, reason=reason, finished=finished)


@dataclass(frozen=True, slots=True)
class StoredLog:
    """The events of a job in a store."""

    _store: Store
    _values: StoredValues
    _job_id: str
    _plan: Plan

    async def read(self, start: int) -> Sequence[Event]:
        """Return some events from an offset on."""
        events: list[Event] = []
        for entry in await self._store.read(self._job_id, start):
            with _readable(self._store.path, self._job_id, entry):
                events.extend(_events_of(self._plan, self._values, entry))
        return [event for event in events if event.offset >= start]

    async def frames_done(self, before: int) -> set[int]:
        """Return the parameter sets whose completion is before an offset."""
        found: set[int] = set()
        async for entry in self._store.heads(self._job_id):
            if entry.first >= before:
                break
            if entry.kind == _EVENTS:
                with _readable(self._store.path, self._job_id, entry):
                    heads = enumerate(_events_head.decode(entry.head), entry.first)
                    found.update(head.frame[0] for offset, head in heads if head.kind == "frame" and offset < before)
        return found


class History(msgspec.Struct):
    """The state of an interrupted job, from its log: what is done, the results of the rest, and the errors."""

    seen: Seen
    done: set[int] = set()
    failed: dict[int, dict[tuple[str, Frame], DfmError]] = {}
    errors: list[DfmError] = []
    error_count: int = 0
    first_errors: dict[int, DfmError] = {}
    """The first error of each parameter set that has one; -1: of all of them."""
    waits: dict[int, list[WaitEvent]] = {}
    """What the sets that are not done have waited for, and what was sent to them."""


async def read_history(store: Store, values: StoredValues, job_id: str, plan: Plan, errors_kept: int) -> History:
    """Read what a job needs to go on.

    Raises:
        StoreError: what is stored of it is damaged.
    """
    history = History(Seen())
    async for entry in store.heads(job_id):
        with _readable(store.path, job_id, entry):
            if entry.kind == _RESULTS:
                for point, frame, start, count in _results_head.decode(entry.head)[1]:
                    history.seen.add(point, frame, start, count)
                continue
            heads = _events_head.decode(entry.head)
        failures: list[Failure] = []
        if any(head.kind == "failure" for head in heads):
            (whole, *_) = await store.read(job_id, entry.first, 1)
            with _readable(store.path, job_id, entry):
                failures = [event for event in _events_of(plan, values, whole) if isinstance(event, Failure)]
        with _readable(store.path, job_id, entry):
            reported = iter(failures)
            for head in heads:
                if head.kind == "frame":
                    history.done.add(head.frame[0])
                    history.seen.forget(head.frame[0])
                    history.failed.pop(head.frame[0], None)
                    history.waits.pop(head.frame[0], None)
                elif head.kind in WAIT_EVENTS:
                    found = events_of(plan, 0, [head], [])
                    history.waits.setdefault(head.frame[0], []).extend(found)  # type: ignore[arg-type] # of that kind
                elif head.kind == "failure":
                    _remember(history, head, next(reported).error, errors_kept)
    return history


@contextmanager
def _readable(path: str, job_id: str, entry: Entry) -> Iterator[None]:
    """Turn what is raised while events are decoded into an error that names the events."""
    try:
        yield
    except Exception as error:
        what = f"events {entry.first} to {entry.first + entry.count - 1} of job {job_id} cannot be read"
        why = f"{type(error).__name__}: {error}"
        raise StoreError(path, f"{what} ({why})", "Restore the file from a copy, or forget the job") from error


def _remember(history: History, head: Head, error: DfmError, errors_kept: int) -> None:
    root = head.frame[0] if head.frame else -1
    history.first_errors.setdefault(root, error)
    if head.point >= 0:
        history.seen.add(head.point, head.frame, -1, 1)
        return
    history.failed.setdefault(root, {})[head.node, head.frame] = error
    history.error_count += 1
    if len(history.errors) < errors_kept:
        history.errors.append(error)


def _events_of(plan: Plan, stored: StoredValues, entry: Entry) -> list[Event]:
    if entry.kind == _RESULTS:
        at, runs = _results_head.decode(entry.head)
        values = stored.load_batch(entry.payload)
        if sum(count for *_, count in runs) != len(values):
            raise ValueError(f"there are {len(values)} values")  # before anything is counted by it
        events = result_events(plan, at, runs, values, entry.first)
    else:
        errors = [unpack_error(found) for found in _codec.loads(entry.payload)] if entry.payload else []
        events = events_of(plan, entry.first, _events_head.decode(entry.head), errors)
    if len(events) != entry.count:
        raise ValueError(f"there are {len(events)} of them")
    return events
