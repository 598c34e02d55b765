"""Run synchronous calls of this process in other workers of its site."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from dfm_async.base.signals import Outcome
from dfm_async.base.timers import Timer
from dfm_async.errors import WorkerLost
from dfm_async.model.events import ErrorRecord
from dfm_async.runtime.dispatch import Dispatcher, OperationCost
from dfm_async.runtime.fair_queue import JobCalls
from dfm_async.runtime.threads import RemoteCall, ThreadCall, Threads
from dfm_async.wire import messages as msg

_ASK_AFTER: Final = 0.02
"""The number of seconds that calls wait before other workers are requested, if it is not known what they cost."""
_WORTHWHILE: Final = 0.005
"""For how many seconds of work other workers are requested at once."""
_MOST_WANTED: Final = 64
_KEEP: Final = 5.0
"""The number of seconds that an idle worker is kept before it is returned."""
_PATIENCE: Final = 0.25
"""The number of seconds that the next call waits for others which compute, before it starts beside them."""
_FIRST_SAMPLE: Final = 0.005
"""The number of seconds after which a running call is checked for the first time: does it compute, or wait?"""
_LAST_SAMPLE: Final = 0.32
"""The same for the last time."""
_OVERRUN: Final = 0.01
"""The number of seconds after which a call that was expected to be cheap is checked."""
_SAMPLES: Final = hasattr(time, "pthread_getcpuclockid")


class RemoteFailure(Exception):
    """An operation has raised an error in another worker.

    Args:
        record: the error.
        again: whether its policy allows another attempt.
        retry_after: how many seconds the error asks to wait before that.
    """

    def __init__(self, record: ErrorRecord, again: bool, retry_after: float = 0.0) -> None:
        super().__init__(record.message)
        self.record = record
        self.again = again
        self.retry_after = retry_after


class RemoteObjects:
    """The objects of a job in another worker: closed with its own."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self.aclose = close


