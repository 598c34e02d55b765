"""Threads for synchronous code: those of a site, and the calls of one job in them."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from dfm_async.base.signals import Outcome, Signal
from dfm_async.base.suspension import suspension
from dfm_async.runtime.dispatch import QUICK, OperationCost
from dfm_async.runtime.fair_queue import FairQueue, JobCalls

Done: TypeAlias = Callable[[Any, BaseException | None], None]
"""Is called with a result, or with an error."""

_log = logging.getLogger(__name__)

ABANDONED_LIMIT: Final = 256
"""The largest number of abandoned calls of a process: the parameter sets of a job in flight. Each keeps a thread."""


_BATCH: Final = 16
"""The number of quick calls after which a thread wakes the loop in any case."""
_HOLD: Final = 0.005
"""For how many seconds a thread goes on with further quick calls before it wakes the loop."""
FREE: Final = OperationCost()
"""The cost of calls that only run here."""


class RemoteCall(Protocol):
    """What is needed to run a call in another worker of the site."""

    @property
    def operation(self) -> str:
        """The name of the operation."""

    @property
    def cost(self) -> OperationCost:
        """What calls of the operation have cost so far."""

    @property
    def bound(self) -> str:
        """The worker that it has to run in; empty if any will do."""

    def send(self, worker: str, number: int) -> int:
        """Send the call to a worker; return the number of bytes of its arguments.

        Raises:
            EncodingError: they cannot be sent.
        """

    def stop(self, worker: str) -> None:
        """Have a worker stop the calls of the job."""

    def can_send(self, result: Any) -> bool:
        """Return whether a result could come from another worker."""

    def lost(self, error: BaseException) -> None:
        """Note that the worker was lost."""

    def outcome(self, message: Any) -> tuple[Any, BaseException | None]:
        """Return the result, or the error, that a worker reports."""


class StreamedCall(Protocol):
    """A call of a generator: a thread of its own runs it, or another worker, which sends its elements."""

    weight: int
    """The number of bytes that another worker has sent, with what each element costs."""

    def begin_here(self) -> None:
        """Run it in this process."""

    def arrived(self, payload: Any) -> None:
        """Take elements that another worker has sent."""


class Spread(Protocol):
    """Runs calls in other workers of the site."""

    def take(self, call: ThreadCall, remote: RemoteCall) -> bool:
        """Take a call; return False if it is to run here at once."""

    def watch(self, seconds: float = 0.0) -> None:
        """Let threads run several quick calls before they wake the loop, unless one takes longer than expected."""

    def ended_here(
        self, call: ThreadCall, result: Any, error: BaseException | None, *, abandoned: bool = False
    ) -> None:
        """Note that a call has ended in this process, or was abandoned."""

    def cancel(self, job: JobCalls[ThreadCall]) -> list[ThreadCall]:
        """Stop the calls of a job that run elsewhere; remove and return those that wait."""

    def take_waiting(self, call: ThreadCall) -> list[ThreadCall]:
        """Remove a call if it waits for a worker; return the calls that were removed."""

    def abandon(self, call: ThreadCall, error: BaseException, grace: float) -> None:
        """Fail a call that runs elsewhere; its worker has the grace period to return."""


class ThreadCall(msgspec.Struct, eq=False):
    """One call of synchronous code: it waits for a thread, runs, and returns, or is abandoned."""

    context: contextvars.Context
    work: Callable[[], Any]
    done: Done
    job: JobCalls[ThreadCall]
    owner: JobThreads | None = None
    """Counts it, if it belongs to a job."""
    remote: RemoteCall | None = None
    """Runs it in another worker, if that is possible."""
    stream: StreamedCall | None = None
    """Takes the elements, if it is a generator."""
    cost: OperationCost = FREE
    """What calls of its operation cost, if it may run in another worker."""
    pinned: bool = False
    """Whether it has to run here."""
    bound: bool = False
    """Whether it has to run in the worker that was chosen for it."""
    number: int = 0
    """Identifies it in another worker."""
    worker: str | None = None
    """The other worker that it runs in."""
    thread: int = 0
    clock: float = 0.0
    """The processor time of its thread when it began."""
    wall: float = 0.0
    """How many seconds it took."""
    used: float = 0.0
    """How many seconds it has used a processor."""
    started: float | None = None
    """When it got its thread, by the clock of the loop."""
    ended: bool = False
    """Whether its thread has left the code, or never entered it."""
    abandoned: bool = False
    """Whether nobody waits for it any longer although its thread is still in the code."""

    def forget(self) -> None:
        """Drop the references of the call: its waiter may hold the call itself."""
        self.work = self.done = _nothing
        self.owner = self.remote = self.stream = None


class Threads:
    """A bounded set of threads of one site. Results are passed to the loop in batches.

    Calls beyond the bound wait; the jobs take turns, see :class:`FairQueue`. A call that is abandoned does not count
    against the bound: another thread takes the place of its own, which ends when the call returns. The threads are
    daemons, unlike those of ``concurrent.futures``: an operation that never returns must not keep the interpreter from
    ending.

    Args:
        limit: the number of calls that run at the same time.
        name: the site.
        on_abandoned: is called when abandoned calls do not return: with their number, whether they are more than
            :data:`ABANDONED_LIMIT`, and a text. It has to replace the process then; without it, further calls fail
            while there are too many.
    """

    def __init__(self, limit: int, name: str, *, on_abandoned: Callable[[int, bool, str], None] | None = None) -> None:
        self._limit = limit
        self._name = name
        self._on_abandoned = on_abandoned
        self._loop = asyncio.get_running_loop()
        self._calls: FairQueue[ThreadCall] = FairQueue()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._others: JobCalls[ThreadCall] = JobCalls()
        self._lock = threading.Lock()
        self._made = 0
        self._started = 0
        self._busy = 0
        self.abandoned = 0
        """The number of threads that are in abandoned calls."""
        self.ending = False
        """Whether the site ends: abandoned calls are not reported any longer."""
        self.closed = False
        """Whether the site has ended: the loop runs nothing for threads any longer."""
        self._current: dict[int, ThreadCall | None] = {}
        """What each thread runs, by its identity."""
        self._done: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self.batching = False
        """Whether :meth:`catch_up` is called soon, so that a thread may run several calls before it wakes the loop."""
        self._draining = False
        """Whether a thread is about to run all calls that wait; only while they are quick."""
        self._steps = 0
        self.spread: Spread | None = None
        """Runs calls in other workers of the site, if there can be any."""
        _instances.add(self)

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
        remote: RemoteCall | None = None,
        owner: JobThreads | None = None,
        cost: OperationCost = FREE,
    ) -> ThreadCall:
        """Run ``work`` in a thread, and then ``done(result, error)`` on the loop, in a turn of ``job``.

        With ``remote``, it may run in another worker instead; else, ``cost`` is that of its operation. ``owner`` is
        notified before ``done`` is called.
        """
        call = ThreadCall(context, work, done, self._others if job is None else job, owner, remote, cost=cost)
        self._busy += 1
        self._steps += 1
        if self.abandoned > ABANDONED_LIMIT and self._refusing:
            self._fail(call, self._refusal())
        elif remote is None or self.spread is None:
            if cost.quick and self.spread is not None:
                self.spread.watch(cost.wall)
            self.enqueue(call)
        else:
            call.cost, call.bound = remote.cost, bool(remote.bound)
            if not self.spread.take(call, remote):
                self.enqueue(call)
        return call

    def enqueue(self, call: ThreadCall) -> None:
        """Run a call here as soon as a thread is free."""
        self._calls.put(call.job, call)
        if call.cost.quick:
            if self.batching and (self._draining or any(other.cost.quick for other in self.running)):
                return  # its thread comes to this one in a moment
            self._draining = True
        self._tokens.put(True)
        if self._started < self._limit:
            self._add_thread()

    def take_waiting(self, wanted: Callable[[ThreadCall], bool]) -> list[ThreadCall]:
        """Remove and return calls that wait for a thread."""
        return self._calls.take_all(wanted)

    def catch_up(self) -> None:
        """Wake a thread for each call that waits, and pass on what threads have not: one takes longer than expected."""
        self._draining = False
        for _ in range(min(self._calls.count(), self._started)):
            self._tokens.put(True)
        self._drain()

    @property
    def idle(self) -> bool:
        """Whether no call waits for a thread, or runs in one."""
        return not self._calls.count() and not self.running

    @property
    def queued(self) -> int:
        """The number of calls that wait for a thread. Any thread may read it."""
        return self._calls.count()

    @property
    def several(self) -> bool:
        """Whether several calls have not returned."""
        return self._busy > 1

    @property
    def full(self) -> bool:
        """Whether all threads run calls."""
        return len(self.running) >= self._limit

    @property
    def running(self) -> list[ThreadCall]:
        """The calls that threads run now, with those that just begin or end."""
        return [call for call in list(self._current.values()) if call is not None]  # threads add and remove theirs

    def _add_thread(self) -> None:
        if self._busy <= self._started or self._started >= self._limit:
            return
        thread = threading.Thread(target=self._serve, name=f"dfm-{self._name}-{self._made + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start it
            self._draining = False
            if not self._started:  # else the threads that exist serve the queue
                for waiting in self._calls.clear():
                    self._fail(waiting, RuntimeError(f"site {self._name!r} cannot run synchronous calls: {error}"))
            return
        self._made += 1
        self._started += 1

    def _serve(self) -> None:
        current, ident, kept, since = self._current, threading.get_ident(), 0, 0.0
        time_of = self._loop.time
        while self._tokens.get():
            current[ident] = call = self._next()
            while call is not None:
                self.enter(call)
                if not kept and call.started is not None:
                    since = call.started
                result, error = None, None
                try:
                    result = call.context.run(call.work)
                except BaseException as caught:  # noqa: BLE001 - also SystemExit: it must not end the worker
                    error = caught
                if self.leave(call):
                    del current[ident]
                    if inspect.iscoroutine(result):
                        result.close()  # it will not be awaited
                    self.post(self.returned_late)
                    return
                self._keep(functools.partial(self._finish, call, result, error))
                current[ident] = call = self._next()
                kept += 1
                more = call is not None and self.batching and call.cost.quick and kept < _BATCH
                if call is None or not more or time_of() - since + call.cost.wall >= _HOLD:
                    kept = 0
                    self._wake_loop()  # else together with the next one
                del result, error  # an idle thread keeps nothing alive
        current.pop(ident, None)

    def _next(self) -> ThreadCall | None:
        """Take the next call, in a thread."""
        call = self._calls.take()
        if self._draining and (call is None or not call.cost.quick):
            self._draining = False
            if call is None:
                return self._calls.take()  # it may have come before the loop could see that
            self._tokens.put(True)  # another thread goes on with those behind it
        return call

    def enter(self, call: ThreadCall) -> None:
        """Note, in its thread, that a call begins."""
        if call.remote is not None:
            call.clock, call.thread = time.thread_time(), threading.get_ident()
        call.started = self._loop.time()

    def leave(self, call: ThreadCall) -> bool:
        """Note, in its thread, that a call has left its code; return whether it was abandoned."""
        if call.remote is not None and call.started is not None:
            call.wall = call.used = self._loop.time() - call.started
            if call.wall >= QUICK:  # else it does not matter how much of that it has waited
                call.used = time.thread_time() - call.clock
        with self._lock:
            call.ended = True
            return call.abandoned

    def _finish(self, call: ThreadCall, result: Any, error: BaseException | None) -> None:
        if call.remote is not None and self.spread is not None:
            self.spread.ended_here(call, result, error)
        self.finish(call, result, error)

    def finish(self, call: ThreadCall, result: Any, error: BaseException | None) -> None:
        """Pass on the outcome of a call."""
        if call.stream is None:  # generators do not wait for threads
            self._busy -= 1
        done, owner = call.done, call.owner
        call.forget()
        if owner is not None:
            owner.left(call)
        done(result, error)

    def cpu_time(self, call: ThreadCall) -> float | None:
        """Return the number of seconds that a running call has used a processor; None if it does not run."""
        with self._lock:  # so that its thread does not end meanwhile
            if call.ended or call.abandoned or call.started is None:
                return None
            return time.clock_gettime(time.pthread_getcpuclockid(call.thread)) - call.clock

    def withdraw(self, job: JobCalls[ThreadCall], error: BaseException) -> int:
        """Fail the calls of a job that wait for a thread; they are not run. Return their number."""
        found = self._calls.withdraw(job)
        if self.spread is not None:
            found += self.spread.cancel(job)
        for call in found:
            call.ended = True
            self._finish(call, None, error)
        return len(found)

    def withdraw_waiting(self, call: ThreadCall, error: BaseException) -> bool:
        """Fail one call if it waits for a thread, or for a worker; return whether it did."""
        found = self.take_waiting(lambda other: other is call)
        if not found and self.spread is not None:
            found = self.spread.take_waiting(call)
        for waiting in found:
            waiting.ended = True
            self._finish(waiting, None, error)
        return bool(found)

    # calls that do not return

    def abandon(self, call: ThreadCall, error: BaseException, grace: float) -> bool:
        """Fail a running call, and free its place for another one.

        Returns:
            whether its thread is one of this process, and has to be watched; else it has just returned, or runs
            elsewhere.
        """
        if call.worker is not None and self.spread is not None:
            self.spread.abandon(call, error, grace)
            return False
        with self._lock:
            call.abandoned = True
            if call.ended:
                return False
        done, call.done, owner = call.done, _nothing, call.owner
        self._busy -= 1
        self._started -= 1
        if call.remote is not None and self.spread is not None:
            self.spread.ended_here(call, None, error, abandoned=True)
        if owner is not None:
            owner.left(call)
        done(None, error)  # before others take its place
        self.count_abandoned()
        return True

    def count_abandoned(self) -> None:
        """Count a thread that is in abandoned code, until :meth:`returned_late`."""
        self.abandoned += 1
        if not self.exhausted:
            self._add_thread()
        elif self._refusing:
            for waiting in self._calls.clear():
                self._fail(waiting, self._refusal())

    def watch_abandoned(self, ended: Callable[[], bool], job_id: str, what: str, grace: float) -> None:
        """Report an abandoned call of ``what`` if its thread has not left the code after the grace period.

        There is no grace period if there are too many abandoned calls.
        """
        if self.exhausted:
            self._check_abandoned(ended, job_id, what)
        else:
            self._loop.call_later(grace, self._check_abandoned, ended, job_id, what)

    def _check_abandoned(self, ended: Callable[[], bool], job_id: str, what: str) -> None:
        if ended() or self.ending:
            return
        text = f"a call of {what!r} of job {job_id} was abandoned and does not return"
        if self.abandoned > 1:
            text += f" ({self.abandoned} such calls)"
        if self._on_abandoned is not None:
            self._on_abandoned(self.abandoned, self.exhausted, text)
        else:
            _log.warning("site %s: %s", self._name, text, extra={"job": job_id, "site": self._name})

    @property
    def _refusing(self) -> bool:
        return self.exhausted and self._on_abandoned is None

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
        """Note that a thread has left abandoned code."""
        self.abandoned -= 1
        self._add_thread()

    def post(self, call: Callable[[], None]) -> bool:
        """Pass a call to the loop, which is woken only if it is not about to run such calls.

        Returns:
            whether it will run: not after the site has ended.
        """
        return self._keep(call) and self._wake_loop()

    def _keep(self, call: Callable[[], None]) -> bool:
        with self._lock:
            if self.closed:
                return False
            self._done.append(call)
            return True

    def _wake_loop(self) -> bool:
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop was closed, and the site was not
                self._done.clear()
                return False
        return True

    def _drain(self) -> None:
        self._scheduled = False
        try:
            while self._done:
                call = self._done.popleft()
                try:
                    call()
                except Exception:  # noqa: BLE001 - a bug of this library; the calls behind it still run
                    _log.exception("a call from a thread of site %s failed", self._name)
        finally:
            if self._done:  # an interrupt ends this turn of the loop; the others are served in the next one
                self._scheduled = True
                self._loop.call_soon(self._drain)

    def start(self, target: Callable[[], None], name: str) -> None:
        """Start a thread for an iterator alone: it may last as long as its job, and calls must not wait for it.

        Raises:
            RuntimeError: too many threads of the site are in abandoned code.
        """
        if self._refusing:
            raise self._refusal()
        threading.Thread(target=target, name=f"dfm-{self._name}-{name}", daemon=True).start()

    def close(self) -> None:
        """Let idle threads end. Does not wait for those that still run something."""
        if self.abandoned and self._on_abandoned is None:
            _log.warning("site %s: %d calls do not return and are abandoned", self._name, self.abandoned)
        for _ in range(self._started):
            self._tokens.put(False)
        with self._lock:
            self.closed = True
        self._drain()  # the loop may end with this turn

    def note_progress(self) -> None:
        """Note that a call goes on which has waited for the loop."""
        self._steps += 1

    def calls(self, loop: asyncio.AbstractEventLoop) -> tuple[int, int]:
        """Return the number of calls that have not returned, and a count of steps; zeros for another loop."""
        return (self._busy, self._steps) if self._loop is loop else (0, 0)


_instances: Final[weakref.WeakSet[Threads]] = weakref.WeakSet()


def calls_of_loop(loop: asyncio.AbstractEventLoop) -> tuple[int, int]:
    """Return the number of calls in threads that a loop waits for, and how often one of them has begun or gone on."""
    found = [threads.calls(loop) for threads in _instances]
    return sum(busy for busy, _ in found), sum(steps for _, steps in found)


def _nothing(*_: Any) -> None:
    """Replace a function that is not needed any longer."""


class Limit(msgspec.Struct, frozen=True):
    """The time that a call has, with everything that it waits for: ``seconds``, until ``end``."""

    seconds: float
    end: float
    """When it is over, by the clock of deadlines."""

    @classmethod
    def of(cls, seconds: float) -> Limit:
        """Return a limit that begins now."""
        return cls(seconds, suspension().time + seconds)

    @property
    def left(self) -> float:
        """The number of seconds until it is over."""
        return self.end - suspension().time

    def exceeded(self, what: str, *, waiting: bool = False) -> TimeoutError:
        """Describe a call that has exceeded it, maybe while it was still waiting."""
        return TimeoutError(f"no result of {what!r} within {self.seconds:g} s{': it was still waiting' * waiting}")


class JobThreads:
    """The synchronous calls of one job at one location: counted, so that the job's end can wait for them."""

    __slots__ = ("_closes", "_idle", "_job_id", "_running", "_threads", "calls")

    def __init__(self, threads: Threads, job_id: str, priority: int) -> None:
        self._threads = threads
        self._job_id = job_id
        self.calls: JobCalls[ThreadCall] = JobCalls(priority)
        """The calls that wait for a thread, or for a worker."""
        self._closes: JobCalls[ThreadCall] | None = None
        """The calls that close objects: a cancelled job closes its objects too."""
        self._running: dict[ThreadCall, str] = {}
        """The calls that wait or run, with the names of their code."""
        self._idle: Signal | None = None

    def start(
        self,
        what: str,
        work: Callable[[], Any],
        context: contextvars.Context,
        done: Done,
        *,
        closes: bool = False,
        remote: RemoteCall | None = None,
        cost: OperationCost = FREE,
    ) -> ThreadCall:
        """Run synchronous code, named ``what``, in a thread, and then ``done(result, error)`` on the loop.

        ``closes``: the code closes an object, and runs even if the job is cancelled. With ``remote``, it may run in
        another worker instead; else, ``cost`` is that of its operation.
        """
        calls = self.calls
        if closes:
            calls = self._closes = self._closes or JobCalls(calls.priority)

        call = self._threads.run(context, work, done, calls, remote, self, cost)
        self._running[call] = what
        return call

    def left(self, call: ThreadCall) -> None:
        """Note that a call has ended, or was abandoned."""
        self._running.pop(call, None)
        if self._idle is not None and not self._running:
            self._idle.notify()

    async def run(
        self,
        what: str,
        work: Callable[[], Any],
        deadline: float | None = None,
        *,
        closes: bool = False,
        remote: RemoteCall | None = None,
        late: Callable[[], None] | None = None,
        limit: Limit | None = None,
    ) -> Any:
        """Run synchronous code as :meth:`start` does, and wait for it. When cancelled, the code goes on.

        The deadline, in seconds, begins when the code has its thread; the ``limit`` includes the wait for one. ``late``
        is called when code has ended for which nobody waits any longer.

        Raises:
            TimeoutError: it has exceeded its deadline, its limit, or the grace period of the job's cancellation; its
                thread is abandoned.
            BaseException: what the code raised.
        """
        outcome: Outcome[tuple[Any, BaseException | None]] = Outcome()

        def done(value: Any, error: BaseException | None) -> None:
            if not outcome.settle((value, error)) and late is not None:
                late()

        call = self.start(what, work, contextvars.copy_context(), done, closes=closes, remote=remote)
        timer = None if deadline is None and limit is None else _Deadline(self, what, call, deadline, limit)
        try:
            value, error = await outcome
        except asyncio.CancelledError:
            if late is not None and not outcome.cancelled():  # it has just ended
                late()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if error is not None:
            raise error
        return value

    @property
    def pending(self) -> list[tuple[ThreadCall, str]]:
        """The calls that wait or run, with the names of their code. Any thread may read it."""
        return list(self._running.items())

    def abandon(self, call: ThreadCall, grace: float, error: TimeoutError) -> None:
        """Fail a running call, and let another one take its place. It is reported if it does not return."""
        what = self._running.get(call, "")
        if self._threads.abandon(call, error, grace):
            self._threads.watch_abandoned(lambda: call.ended, self._job_id, what, grace)

    def withdraw_waiting(self, call: ThreadCall, error: TimeoutError) -> bool:
        """Fail a call that waits for a thread, or for a worker; return whether it did."""
        return self._threads.withdraw_waiting(call, error)

    def withdraw(self) -> int:
        """Fail the calls that wait for a thread, because the job was cancelled. Return their number."""
        return self._threads.withdraw(self.calls, RuntimeError("the job was cancelled"))

    def abandon_all(self) -> None:
        """Fail all calls, because the grace period of the job's cancellation is over."""
        if self._closes is not None:
            error = TimeoutError("no thread was free before the grace period of the cancellation was over")
            self._threads.withdraw(self._closes, error)
        for call in list(self._running):
            error = TimeoutError("the grace period of the cancellation is over, and the call has not returned")
            self.abandon(call, 0.0, error)

    async def stopped(self) -> None:
        """Wait until no thread runs anything of the job; those of abandoned calls do not count."""
        if self._running:
            if self._idle is None:
                self._idle = Signal()
            await self._idle.wait_until(lambda: not self._running)


