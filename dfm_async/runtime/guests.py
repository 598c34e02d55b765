"""Run calls for other workers of the site, which have their nets."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, Final

from dfm_async.base.signals import Signal
from dfm_async.errors import EncodingError
from dfm_async.federation.operation import CodeKind
from dfm_async.model.events import OperationEvent
from dfm_async.model.ids import Frame
from dfm_async.model.policies import retry_after
from dfm_async.net.game import describe_error
from dfm_async.runtime import context as _context
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.calls import context_of, work_of
from dfm_async.runtime.dispatch import OperationCost
from dfm_async.runtime.job_objects import JobObjects
from dfm_async.runtime.observer import Observation
from dfm_async.runtime.operation_errors import cause_of, is_our_cancellation
from dfm_async.runtime.scope import JobScope
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.sources import IteratorCancelled, ThreadSource, is_iterator
from dfm_async.runtime.threads import FREE
from dfm_async.telemetry.recorder import Recorder, TracedCall
from dfm_async.telemetry.spans import encode_made
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of

_WINDOW: Final = 256
_WINDOW_BYTES: Final = 16 * 1024 * 1024
"""How many elements of a generator are sent before the first of them was read, and of how many bytes together."""
_MOST_ELEMENTS: Final = 100_000
"""The number of elements that an iterator may have which a call returns here: they are sent together."""


class _Reports:
    """Sends what calls report to the worker that has their net."""

    def __init__(self, resources: SiteResources, message: msg.RunCall) -> None:
        self._resources = resources
        self._home = message.home
        self._key = (message.job, message.at)

    def add_progress(self, node: str, frame: Frame, done: float, total: float | None, note: str) -> None:
        """Send a report of how far a call is."""
        self._resources.send(self._home, msg.CallReports(*self._key, [(node, frame, done, total, note)], []))

    def add_event(self, event: OperationEvent) -> None:
        """Send an event of an operation."""
        self._resources.send(self._home, msg.CallReports(*self._key, [], [event]))

    def drop_progress(self) -> None:
        """Do nothing: nothing is kept."""


class _GuestScope(JobScope):
    """A job of another worker, as far as its calls here need it."""

    def __init__(self, resources: SiteResources, message: msg.RunCall) -> None:
        super().__init__(
            resources,
            _Reports(resources, message),
            number=message.job,
            at=message.at,
            job_id=message.job_id,
            priority=message.priority,
        )
        self.home = message.home
        self.calls: dict[int, _GuestCall] = {}
        """The calls that have not ended, by their numbers."""

    def _build_objects(self) -> JobObjects:
        return JobObjects(self, _nothing, _nothing)

    def _request(self, request: int, target: str, place: str, key: str, payload: bytes) -> None:
        reply_to = self.resources.address
        relay = msg.RelayToPlace(
            job=self.number,
            at=self.at,
            request=request,
            target=target,
            place=place,
            key=key,
            payload=payload,
            reply_to=reply_to,
        )
        self.resources.send(self.home, relay)


class _Timer(Observation):
    """Measures one call, in its thread."""

    used: float = 0.0
    wall: float = 0.0
    on_start: Callable[[], None] | None = None
    _clock: float = 0.0
    _began: float = 0.0

    def started(self) -> None:
        """Note that the call has its thread."""
        if self.on_start is not None:
            self.on_start()
        super().started()
        self._began, self._clock = time.perf_counter(), time.thread_time()

    def stopped(self) -> None:
        """Note that the call leaves its code."""
        self.wall, self.used = time.perf_counter() - self._began, time.thread_time() - self._clock


class _Activity:
    """The node and the frame of a call."""

    def __init__(self, message: msg.RunCall) -> None:
        self.label = message.node
        self.frame = message.frame


class _GuestCall:
    """One attempt of a call of another worker."""

    streams = False
    elements: _Elements | None = None
    """Those of a generator."""

    def __init__(self, guests: Guests, scope: _GuestScope, message: msg.RunCall) -> None:
        self._guests = guests
        self._scope = scope
        self._message = message
        self._answered = False
        self._recorder: Recorder | None = None
        trace = None
        if message.trace is not None:
            trace_id, span, sampled = message.trace
            self._recorder = Recorder(scope.resources.site, trace_id, span, 0, lambda: None, sampled=sampled)
            trace = TracedCall(self._recorder, span, {})
        self.operation = message.operation
        self.activity: Any = _Activity(message)
        self.attempt = message.attempt
        self.seen = _Timer(message.node, message.frame, message.attempt, trace)
        if message.timed:
            self.seen.on_start = self._report_start

    def start(self) -> None:
        """Start it."""
        message, scope = self._message, self._scope
        call: Any = self  # it has what is needed of a call
        try:
            self.args: dict[str, Any] = scope.resources.call_codec.loads(message.payload)
            self.callee: Callee = scope.find(message.operation, message.provider)
            context = _context.fresh(context_of(scope, call))
            work = work_of(scope, call)
            generator = context.run(work) if self.callee.kind is CodeKind.GENERATOR else None
        except Exception as error:  # noqa: BLE001 - arguments that cannot be rebuilt here
            self._raised(error)
            return
        if generator is not None:
            source = ThreadSource(scope.resources.threads, generator, context, message.node)
            source.on_start, source.on_stop = self.seen.started, self.seen.stopped
            self.elements = _Elements(source, self._send_elements, self._left, scope.resources.call_codec.pack)
            scope.resources.spawn(self.elements.run(), None, f"the generator {self.operation}")
        elif self.callee.kind is CodeKind.ASYNC:
            self.seen.started()
            task = scope.spawn(self._finish(work()), context)
            task.add_done_callback(self._dropped)
        else:
            cost = OperationCost.expected(message.computes) if message.computes else FREE
            scope.threads.start(self.operation, work, context, self._done, cost=cost)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        """Answer for a task that was cancelled before it began."""
        if not self._answered:
            self._raised(asyncio.CancelledError())

    def _left(self, error: BaseException | None) -> None:
        """Note that the generator has ended."""
        if error is None:
            self._returned(None)
        else:
            self._raised(error, unsendable=isinstance(error, EncodingError))

    def _send_elements(self, packed: list[Any]) -> int:
        message, resources = self._message, self._scope.resources
        payload = resources.call_codec.payload(packed)
        resources.send(message.home, msg.CallElements(message.job, message.at, message.number, payload))
        return size_of(payload)

    def _report_start(self) -> None:
        message, resources = self._message, self._scope.resources
        started = msg.CallStarted(message.job, message.at, message.number)
        resources.threads.post(lambda: resources.send(message.home, started))

    def _done(self, value: Any, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._raised(error)
            elif inspect.iscoroutine(value) or is_iterator(value):
                self._scope.spawn(self._finish(value))
            else:
                self._returned(value)
        except Exception as problem:  # noqa: BLE001 - objects of users can raise anything
            self._raised(problem, unsendable=True)

    async def _finish(self, value: Any) -> None:
        iterated = False
        try:
            if inspect.iscoroutine(value):
                value = await value
                if self.callee.kind is CodeKind.ASYNC:
                    self.seen.stopped()
            if is_iterator(value):
                iterated = True
                value = await self._scope.threads.run(self.operation, lambda: _elements(value))
        except BaseException as error:
            self._raised(error)
            if is_our_cancellation(error):
                raise
        else:
            self._returned(value, iterated=iterated)

    def _returned(self, value: Any, *, iterated: bool = False) -> None:
        codec = self._scope.resources.call_codec
        try:
            payload = codec.payload(codec.pack(value))
        except Exception as error:  # noqa: BLE001 - objects of users can raise anything
            self._raised(error, unsendable=True)
        else:
            self._scope.resources.call_completed()
            self._end(msg.CallReturned(**self._head(), payload=payload, iterated=iterated))

    def _raised(self, error: BaseException, *, unsendable: bool = False) -> None:
        message = self._message
        described = describe_error(
            error,
            f"{message.job}.{message.at}:{message.home}.{message.number}",
            self._scope.resources.site,
            message.operation,
            message.node,
            message.frame,
            message.attempt,
            cause_of(error),
        )
        again = message.retry is not None and message.retry.allows(error, message.attempt)
        self._end(
            msg.CallRaised(
                **self._head(), error=described, again=again, unsendable=unsendable, retry_after=retry_after(error)
            )
        )

    def _head(self) -> dict[str, Any]:
        message, seen = self._message, self.seen
        made = [] if self._recorder is None else self._recorder.take()
        spans = encode_made(made) if made else b""
        stacks = "" if seen.trace is None or seen.trace.stacks is None else seen.trace.stacks.text()
        return {
            "job": message.job,
            "at": message.at,
            "number": message.number,
            "start": seen.start,
            "wall": seen.wall,
            "used": seen.used,
            "pid": os.getpid(),
            "spans": spans,
            "stacks": stacks,
        }

    def _end(self, answer: msg.CallReturned | msg.CallRaised) -> None:
        self._answered = True
        self._scope.resources.send(self._message.home, answer)
        self._guests.ended(self._scope, self._message.number)


def _nothing(_scope: object) -> None:
    """Do nothing: another worker notices the end of the job."""


class _Elements:
    """Sends the elements of a generator as they are wanted.

    Args:
        source: the generator.
        send: sends packed elements; returns their size in bytes.
        done: is called at the end.
        pack: packs an element.
    """

    def __init__(
        self,
        source: ThreadSource,
        send: Callable[[list[Any]], int],
        done: Callable[[BaseException | None], None],
        pack: Callable[[Any], Any],
    ) -> None:
        self._source = source
        source.transform = pack
        self._send = send
        self._done = done
        self._window = 1
        self._unread = 0
        self._unread_bytes = 0
        self._closed = False
        self._changed = Signal()

    def taken(self, count: int, size: int) -> None:
        """Note that elements were read, and send more."""
        self._unread -= count
        self._unread_bytes -= size
        self._window = min(2 * self._window, _WINDOW)
        self._changed.notify()

    def close(self) -> None:
        """End the generator at its next element."""
        self._closed = True
        self._source.close()
        self._changed.notify()

    def _may_send(self) -> bool:
        return self._unread < self._window and self._unread_bytes < _WINDOW_BYTES

    async def run(self) -> None:
        """Send the elements."""
        error: BaseException | None = None
        try:
            while found := await self._source.get(self._window - self._unread):
                self._unread += len(found)
                self._unread_bytes += self._send(found)
                await self._changed.wait_until(lambda: self._closed or self._may_send())
        except BaseException as raised:  # noqa: BLE001 - whatever the generator raises
            error = raised.__cause__ if isinstance(raised, IteratorCancelled) else raised
        self._source.close()
        await self._source.wait_ended()
        self._done(None if self._closed else error)


def _elements(iterator: Any) -> list[Any]:
    found = list(itertools.islice(iterator, _MOST_ELEMENTS + 1))
    if len(found) > _MOST_ELEMENTS:
        raise RuntimeError(
            f"a call has returned an iterator with more than {_MOST_ELEMENTS:,} elements in a worker that does not "
            "have its job. Write the operation as a generator, with yield"
        )
    return found


class Guests:
    """The calls of other workers that run here."""

    def __init__(self, resources: SiteResources) -> None:
        self._resources = resources
        self._scopes: dict[tuple[int, int], _GuestScope] = {}

    def run(self, message: msg.RunCall) -> None:
        """Run a call."""
        key = (message.job, message.at)
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = _GuestScope(self._resources, message)
        call = scope.calls[message.number] = _GuestCall(self, scope, message)
        call.start()

    def stop(self, message: msg.StopCalls) -> None:
        """Stop the calls of a job: those that wait are not run, and those that run can check for it."""
        scope = self._scopes.get((message.job, message.at))
        if scope is not None:
            scope.cancel()
            for call in scope.calls.values():
                if call.elements is not None:
                    call.elements.close()

    def steer(self, message: msg.ElementsTaken | msg.CloseCall) -> None:
        """Let a generator go on, or end."""
        scope = self._scopes.get((message.job, message.at))
        call = None if scope is None else scope.calls.get(message.number)
        if call is None or call.elements is None:
            return
        if isinstance(message, msg.CloseCall):
            call.elements.close()
        else:
            call.elements.taken(message.count, message.size)

    def place_taken(self, message: msg.PlaceTaken) -> bool:
        """Handle the answer to a value for another job; return whether a call here has sent it."""
        scope = self._scopes.get((message.job, message.at))
        if scope is not None:
            scope.place_taken(message)
        return scope is not None

    def ended(self, scope: _GuestScope, number: int) -> None:
        """Note that a call has ended."""
        scope.calls.pop(number, None)
        if not scope.calls and scope.objects is None:
            self._scopes.pop((scope.number, scope.at), None)

    def close_objects(self, message: msg.CloseCallObjects) -> None:
        """Close the objects that calls of a job have built here."""
        scope = self._scopes.pop((message.job, message.at), None)
        if scope is None or scope.objects is None:
            self._objects_closed(message)
        else:
            scope.objects.close().add_done_callback(lambda _task: self._objects_closed(message))

    def _objects_closed(self, message: msg.CloseCallObjects) -> None:
        self._resources.send(message.home, msg.CallObjectsClosed(message.job, message.at, self._resources.address))

    def close_all(self) -> set[asyncio.Task[None]]:
        """Close the objects of all jobs: the worker ends."""
        return {scope.objects.close() for scope in self._scopes.values() if scope.objects is not None}