class CallSpread:
    """The calls of this process that run in other workers, and those that wait for their turn.

    Args:
        site: the name of the site.
        threads: the threads of this process.
        report: sends a message to the process that started this one.
        send: sends a message to another worker.
        address: where other workers reach this one.
        enough: with how many other workers this process does not compute itself; None: it always does.
    """

    def __init__(
        self,
        site: str,
        threads: Threads,
        report: Callable[[msg.Message], None],
        send: Callable[[str, msg.Message], None],
        address: str,
        enough: int | None,
    ) -> None:
        self._site = site
        self._threads = threads
        self._report = report
        self._send = send
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._mode = os.environ.get("DFM_SPREAD", "")
        """For tests: "always" takes every call for one that computes, "never" runs them all here."""
        self._dispatcher: Dispatcher[ThreadCall] = Dispatcher(always=self._mode == "always", enough=enough)
        self._elsewhere: dict[int, ThreadCall] = {}
        self._last = 0
        self._asked = 0
        self._asking: asyncio.TimerHandle | None = None
        self._used: dict[str, float] = {}
        """When each worker that was lent to this process has ended its last call, or was lent."""
        self._returning = Timer(self._return_idle)
        self._stuck: dict[str, str] = {}
        """Workers with calls that were abandoned and have not returned, and which call."""
        self._abandoned: dict[int, str] = {}
        """The numbers of these calls, and their workers."""
        self._objects: dict[str, dict[tuple[int, int], Outcome[None]]] = {}
        """The workers in which calls of jobs have built objects, and when these are closed."""
        self._watching = Timer(self._check_running)
        """Checks whether calls take longer than expected that were started here."""
        self._late = 0.0
        """After how many seconds those that do are checked again; 0 if there are none."""
        self._pumping = False
        self._next: ThreadCall | None = None
        """The call that was the next to start when calls were started for the last time."""
        self._samples: dict[ThreadCall, tuple[float, float]] = {}
        """When calls that run here are checked next, and after how many seconds that is."""
        self._sampling = Timer(self._sample_due)
        self._since = 0.0
        """Since when it is the next one."""
        self._overdue: asyncio.TimerHandle | None = None
        """Starts a call that has waited for too long."""

    # calls

    @property
    def queued(self) -> int:
        """The number of calls that wait for a worker. Any thread may read it."""
        return self._dispatcher.queued

    def take(self, call: ThreadCall, remote: RemoteCall) -> bool:
        """Take a call; return False if it is to run here at once."""
        if call.bound:
            self._run_bound(call, remote)
            return True
        if call.cost.stays and not self._mode:
            if call.stream is not None:
                self._run_here(call)
                return True
            self.watch()
            return False
        if self._mode == "never":
            return False
        self._dispatcher.put(call.job, call.job.priority, call)
        if self._dispatcher.head is None:
            self._pump()
        elif self._asked < _MOST_WANTED:  # it waits behind others
            self._ask()
        return True

    def _pump(self, overdue: ThreadCall | None = None) -> None:
        if self._pumping:
            return
        self._start(self._dispatcher.pump(overdue))
        self._ask()
        head = self._dispatcher.head
        if head is not self._next:
            self._next, self._since = head, self._loop.time()
            if head is not None and self._overdue is None:
                self._overdue = self._loop.call_later(_PATIENCE, self._start_overdue)

    def _start(self, calls: Iterator[tuple[ThreadCall, str | None]]) -> None:
        self._pumping = True
        try:
            for call, worker in calls:
                if call.ended:  # a generator that was closed before it began
                    self._left(call)
                elif worker is None:
                    self._run_here(call)
                else:
                    self._run_there(call, worker)
        finally:
            self._pumping = False

    def _start_overdue(self) -> None:
        """Let a call share a processor with others that take long, rather than wait for their end."""
        self._overdue = None
        head, now = self._dispatcher.head, self._loop.time()
        if head is None:
            return
        due = self._since + _PATIENCE  # another one may have been the next to start when the timer was set
        if due > now:
            self._overdue = self._loop.call_at(due, self._start_overdue)
        elif head.stream is None and self._threads.full:  # here, it could not begin either
            self._overdue = self._loop.call_later(_PATIENCE, self._start_overdue)
            if not self._pumping:  # what runs here may wait for elements of generators, which need no free thread
                self._start(self._dispatcher.pump_generators())
        else:
            self._pump(overdue=head)

    def _run_here(self, call: ThreadCall) -> None:
        counted = self._dispatcher.is_here(call)
        if call.stream is not None:
            if not counted:
                self._dispatcher.begin_here(call)
            call.stream.begin_here()
        else:
            if not counted and self._watching.due is None:
                self._watch()
            self._threads.enqueue(call)
        if _SAMPLES and (counted or call.stream is not None):
            # Later if it is known what to expect: the interpreter has to change threads for it.
            self._sample_in(call, max(_FIRST_SAMPLE, 2 * call.cost.wall))

    def _run_there(self, call: ThreadCall, worker: str) -> None:
        assert call.remote is not None  # noqa: S101 - else it would not be here
        number = self._last = self._last + 1
        try:
            size = call.remote.send(worker, number)
        except Exception:  # noqa: BLE001 - objects of users can raise anything; here, nothing has to be encoded
            call.pinned = True
            self._left(call)
            self._dispatcher.put(call.job, call.job.priority, call)
            return
        if call.stream is None:
            call.cost.sent(size)
        call.number, call.worker = number, worker
        self._elsewhere[number] = call

    def _run_bound(self, call: ThreadCall, remote: RemoteCall) -> None:
        """Run a call in the worker that was chosen for it, and nowhere else."""
        call.number, call.worker = self._last + 1, remote.bound
        self._last = call.number
        try:
            remote.send(remote.bound, call.number)
        except Exception as error:  # noqa: BLE001 - objects of users can raise anything
            call.ended = True
            self._loop.call_soon(self._threads.finish, call, None, error)  # its caller does not know it yet
        else:
            self._elsewhere[call.number] = call

    def _sample_in(self, call: ThreadCall, seconds: float) -> None:
        due = self._loop.time() + seconds
        self._samples[call] = (due, seconds)
        self._sampling.advance(due)

    def _sample_due(self) -> None:
        """Check the calls whose time has come: one timer serves all, since most end before."""
        now = self._loop.time()
        for call, (due, seconds) in list(self._samples.items()):
            if due <= now and self._samples.pop(call, None) is not None:
                self._sample(call, seconds)
        if self._samples:
            self._sampling.advance(min(due for due, _ in self._samples.values()))

    def _sample(self, call: ThreadCall, seconds: float) -> None:
        """Let another call run beside one that waits, rather than computes."""
        if call.ended or call.abandoned:
            return
        used = self._threads.cpu_time(call)
        if used is not None and call.started is not None:
            elapsed = self._loop.time() - call.started
            if elapsed >= _FIRST_SAMPLE / 2:
                self._dispatcher.seen(call, elapsed, used)
                self._pump()
        if seconds < _LAST_SAMPLE:  # later on, calls do not wait for it any longer anyway
            self._sample_in(call, 2 * seconds)

    def watch(self, seconds: float = 0.0) -> None:
        """Let threads run several quick calls before they wake the loop, unless one takes longer than expected.

        ``seconds``: how long a call is expected to take.
        """
        if not self._late and self._threads.several:
            self._watch(seconds)

    def _watch(self, seconds: float = 0.0) -> None:
        self._watching.advance(self._loop.time() + max(_OVERRUN, 2 * seconds))
        self._threads.batching = not self._late

    def _check_running(self) -> None:
        """Let calls that wait for a thread here run elsewhere, if those before them take longer than expected."""
        threads, now = self._threads, self._loop.time()
        late: dict[ThreadCall, tuple[float, float]] = {}
        expected = 0.0
        for call in threads.running:
            elapsed = 0.0 if call.started is None else now - call.started
            if call.cost.quick:
                expected = max(expected, call.cost.wall)
            if elapsed >= max(_OVERRUN, 2 * call.cost.wall * call.cost.quick):
                used = threads.cpu_time(call) if _SAMPLES and call.cost.stays else None
                late[call] = (elapsed, used or 0.0)
        for cost in self._dispatcher.overran(late):
            self._spread_waiting(cost)
        self._late = 2 * max(self._late, _OVERRUN) if late else 0.0  # those that wait are checked less often
        if threads.idle or self._late > _LAST_SAMPLE:
            self._late, threads.batching = 0.0, False
        else:
            self._watch(self._late / 2 or expected)
        if late or not threads.batching:
            threads.catch_up()

    def _spread_waiting(self, cost: OperationCost) -> None:
        for call in self._threads.take_waiting(lambda c: c.cost is cost and not self._dispatcher.is_here(c)):
            self._dispatcher.put(call.job, call.job.priority, call)
        self._loop.call_soon(self._pump)

    def _left(self, call: ThreadCall) -> None:
        worker = self._dispatcher.left(call)
        if call.worker in self._used:
            self._used[call.worker] = self._loop.time()
        if worker is not None:
            self._return(worker)

    def ended_here(
        self, call: ThreadCall, result: Any, error: BaseException | None, *, abandoned: bool = False
    ) -> None:
        """Note that a call has ended in this process, or was abandoned."""
        cost = call.cost
        if call.started is not None and not abandoned:
            spreads = cost.measured(call.wall, call.used)
            spread = not cost.stays or self._mode
            if spread and not cost.checked and error is None and call.remote is not None:
                cost.checked = True
                cost.pinned = cost.pinned or not call.remote.can_send(result)
            if spreads:
                self._spread_waiting(cost)
        if self._dispatcher.is_here(call):
            self._samples.pop(call, None)
            self._left(call)
            self._loop.call_soon(self._pump)  # after its outcome was passed on: that may bring further calls

    def cancel(self, job: JobCalls[ThreadCall]) -> list[ThreadCall]:
        """Stop the calls of a job that run elsewhere; remove and return those that wait."""
        stopped: set[str] = set()
        for call in self._elsewhere.values():
            if call.job is job and call.remote is not None and call.worker not in stopped and call.worker is not None:
                stopped.add(call.worker)
                call.remote.stop(call.worker)
        return self._dispatcher.withdraw(job)

    def take_waiting(self, call: ThreadCall) -> list[ThreadCall]:
        """Remove a call if it waits for a worker; return the calls that were removed."""
        if not self._dispatcher.take(call):
            return []
        self._loop.call_soon(self._pump)  # the next one may start now
        return [call]

    def abandon(self, call: ThreadCall, error: BaseException, grace: float) -> None:
        """Fail a call that runs elsewhere; its worker has the grace period to return."""
        worker = call.worker
        if worker is None or self._elsewhere.pop(call.number, None) is None:
            return
        if call.bound:  # its GPUs are free only with its process
            self._report(msg.WorkerReturned(worker, f"a call of {self._name(call)!r} was abandoned"))
            self._threads.finish(call, None, error)
            return
        self._abandoned[call.number] = worker
        self._stuck[worker] = f"a call of {self._name(call)!r} was abandoned and does not return"
        self._dispatcher.recall(worker)
        self._dispatcher.left(call)
        self._loop.call_later(grace, self._give_up, worker)
        self._threads.finish(call, None, error)
        self._loop.call_soon(self._pump)

    @staticmethod
    def _name(call: ThreadCall) -> str:
        return "" if call.remote is None else call.remote.operation

    def _give_up(self, worker: str) -> None:
        if worker in self._stuck and not self._dispatcher.calls_at(worker):
            self._return(worker)

    # what other workers report

    def receive(self, message: Any) -> None:
        """Handle a message of another worker, or about one."""
        _HANDLERS[type(message)](self, message)

    def _started(self, message: msg.CallStarted) -> None:
        call = self._elsewhere.get(message.number)
        if call is not None:
            call.started = self._loop.time()

    def _elements(self, message: msg.CallElements) -> None:
        call = self._elsewhere.get(message.number)
        if call is not None and call.stream is not None:  # else it was abandoned
            call.stream.arrived(message.payload)

    def _ended(self, message: msg.CallReturned | msg.CallRaised) -> None:
        call = self._elsewhere.pop(message.number, None)
        if call is None:  # it was abandoned, and has returned after all
            worker = self._abandoned.pop(message.number, None)
            if worker is not None and worker not in self._abandoned.values() and worker in self._stuck:
                del self._stuck[worker]
                self._dispatcher.lend(worker)
                self._pump()
            return
        assert call.remote is not None  # noqa: S101 - it is dropped with the outcome
        call.wall, call.used, call.ended = message.wall, message.used, True
        call.cost.measured(message.wall, message.used)
        if call.stream is not None:
            call.cost.sent(call.stream.weight)
        self._left(call)
        unsendable = isinstance(message, msg.CallRaised) and message.unsendable
        call.cost.pinned = call.cost.pinned or unsendable
        if unsendable and not call.bound:  # here, nothing has to be sent
            call.worker, call.started, call.ended = None, None, False
            self._dispatcher.put(call.job, call.job.priority, call)
        else:
            self._threads.finish(call, *call.remote.outcome(message))
        self._pump()

    # objects

    def hold(self, worker: str, job: tuple[int, int]) -> RemoteObjects | None:
        """Note that a call of a job builds an object in a worker; return what closes it, unless that is known."""
        jobs = self._objects.setdefault(worker, {})
        if job in jobs:
            return None
        jobs[job] = Outcome()
        return RemoteObjects(lambda: self._close_objects(worker, job))

    async def _close_objects(self, worker: str, job: tuple[int, int]) -> None:
        outcome = self._objects.get(worker, {}).get(job)
        if outcome is not None:  # else they were closed when the worker was returned
            self._send(worker, msg.CloseCallObjects(*job, self._address))
            await outcome

    def _objects_closed(self, message: msg.CallObjectsClosed) -> None:
        jobs = self._objects.get(message.address, {})
        outcome = jobs.pop((message.job, message.at), None)
        if outcome is not None:
            outcome.settle(None)
        if not jobs:
            self._objects.pop(message.address, None)
        self._ask()

    def _drop_objects(self, worker: str, *, lost: bool) -> None:
        for job, outcome in self._objects.pop(worker, {}).items():
            outcome.settle(None)
            if not lost:
                self._send(worker, msg.CloseCallObjects(*job, self._address))

    def close(self) -> None:
        """Wait for no other worker any longer: all of them end, and close their objects themselves."""
        for worker in list(self._objects):
            self._drop_objects(worker, lost=True)

    # workers

    def _ask(self) -> None:
        wanted = min(self._dispatcher.waiting, _MOST_WANTED)
        if wanted != self._asked and self._asking is None:
            head = self._dispatcher.head
            at_once = not wanted or self._mode or (head is not None and head.cost.used * wanted >= _WORTHWHILE)
            self._asking = self._loop.call_later(0.0 if at_once else _ASK_AFTER, self._ask_now)
        if not wanted and self._returning.due is None and self._returnable():
            self._returning.set(self._loop.time() + _KEEP)

    def _returnable(self) -> list[str]:
        return [worker for worker in self._dispatcher.idle_workers if worker not in self._objects]

    def _ask_now(self) -> None:
        self._asking = None
        wanted = min(self._dispatcher.waiting, _MOST_WANTED)
        if wanted != self._asked:
            self._asked = wanted
            self._report(msg.WorkersWanted(wanted))

    def _return_idle(self) -> None:
        if self._dispatcher.waiting:
            return
        now = self._loop.time()
        for worker in self._returnable():
            if (due := self._used[worker] + _KEEP) <= now:
                self._return(worker)
            else:
                self._returning.advance(due)

    def _lend(self, message: msg.WorkerLent) -> None:
        self._asked = max(0, self._asked - 1)
        self._used[message.address] = self._loop.time()
        self._dispatcher.lend(message.address)
        self._pump()

    def _recall(self, message: msg.WorkerRecalled) -> None:
        if self._dispatcher.recall(message.address):
            self._return(message.address)

    def _return(self, worker: str) -> None:
        self._forget(worker)
        self._drop_objects(worker, lost=False)
        self._dispatcher.gone(worker)
        self._report(msg.WorkerReturned(worker, self._stuck.pop(worker, "")))

    def _forget(self, worker: str) -> None:
        self._used.pop(worker, None)
        self._abandoned = {number: found for number, found in self._abandoned.items() if found != worker}

    def _gone(self, message: msg.WorkerGone) -> None:
        self._stuck.pop(message.address, None)
        self._forget(message.address)
        self._drop_objects(message.address, lost=True)
        bound = [call for call in self._elsewhere.values() if call.bound and call.worker == message.address]
        for call in [*bound, *self._dispatcher.gone(message.address)]:
            self._elsewhere.pop(call.number, None)
            call.ended = True
            error = WorkerLost(self._site, message.exit_code, message.reason)
            if call.remote is not None:
                call.remote.lost(error)
            self._threads.finish(call, None, error)
        self._pump()


_HANDLERS: Final[Mapping[type, Callable[[CallSpread, Any], None]]] = {
    msg.CallStarted: CallSpread._started,  # noqa: SLF001 - same module
    msg.CallObjectsClosed: CallSpread._objects_closed,  # noqa: SLF001
    msg.CallElements: CallSpread._elements,  # noqa: SLF001
    msg.CallReturned: CallSpread._ended,  # noqa: SLF001
    msg.CallRaised: CallSpread._ended,  # noqa: SLF001
    msg.WorkerLent: CallSpread._lend,  # noqa: SLF001
    msg.WorkerRecalled: CallSpread._recall,  # noqa: SLF001
    msg.WorkerGone: CallSpread._gone,  # noqa: SLF001
}
ABOUT_CALLS: Final = tuple(_HANDLERS)
"""The messages that :meth:`CallSpread.receive` handles."""
