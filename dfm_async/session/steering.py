"""Steering jobs from other processes than the one that runs them: requests in the store, and their answers.

A request is stored, and the owner of the job notified. The owner carries out the requests of a job in order, once each:
it commits the answer together with the effect. If it dies before, a process that takes the job over carries them out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.base.backoff import delays
from dfm_async.base.signals import Signal
from dfm_async.engine.job_table import JobControl, JobTable
from dfm_async.errors import (
    DfmError,
    EncodingError,
    EventsFull,
    JobInterrupted,
    JobNotFound,
    ParameterError,
    StoreError,
)
from dfm_async.model.status import JobStatus
from dfm_async.session.parameters import ParameterSets
from dfm_async.store.base import Request, Store
from dfm_async.wire.codec import Codec

_log = logging.getLogger(__name__)

_MOST: Final = 64
"""The number of requests that a job can have; further ones wait."""
_MOST_CANCELS: Final = 2 * _MOST
"""The same with those that cancel it, which need not wait behind others."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
"""The number of seconds until the requests are read again after an error, at first and at most."""


class ParamsRequest(msgspec.Struct, frozen=True, tag="params"):
    """Add parameter sets, encoded as in the store."""

    rows: list[bytes]


class EventRequest(msgspec.Struct, frozen=True, tag="event"):
    """Send an event, with a value as JSON, to a parameter set; None: to the only one."""

    name: str
    value: str
    frame: int | None = None


class StopInputRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Take no further parameter set."""


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel the job."""

    reason: str
    grace: float


