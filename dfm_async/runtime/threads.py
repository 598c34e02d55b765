"""Threads for synchronous code, and the way back to the loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from dfm_async.runtime.fair_queue import FairQueue, JobCalls
from dfm_async.wire.codec import Packed

__all__ = ["ABANDONED_LIMIT", "Done", "IteratorCancelled", "ThreadCall", "ThreadSource", "Threads"]

Done: TypeAlias = Callable[[Any, BaseException | None], None]
"""Takes a result, or the error that came instead."""

_log = logging.getLogger(__name__)

ABANDONED_LIMIT: Final = 64
"""How many abandoned calls a process may have; each of them keeps a thread."""
_WINDOW: Final = 256
_WINDOW_BYTES: Final = 16 * 1024 * 1024
_LIGHT: Final = frozenset({type(None), bool, int, float, dict, list, tuple, set})
"""Types whose objects have no size that could be known at once."""


class ThreadCall:
    """One call of synchronous code: it waits for a thread, runs, and returns, or is abandoned."""

    __slots__ = ("abandoned", "context", "done", "ended", "started", "work")

    def __init__(self, context: contextvars.Context, work: Callable[[], Any], done: Done) -> None:
        self.context = context
        self.work = work
        self.done = done
        self.started: float | None = None
        """When it got its thread, by the clock of the loop."""
        self.ended = False
        """Whether its thread has left the code, or never entered it."""
        self.abandoned = False
        """Whether nobody waits for it any more although its thread is still in the code."""

    def forget(self) -> None:
        """Drops what the call holds: whoever waits for it may hold the call."""
        self.work = self.done = _nothing


class Threads:
    """A bounded set of threads of one site. What they finish comes back to the loop in batches.

    Calls beyond the bound wait; the jobs take turns, see :class:`FairQueue`. A call that is abandoned does not count
    against the bound: another thread takes the place of its own, which ends when the call returns. The threads are
    daemons, unlike those of ``concurrent.futures``: an operation that never returns must not keep the interpreter from
    ending.

    Args:
        limit: how many calls run at the same time.
        name: the site.
        replaced: whether somebody replaces this process when it has more than :data:`ABANDONED_LIMIT` abandoned calls.
            Else calls fail while it has.
    """

    def __init__(self, limit: int, name: str, *, replaced: bool = False) -> None:
        self._limit = limit
        self._name = name
        self._replaced = replaced
        self._loop = asyncio.get_running_loop()
        self._calls: FairQueue[ThreadCall] = FairQueue()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._others: JobCalls[ThreadCall] = JobCalls()
        self._lock = threading.Lock()
        self._made = 0
        self._started = 0
        self._busy = 0
        self.abandoned = 0
        """How many threads are in calls that were abandoned."""
        self._done: deque[Callable[[], None]] = deque()
        self._scheduled = False

    @property
    def exhausted(self) -> bool:
        """Whether there are so many abandoned calls that the site serves no further ones."""
        return self.abandoned > ABANDONED_LIMIT

    def run(
        self,
        context: contextvars.Context,
        work: Callable[[], Any],
        done: Done,
        job: JobCalls[ThreadCall] | None = None,
    ) -> ThreadCall:
        """Runs ``work`` in a thread and then ``done(result, error)`` on the loop. ``job``: whose turn it takes."""
        call = ThreadCall(context, work, done)
        self._busy += 1
        if self.exhausted and not self._replaced:
            self._refuse(call)
            return call
        self._calls.put(self._others if job is None else job, call)
        self._tokens.put(True)
        self._add_thread()
        return call

    def _add_thread(self) -> None:
        if self._busy <= self._started or self._started >= self._limit:
            return
        thread = threading.Thread(target=self._serve, name=f"dfm-{self._name}-{self._made + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for it
            if not self._started:  # else the threads that exist serve the queue
                for waiting in self._calls.clear():
                    self._fail(waiting, RuntimeError(f"site {self._name!r} cannot run synchronous calls: {error}"))
            return
        self._made += 1
        self._started += 1

    def _serve(self) -> None:
        while self._tokens.get():
            call = self._calls.take()
            if call is None:
                continue  # it was withdrawn
            call.started = self._loop.time()
            result, error = None, None
            try:
                result = call.context.run(call.work)
            except BaseException as caught:  # noqa: BLE001 - also SystemExit: it must not end the worker
                error = caught
            with self._lock:
                call.ended = True
                leaves = call.abandoned
            if leaves:
                if inspect.iscoroutine(result):
                    result.close()  # nobody will await it
                self.post(self.returned_late)
                return
            self.post(functools.partial(self._finish, call, result, error))
            del call, result, error  # an idle thread keeps nothing alive

    def _finish(self, call: ThreadCall, result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        done = call.done
        call.forget()
        done(result, error)

    def withdraw(self, job: JobCalls[ThreadCall], error: BaseException) -> int:
        """Fail the calls of a job that wait for a thread; they are not run. Return their number."""
        found = self._calls.withdraw(job)
        for call in found:
            call.ended = True
            self._finish(call, None, error)
        return len(found)

    # calls that do not return

    def abandon(self, call: ThreadCall, error: BaseException) -> bool:
        """Fail a running call, free its place for another one, and return True; False if it has just returned."""
        with self._lock:
            call.abandoned = True
            if call.ended:
                return False
        done, call.done = call.done, _nothing
        self._busy -= 1
        self._started -= 1
        done(None, error)  # before others take its place
        self.left_alone()
        return True

    def left_alone(self) -> None:
        """Counts a thread that is in code that nobody waits for any more, until :meth:`returned_late`."""
        self.abandoned += 1
        if not self.exhausted:
            self._add_thread()
        elif not self._replaced:
            for waiting in self._calls.clear():
                self._refuse(waiting)

    def _refuse(self, call: ThreadCall) -> None:
        self._fail(call, self._refusal())

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"site {self._name!r} runs no further synchronous calls: {self.abandoned} calls have exceeded their "
            f"deadline, or belong to jobs that were cancelled, and do not return (at most {ABANDONED_LIMIT} may). "
            "They cannot be killed in the process of the application; restart it, or run the site in worker "
            'processes of its own (target="local")',
        )

    def _fail(self, call: ThreadCall, error: RuntimeError) -> None:
        call.ended = True
        self.post(functools.partial(self._finish, call, None, error))

    def returned_late(self) -> None:
        """A thread has left code that was abandoned."""
        self.abandoned -= 1
        self._add_thread()

    def post(self, call: Callable[[], None]) -> None:
        """Hands a call to the loop; wakes it only if it is not on its way already."""
        self._done.append(call)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: nobody waits for it any more
                self._done.clear()

    def _drain(self) -> None:
        self._scheduled = False
        try:
            while self._done:
                call = self._done.popleft()
                try:
                    call()
                except Exception:  # noqa: BLE001 - a fault of ours; the calls behind it are not to blame
                    _log.exception("a call from a thread of site %s failed", self._name)
        finally:
            if self._done:  # an interrupt ends this turn of the loop; the others are served in the next one
                self._scheduled = True
                self._loop.call_soon(self._drain)

    def start(self, target: Callable[[], None], name: str) -> None:
        """Starts a thread of its own, for an iterator: it can last as long as its job; calls must not wait for it.

        Raises:
            RuntimeError: too many threads of the site are in abandoned code.
        """
        if self.exhausted and not self._replaced:
            raise self._refusal()
        threading.Thread(target=target, name=f"dfm-{self._name}-{name}", daemon=True).start()

    def close(self) -> None:
        """Lets idle threads end. Does not wait for those that still run something."""
        for _ in range(self._started):
            self._tokens.put(False)


class IteratorCancelled(Exception):
    """A synchronous iterator has raised ``CancelledError``, which is its cause."""


class ThreadSource:
    """The elements of a synchronous iterator, which runs in a thread of its own.

    The thread is allowed to be a window ahead of the reader. The window begins with one element, so that the first is
    seen at once, and doubles as the reader keeps up. It also ends where the elements in it are too many bytes.
    """

    def __init__(self, threads: Threads, iterator: Iterator[Any], context: contextvars.Context, name: str) -> None:
        self._threads = threads
        self._iterator = iterator
        self._context = context
        self.name = name
        self._items: deque[Any] = deque()
        self._window = 1
        self._started = False
        self.ended = False
        """Whether the thread has left the iterator."""
        self._abandoned = False
        self._error: BaseException | None = None
        self._closed = False
        self._signalled = False
        # How many elements the thread may have produced, raised only by the loop; it is held up only at the bound.
        self._allowed = 1
        self._held_up = False
        self._gate = threading.Semaphore(0)
        # The numbers and sizes of the large elements; their sums are each written on one side only.
        self._large: deque[tuple[int, int]] = deque()
        self._taken = 0
        self._bytes_produced = 0
        self._bytes_taken = 0
        self.transform: Callable[[Any], Any] | None = None
        """Applied to each element in the thread, before the iterator goes on and perhaps changes it."""
        self._waiter: asyncio.Future[None] | None = None
        self._ending: list[asyncio.Future[None]] = []

    async def get(self, limit: int) -> list[Any]:
        """Waits for elements and gives at most ``limit`` of them; none at the end.

        Raises:
            BaseException: what the iterator raised.
        """
        if not self._started:
            self._threads.start(self._run, self.name)
            self._started = True  # not if the system has no room for a thread
        while not self._items:
            if self.ended:
                if isinstance(self._error, asyncio.CancelledError):  # raised here, it would be its reader's
                    raise IteratorCancelled from self._error
                if self._error is not None:
                    raise self._error
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        count = min(limit, len(self._items))
        found = [self._items.popleft() for _ in range(count)]
        self._taken += count
        while self._large and self._large[0][0] < self._taken:
            self._bytes_taken += self._large.popleft()[1]
        grow = min(self._window, _WINDOW - self._window)
        self._window += grow
        self._allow(count + grow)
        return found

    def _allow(self, count: int) -> None:
        self._allowed += count
        if self._held_up:
            self._held_up = False
            self._gate.release()

    def _has_room(self, produced: int) -> bool:
        lead = self._bytes_produced - self._bytes_taken
        return self._closed or (produced < self._allowed and lead < _WINDOW_BYTES)

    def _wait_for_room(self, produced: int) -> None:
        """In the thread: waits until the reader has caught up. A release too many only makes it look once more."""
        while not self._has_room(produced):
            self._held_up = True
            if self._has_room(produced):
                self._held_up = False
                return
            self._gate.acquire()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._context.run(self._produce)
        except BaseException as caught:  # noqa: BLE001 - also SystemExit: it is the iterator's way to fail
            error = caught
        self._threads.post(lambda: self._finish(error))

    def _produce(self) -> None:
        iterator, transform, items = self._iterator, self.transform, self._items
        produced = 0
        try:
            for item in iterator:
                found = item if transform is None else transform(item)
                size = found.size if type(found) is Packed else _size(found)
                if produced >= self._allowed or (size and self._bytes_produced != self._bytes_taken):
                    self._wait_for_room(produced)
                if self._closed:
                    break
                if size:
                    self._large.append((produced, size))
                    self._bytes_produced += size
                produced += 1
                items.append(found)
                if not self._signalled:
                    self._signalled = True
                    self._threads.post(self._arrived)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _arrived(self) -> None:
        self._signalled = False
        self._notify()

    def _finish(self, error: BaseException | None) -> None:
        self.ended = True
        self._error = error
        if self._closed:
            self._items.clear()  # nobody wants them, and they may hold memory that others wait for
        self._notify()
        self._release_waiters()
        if self._abandoned:
            self._threads.returned_late()

    def _release_waiters(self) -> None:
        for waiter in self._ending:
            if not waiter.done():
                waiter.set_result(None)
        self._ending.clear()

    async def wait_ended(self) -> None:
        """Waits until the thread has left the iterator, or was abandoned."""
        if self.running:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ending.append(waiter)
            await waiter

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def running(self) -> bool:
        """Whether the thread is still in the iterator, and was not abandoned."""
        return self._started and not self.ended and not self._abandoned

    def abandon(self) -> bool:
        """Stops waiting for the thread. Returns whether it was still in the iterator."""
        if not self.running:
            return False
        self._abandoned = True
        self._threads.left_alone()
        self._release_waiters()
        return True

    async def aclose(self) -> None:
        """Lets the iterator end at its next element."""
        self._closed = True
        if not self._started:
            self.ended = True
            return
        self._allow(1)


def _nothing(*_: Any) -> None:
    """Takes the place of what is not needed any more."""


def _size(value: Any) -> int:
    """How many bytes an element has, if it tells; 0 for all others."""
    kind = type(value)
    if kind in _LIGHT:
        return 0
    size = len(value) if kind in (str, bytes, bytearray) else getattr(value, "nbytes", 0)
    return size if type(size) is int else 0