class _Deadline:
    """Abandons a call that takes too long. Nothing reports when a call gets its thread, so the timer may fire early."""

    def __init__(
        self, threads: JobThreads, what: str, call: ThreadCall, seconds: float | None, limit: Limit | None
    ) -> None:
        self._threads = threads
        self._what = what
        self._call = call
        self._seconds = seconds
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._queued = self._loop.time()
        self._suspension = suspension()
        self._lost = self._suspension.lost
        self._timer = self._suspension.call_later(self._left(None), self._check)

    def _left(self, started: float | None) -> float:
        """Return the seconds that are left for a call; its deadline counts when it has started."""
        ends = [] if self._limit is None else [self._limit.left]
        if self._seconds is not None:
            suspended = self._suspension.lost - self._lost
            ends.append(self._seconds - (0.0 if started is None else self._loop.time() - started - suspended))
        return min(ends)

    def cancel(self) -> None:
        """Stop the timer: the call has returned, or its job was cancelled."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._call.ended:
            return  # it has returned, and its result is about to be passed on
        started, limit = self._call.started, self._limit
        left = self._left(started)
        if left > 0:  # it got its thread later, or has none
            self._timer = self._suspension.call_later(left, self._check)
        elif limit is not None and limit.left <= 0:
            error = limit.exceeded(self._what, waiting=started is None)
            if started is not None or not self._threads.withdraw_waiting(self._call, error):
                self._threads.abandon(self._call, limit.seconds, error)
        elif self._seconds is not None:
            error = late(self._what, self._seconds, (started or 0.0) - self._queued)
            self._threads.abandon(self._call, self._seconds, error)


def late(what: str, deadline: float, waited: float) -> TimeoutError:
    """Describe a call that has exceeded its deadline."""
    text = f"the deadline of {deadline:g} s for {what!r} was exceeded"
    if waited >= 0.1:
        text += f", not counting {waited:.1f} s that the call waited for its turn"
    return TimeoutError(text)
