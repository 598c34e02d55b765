"""How a job is written to a store, and read from it.

Nothing here is ever unpickled: a file may come from anywhere. Values are encoded without pickle at their site already,
so that one which cannot be stored is an error of the node that produced it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec

from dfm_async.errors import DfmError, StoreError
from dfm_async.model.events import (
    Event,
    Failure,
    FrameCompleted,
    Metrics,
    Progress,
    Scalar,
    StatusChanged,
    WorkerNotice,
)
from dfm_async.model.ids import Frame
from dfm_async.model.limits import ResultLimits
from dfm_async.model.status import JobStatus
from dfm_async.planner.plan import Plan
from dfm_async.results.decode import Run, result_events
from dfm_async.results.error_values import pack_error, unpack_error
from dfm_async.results.seen import Seen
from dfm_async.session.parameters import stored_row
from dfm_async.store.base import Entry, Store
from dfm_async.wire.codec import Codec

__all__ = ["History", "JobJournal", "JobOptions", "StoredLog", "read_history"]

_RESULTS: Final = 1
"""An entry of results: the head has the location and the runs, the payload the values."""
_EVENTS: Final = 2
"""An entry of other events: the head has what scanning needs, the payload the errors."""

_codec = Codec(trusted=False, stored=True)


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a job needs to go on in another session."""

    on_error: Literal["continue", "stop"]
    reruns: int
    window: int
    limits: ResultLimits
    fed: bool = False
    """Whether it ends with a stream of parameter sets that the application feeds it."""
    label: str | None = None
    """What the application noted about it."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """One event that is no result. ``error``: its position in the payload, or -1."""

    kind: Literal["failure", "frame", "metrics", "progress", "status", "worker"]
    frame: Frame = ()
    site: str = ""
    node: str = ""
    place: str | None = None
    point: int = -1
    error: int = -1
    text: str | None = None
    status: str = ""
    done: float = 0.0
    total: float | None = None
    values: dict[str, Scalar] | None = None
    step: int | None = None


_ResultsHead = tuple[int, list[Run]]
_encode = msgspec.msgpack.Encoder().encode
_results_head: Final = msgspec.msgpack.Decoder(_ResultsHead)
_events_head: Final = msgspec.msgpack.Decoder(list[_Head])


class JobJournal:
    """Writes one job. Events that follow each other in one turn of the loop make one entry.

    Args:
        store: where it is written.
        job_id: the job.
        failed: is called when the store refuses something.
    """

    def __init__(self, store: Store, job_id: str, failed: Callable[[StoreError], None]) -> None:
        self._store = store
        self._job_id = job_id
        self._refused = failed
        self._heads: list[_Head] = []
        self._errors: list[Any] = []
        self._first = 0
        self._handle: asyncio.Handle | None = None

    def event(self, event: Event, point: int) -> None:
        """Writes one event."""
        if not self._heads:
            self._first = event.offset
            self._handle = asyncio.get_running_loop().call_soon(self._flush)
        error = -1
        if isinstance(event, Failure):
            error = len(self._errors)
            self._errors.append(pack_error(event.error))
        self._heads.append(_head_of(event, point, error))

    def _flush(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._heads:
            heads, self._heads = self._heads, []
            errors, self._errors = self._errors, []
            payload = _codec.dumps(errors) if errors else b""
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
        """Writes results from an offset on."""
        self._flush()
        if not payload:
            payload = _codec.dumps([_codec.pack(value) for value in values])
        entry = Entry(first, len(values), _RESULTS, _encode((at, runs)), payload)
        self._write(self._store.append, entry, errors=broken)

    def params(self, first: int, rows: Sequence[Any]) -> None:
        """Writes parameter sets."""
        self._write(self._store.add_params, first, [stored_row(row) for row in rows])

    def stopped(self) -> None:
        """Writes that no further parameter set will come."""
        self._write(self._store.update, stopped=True)

    def status(self, status: JobStatus, reason: str | None, finished: float | None) -> None:
        """Writes the status, in the same commit as the events before it."""
        self._flush()
        self._write(self._store.update, status=status, reason=reason, finished=finished)


class StoredLog:
    """The events of a job that stand in a store."""

    def __init__(self, store: Store, job_id: str, plan: Plan) -> None:
        self._store = store
        self._job_id = job_id
        self._plan = plan

    async def read(self, start: int) -> Sequence[Event]:
        """Gives some events from an offset on."""
        events: list[Event] = []
        for entry in await self._store.read(self._job_id, start):
            with _readable(self._store.path, self._job_id, entry):
                events.extend(_events_of(self._plan, entry))
        return [event for event in events if event.offset >= start]

    async def frames_done(self, before: int) -> set[int]:
        """The parameter sets whose completion stands before an offset."""
        found: set[int] = set()
        async for entry in self._store.heads(self._job_id):
            if entry.first >= before:
                break
            if entry.kind == _EVENTS:
                with _readable(self._store.path, self._job_id, entry):
                    heads = enumerate(_events_head.decode(entry.head), entry.first)
                    found.update(head.frame[0] for offset, head in heads if head.kind == "frame" and offset < before)
        return found


class History:
    """What the log of an interrupted job tells: what is done, what came of the rest, and what went wrong."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.seen = Seen()
        self.failed: dict[int, dict[tuple[str, Frame], DfmError]] = {}
        self.errors: list[DfmError] = []
        self.error_count = 0