class RequestDone(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out; ``outcomes``: how each location stopped."""

    outcomes: dict[str, str] = {}


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was not carried out, because of these problems; ``full``: an event would be taken later."""

    problems: list[str]
    full: bool = False


Steer: TypeAlias = ParamsRequest | EventRequest | StopInputRequest | CancelRequest
_encode: Final = msgspec.msgpack.Encoder().encode
_request: Final = msgspec.msgpack.Decoder(Steer)
_answer: Final = msgspec.msgpack.Decoder(RequestDone | RequestRefused)
_CLOSED: Final = "the job takes no further parameter sets: its input was stopped, or it has ended"


class RemoteSteering:
    """Steers jobs that other processes run.

    Each call returns when the owner of the job has committed its answer, also if that is another process by then.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def send(self, job_id: str, rows: Sequence[bytes]) -> None:
        """Add parameter sets. Waits while too many are in flight.

        Raises:
            ParameterError: the job takes no more, or they do not fit.
            JobInterrupted: the owner has died before it took the sets. They are not taken.
        """
        answer = await self._ask(job_id, ParamsRequest(list(rows)), _MOST)
        if not isinstance(answer, RequestDone):
            raise ParameterError([_CLOSED] if answer is None else answer.problems)

    async def send_event(self, job_id: str, name: str, value: str, frame: int | None) -> None:
        """Send an event, with a value as JSON, to a parameter set.

        Raises:
            ParameterError: the set does not take it, or the job has ended.
            EventsFull: the set would take it later.
            JobInterrupted: the owner has died before it took the event. It is not sent.
        """
        answer = await self._ask(job_id, EventRequest(name, value, frame), _MOST)
        if not isinstance(answer, RequestDone):
            ended = f"job {job_id} takes no event {name!r}: it has ended"
            refused = RequestRefused([ended]) if answer is None else answer
            raise (EventsFull if refused.full else ParameterError)(refused.problems)

    async def stop(self, job_id: str) -> None:
        """Declare that no further parameter set will come.

        Raises:
            JobInterrupted: the owner has died before it noted that.
        """
        await self._ask(job_id, StopInputRequest(), _MOST)

    async def cancel(self, job_id: str, reason: str, grace: float) -> dict[str, str]:
        """Cancel a job; return how each location stopped when nothing of the job runs any longer.

        Raises:
            JobInterrupted: the owner has died. The job is not cancelled.
        """
        answer = await self._ask(job_id, CancelRequest(reason, grace), _MOST_CANCELS)
        return dict(answer.outcomes) if isinstance(answer, RequestDone) else {}

    async def _ask(self, job_id: str, request: Steer, limit: int) -> RequestDone | RequestRefused | None:
        """Return the answer of the process that runs a job; None if the job has ended."""
        store, data = self._store, _encode(request)
        number: int | None = None
        # One that cancels is carried out even if nobody waits for it any longer.
        left = isinstance(request, CancelRequest)
        try:
            while True:
                found = await store.find(job_id)
                if found is None:
                    raise JobNotFound(job_id, "the store")
                # After the job: the answer to a request for a job that has ended is there, or never comes.
                answer = None if number is None else await store.answer_to(number)
                if answer is not None or found.status.terminal:
                    left = False
                    return None if answer is None else _answer.decode(answer)
                if found.status is JobStatus.INTERRUPTED:
                    if number is None or await store.withdraw_request(job_id, number):
                        number = None
                        raise JobInterrupted(job_id, found.reason or "the process that ran it has ended")
                    continue  # it has an answer by now, or its owner is alive after all
                async with store.follow(found.owner.fence) as follower:
                    while await follower.changed():
                        if number is None:
                            number = await store.request(job_id, data, limit)
                        elif await store.answer_to(number) is not None:
                            break
                        now = await store.find(job_id)
                        if now is None or now.status.ended or now.owner.fence != found.owner.fence:
                            break
        finally:
            if number is not None and not left:
                with contextlib.suppress(StoreError):  # it is closed
                    store.end_request(job_id, number)


class OwnedJobs:
    """Carries out the requests for the jobs that a session runs. ``spawn`` starts a task of the session."""

    def __init__(
        self,
        store: Store,
        jobs: JobTable[Any],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        params: ParameterSets,
        codec: Codec,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._spawn = spawn
        self._params = params
        self._codec = codec
        self._changed = True
        self._signal = Signal()
        self._active: dict[int, str] = {}
        """The requests that are being carried out, until their answers are committed, and their jobs."""
        self._queues: dict[str, deque[Request]] = {}
        """Requests that wait for others of their job, those at the head being carried out."""
        self._early: set[str] = set()
        """Jobs that had requests before they ran here."""

    def notify(self) -> None:
        """Note that there may be requests."""
        self._changed = True
        self._signal.notify()

    def launched(self, job_id: str, *, resumed: bool) -> None:
        """Note that a job runs here from now on."""
        if resumed:
            self._active = {number: job for number, job in self._active.items() if job != job_id}
            self._queues.pop(job_id, None)
        if resumed or job_id in self._early:
            self._early.discard(job_id)
            self.notify()

    async def run(self) -> None:
        """Carry out requests until this is cancelled."""
        pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            await self._signal.wait_until(lambda: self._changed)
            self._changed = False
            try:
                found = await self._store.requests()
            except StoreError as error:
                _log.warning("requests of other processes cannot be read: %s", error)
                self._changed = True
                await asyncio.sleep(next(pauses))
                continue
            pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)
            numbers = {request.number for request in found}
            self._active = {number: job for number, job in self._active.items() if number in numbers}
            for request in found:
                if request.number not in self._active:
                    self._begin(request)

    def _begin(self, request: Request) -> None:
        coordinator = self._jobs.coordinator(request.job_id)
        if coordinator is None:  # it begins soon, or has ended
            self._early.add(request.job_id)
            return
        self._active[request.number] = request.job_id
        try:
            wanted = _request.decode(request.data)
        except ValueError as error:
            self._answer(request, RequestRefused([f"the request cannot be read ({error})"]))
            return
        if isinstance(wanted, CancelRequest):
            self._spawn(self._guarded(request, self._cancel(request, wanted, coordinator)))
            return
        queue = self._queues.get(request.job_id)
        if queue is None:
            queue = self._queues[request.job_id] = deque()
            self._spawn(self._in_order(queue, coordinator))
        queue.append(request)

    async def _in_order(self, queue: deque[Request], coordinator: JobControl) -> None:
        try:
            while queue:
                request = queue.popleft()
                await self._guarded(request, self._carry_out(request, coordinator))
        finally:
            if self._queues.get(coordinator.record.job_id) is queue:
                del self._queues[coordinator.record.job_id]

    async def _guarded(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StoreError as error:  # retried when there is a further one, or the store is connected again
            _log.warning("a request for job %s cannot be carried out: %s", request.job_id, error)
            self._active.pop(request.number, None)

    async def _carry_out(self, request: Request, coordinator: JobControl) -> None:
        wanted = _request.decode(request.data)
        rows = []
        if isinstance(wanted, ParamsRequest):
            try:
                rows = self._params.pack(coordinator.plan, [self._codec.loads(row) for row in wanted.rows])
            except ParameterError as error:
                self._answer(request, RequestRefused(list(error.problems)))
                return
            except EncodingError as error:
                self._answer(request, RequestRefused([f"the parameter sets cannot be read ({error})"]))
                return
            await coordinator.room()
        if not await self._store.take_request(request):
            return
        # From here on without waiting: the answer is in the same commit as the effect.
        if isinstance(wanted, ParamsRequest):
            if not coordinator.accepts:
                self._refuse(request, coordinator.refusal(_CLOSED))
                return
            coordinator.add(rows)
        elif isinstance(wanted, EventRequest):
            try:
                await coordinator.send_event(wanted.name, wanted.value, wanted.frame)  # does not wait: it runs here
            except (ParameterError, JobInterrupted) as error:
                self._refuse(request, error)
                return
            if coordinator.record.journal is not None:
                coordinator.record.journal.flush()  # the event is in the store before the answer
        else:
            coordinator.stop()
        self._answer(request, RequestDone())

    async def _cancel(self, request: Request, wanted: CancelRequest, coordinator: JobControl) -> None:
        if not await self._store.take_request(request):
            return
        if coordinator.record.decided.terminal:
            self._answer(request, RequestDone())
            return
        coordinator.on_end(lambda ended: self._answer(request, RequestDone(ended.outcomes)))
        coordinator.halt(JobStatus.ABORTED, wanted.reason, wanted.grace)
        coordinator.shorten(wanted.grace)

    def _refuse(self, request: Request, error: DfmError) -> None:
        """Answer a request that a job does not take. If the job is interrupted, its sender is notified of that."""
        if isinstance(error, ParameterError):
            self._answer(request, RequestRefused(list(error.problems), isinstance(error, EventsFull)))

    def _answer(self, request: Request, answer: RequestDone | RequestRefused) -> None:
        with contextlib.suppress(StoreError):  # it is closed: the job is interrupted
            self._store.answer(request, _encode(answer))