async def read_history(store: Store, job_id: str, plan: Plan, errors_kept: int) -> History:
    """Reads what a job must know to go on.

    Raises:
        StoreError: what is stored of it is damaged.
    """
    history = History()
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
                failures = [event for event in _events_of(plan, whole) if isinstance(event, Failure)]
        with _readable(store.path, job_id, entry):
            told = iter(failures)
            for head in heads:
                if head.kind == "frame":
                    history.done.add(head.frame[0])
                    history.seen.forget(head.frame[0])
                    history.failed.pop(head.frame[0], None)
                elif head.kind == "failure":
                    _remember(history, head, next(told).error, errors_kept)
    return history


@contextmanager
def _readable(path: str, job_id: str, entry: Entry) -> Iterator[None]:
    """Turns whatever is raised while events are decoded into an error that says which they are."""
    try:
        yield
    except Exception as error:
        what = f"events {entry.first} to {entry.first + entry.count - 1} of job {job_id} cannot be read"
        why = f"{type(error).__name__}: {error}"
        raise StoreError(path, f"{what} ({why})", "Restore the file from a copy, or forget the job") from error


def _remember(history: History, head: _Head, error: DfmError, errors_kept: int) -> None:
    if head.point >= 0:
        history.seen.add(head.point, head.frame, -1, 1)
        return
    root = head.frame[0] if head.frame else -1
    history.failed.setdefault(root, {})[head.node, head.frame] = error
    history.error_count += 1
    if len(history.errors) < errors_kept:
        history.errors.append(error)


# events


def _head_of(event: Event, point: int, error: int) -> _Head:
    match event:
        case Failure():
            return _Head("failure", event.frame, event.site, event.node, event.place, point, error)
        case FrameCompleted():
            return _Head("frame", event.frame)
        case StatusChanged():
            return _Head("status", text=event.reason, status=event.status.value)
        case Progress():
            return _Head(
                "progress",
                event.frame,
                event.site,
                event.node,
                text=event.note,
                done=event.done,
                total=event.total,
            )
        case Metrics():
            return _Head("metrics", event.frame, event.site, event.node, values=event.values, step=event.step)
        case WorkerNotice():
            return _Head("worker", site=event.site, node=event.kind, text=event.detail, done=event.seconds)
        case _:
            raise TypeError(f"{type(event).__name__} is not written as an event")


def _events_of(plan: Plan, entry: Entry) -> list[Event]:
    if entry.kind == _RESULTS:
        at, runs = _results_head.decode(entry.head)
        values = _codec.loads_batch(entry.payload)
        if sum(count for *_, count in runs) != len(values):
            raise ValueError(f"there are {len(values)} values")  # before anything is counted by it
        events = result_events(plan, at, runs, values, entry.first)
    else:
        errors = _codec.loads(entry.payload) if entry.payload else []
        heads = enumerate(_events_head.decode(entry.head), entry.first)
        events = [_EVENT_OF[head.kind](offset, head, errors) for offset, head in heads]
    if len(events) != entry.count:
        raise ValueError(f"there are {len(events)} of them")
    return events


_EVENT_OF: Final[dict[str, Callable[[int, _Head, list[Any]], Event]]] = {
    "failure": lambda offset, head, errors: Failure(
        offset, head.place, unpack_error(errors[head.error]), head.frame, head.site, head.node
    ),
    "frame": lambda offset, head, _: FrameCompleted(offset, head.frame),
    "status": lambda offset, head, _: StatusChanged(offset, JobStatus(head.status), head.text),
    "progress": lambda offset, head, _: Progress(
        offset, head.frame, head.site, head.node, head.done, head.total, head.text or ""
    ),
    "metrics": lambda offset, head, _: Metrics(offset, head.frame, head.site, head.node, head.values or {}, head.step),
    "worker": lambda offset, head, _: WorkerNotice(offset, head.site, head.node, head.done, head.text or ""),  # type: ignore[arg-type] # written by us
}
