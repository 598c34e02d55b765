"""Run calls of operations: in tasks, in threads, or as generators; with contexts, retries, deadlines and spans.

These are functions, since an object per job that refers to its job would be a reference cycle, and there are many jobs.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dfm_async.base.suspension import DeadlineTimer, suspension
from dfm_async.errors import EncodingError, StoreError
from dfm_async.federation.operation import CodeKind
from dfm_async.model.call_limits import CallLimits
from dfm_async.model.constants import fresh
from dfm_async.model.policies import RetryPolicy, retry_after
from dfm_async.net import effects as fx
from dfm_async.net.tokens import StreamValue
from dfm_async.runtime import context as _context
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.context import OperationContext, on_start
from dfm_async.runtime.job_streams import StreamingJob
from dfm_async.runtime.observer import Observation
from dfm_async.runtime.operation_errors import cause_of, drop_cancellation, is_our_cancellation
from dfm_async.runtime.permits import Permit
from dfm_async.runtime.recorded import RESUME_FROM, Recording
from dfm_async.runtime.scope import JobScope
from dfm_async.runtime.sources import PLAIN, is_iterator
from dfm_async.runtime.spread import RemoteFailure
from dfm_async.runtime.streams import LocalStream, StreamFailed, Subscription
from dfm_async.runtime.threads import Limit, late
from dfm_async.telemetry.sampling import CallStacks, await_sampled, generate_sampled, iterate_sampled, run_sampled
from dfm_async.wire import messages as msg
from dfm_async.wire.memory import size_of

if TYPE_CHECKING:
    from dfm_async.site.checkpoints import RecordedElements

_log = logging.getLogger(__name__)


class OperationCall:
    """One call of an operation.

    ``reads_whole``: streams among its arguments are read before it begins. ``retry``: the policy if there is no other.
    """

    __slots__ = (
        "_began",
        "_inputs",
        "_on_ignored",
        "_queued",
        "_scope",
        "_timer",
        "abandoned",
        "activity",
        "args",
        "attempt",
        "callee",
        "deadline",
        "in_thread",
        "limit",
        "lost",
        "opened",
        "operation",
        "permit",
        "reads_whole",
        "recording",
        "reruns",
        "retry",
        "seen",
        "streams",
    )

    def __init__(self, callee: Callee, effect: fx.Invoke, reruns: int, retry: RetryPolicy | None = None) -> None:
        action = effect.action
        self.callee = callee
        self.operation = action.operation
        self.activity = effect.activity
        self.args = effect.args
        self.streams = bool(effect.activity.streams)
        self.reads_whole = self.streams and (callee.external or bool(callee.whole))
        self.retry = action.retry or callee.retry or (None if callee.generates else retry)
        self._inputs = effect.values if self.retry is not None or reruns else ()
        self.reruns = reruns if self.retry is None else max(reruns, self.retry.on_worker_lost)
        """How often it may run again because the worker that it ran in was lost."""
        self.lost: BaseException | None = None
        """The loss of that worker."""
        self.deadline = action.deadline or callee.deadline
        self.limit: Limit | None = None if action.within is None else Limit.of(action.within)
        """When the call must have returned, with all its attempts and everything that it waits for."""
        self.attempt = 1
        self.opened: Sequence[Subscription] = ()
        self.seen: Observation | None = None
        self.permit: Permit | None = None
        """What it holds of the limits of the site."""
        self.recording: Recording | None = None
        """Where its value, or the elements of its stream, are recorded."""
        self.in_thread = False
        """Whether its code may still run although nobody waits for it any longer."""
        self._scope: asyncio.Timeout | None = None
        """Ends an asynchronous call when its deadline is over."""
        self._timer: DeadlineTimer | None = None
        self._began = self._queued = 0.0
        self._on_ignored: tuple[float, Callable[[], object]] = (math.inf, lambda: None)
        self.abandoned = 0
        """The last attempt that has failed although its asynchronous code, which ignores its cancellation, goes on."""

    @property
    def simple(self) -> bool:
        """Whether there is one attempt only, and nothing has to be awaited before it."""
        timed = self.deadline is not None or self.limit is not None
        return self.retry is None and not timed and not self.reads_whole and self.callee.limits is None

    def may_go_on(self, pause: float) -> bool:
        """Return whether a further attempt can begin after a pause."""
        return self.limit is None or pause < self.limit.left

    def renew(self) -> None:
        """Make the arguments anew: an attempt that failed may have changed constants, lists and dicts."""
        self.args = self.activity.transition.arguments(self._inputs)
        self._resume()

    def recall(self, found: RecordedElements) -> None:
        """Note which elements of its stream are recorded. A pipeline that passes where to begin decides that itself."""
        assert self.recording is not None  # noqa: S101 - else nothing would have been found
        self.recording.count, self.recording.ended = found.count, found.ended
        self.recording.resumed = self.callee.resumes and RESUME_FROM not in self.args
        self._resume()

    def _resume(self) -> None:
        if self.recording is not None and self.recording.resumed:
            self.args = {**self.args, RESUME_FROM: self.recording.count}

    def started(self) -> None:
        """Note that the call has what it waited for, such as its thread. Without a deadline, any thread may do so."""
        if self.seen is not None:
            self.seen.started()
        if self._scope is not None and self.deadline is not None:
            self._count_down(self._scope, started=True)

    def _count_down(self, scope: asyncio.Timeout, *, started: bool) -> None:
        """Let an attempt expire at the limit of the call, and if it has started, at its deadline."""
        loop = asyncio.get_running_loop()
        if started:
            self._began = loop.time()
        ends = [] if self.limit is None else [self.limit.left]
        if started and self.deadline is not None:
            ends.append(self.deadline)
        if self._timer is not None:
            self._timer.cancel()
        if ends:
            self._timer = suspension().call_later(min(ends), lambda: self._expire(scope))

    def _expire(self, scope: asyncio.Timeout) -> None:
        """Cancel asynchronous code whose deadline is over. If it ignores that, nothing waits for it any longer."""
        scope.reschedule(asyncio.get_running_loop().time())
        seconds, abandon = self._on_ignored
        self._timer = suspension().call_later(seconds, abandon)

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Run a constructor, which blocks the loop: if it exceeds the deadline, the process is replaced."""
        if self.deadline is None or not self.callee.per_job:
            yield
            return
        timer = suspension().call_later(self.deadline, lambda: None)
        try:
            yield
        finally:
            timer.cancel()

    async def within_deadline(self, work: Callable[[], Any], grace: float, abandon: Callable[[], object]) -> Any:
        """Await asynchronous code.

        Args:
            work: the code.
            grace: how many seconds it may take to end when its deadline is over.
            abandon: is called then, if it has not ended.

        Raises:
            TimeoutError: the deadline is over.
        """
        if self.deadline is None and self.limit is None:
            return await work()
        self._on_ignored = grace, abandon
        self._queued = asyncio.get_running_loop().time()
        scope = self._scope = asyncio.timeout(None)
        try:
            async with scope:
                self._count_down(scope, started=not self.callee.waits)  # a program reports when it is free for the call
                return await work()
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self.expired() from error
        finally:
            if self._scope is scope:  # else it was abandoned, and these are of the next attempt
                self._scope = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def expired(self) -> TimeoutError:
        """Return the error of asynchronous code whose deadline is over."""
        if self.limit is not None and self.limit.left <= 0:
            return self.limit.exceeded(self.operation)
        assert self.deadline is not None  # noqa: S101 - else nothing could expire
        return late(self.operation, self.deadline, self._began - self._queued)

    async def within_limit(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for what an attempt needs before it can start.

        Raises:
            TimeoutError: it has waited for too long.
        """
        if self.limit is None:
            await work
            return
        timer: DeadlineTimer | None = None
        try:
            async with asyncio.timeout(None) as scope:
                loop = asyncio.get_running_loop()
                timer = suspension().call_later(self.limit.left, lambda: scope.reschedule(loop.time()))
                await work
        except TimeoutError as error:
            if scope.expired():
                raise self.limit.exceeded(self.operation, waiting=True) from error
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Stop reading streams: the call has ended."""
        for subscription in self.opened:
            subscription.close()

    def release(self) -> None:
        """Return the permit: the attempt has ended."""
        permit, self.permit = self.permit, None
        if permit is not None:
            permit.release()


def start(job: StreamingJob, call: OperationCall) -> None:
    """Start a call. The game of its job gets the outcome, perhaps at once."""
    if job.observer is not None:
        _observe_begin(job, call)
    context = _context.fresh(context_of(job, call))
    if not call.simple:
        job.spawn(_run_attempts(job, call), context)
        return
    kind = call.callee.kind
    try:
        work = work_of(job, call)
        if call.callee.generates:
            _returned(job, call, context.run(work))  # runs nothing of its body yet
            return
    except BaseException as error:  # noqa: BLE001 - the constructor of a class, a wrapper: the user's code
        _raised(job, call, error)
        return
    if kind is CodeKind.ASYNC:
        job.spawn(_await(job, call, work), context)
    else:
        _in_background(job, call, work, context)


def context_of(job: JobScope, call: OperationCall) -> OperationContext:
    """Return what the code of a call can know about it."""
    activity = call.activity
    return job.context(call.operation, activity.label, activity.frame, call.attempt, call.seen)


def _observe_begin(job: StreamingJob, call: OperationCall) -> None:
    if job.observer is not None:
        call.seen = job.observer.began(call.activity, call.operation, call.attempt)
        job.observer.given(call.seen, call.callee.adapter.provider, None if call.streams else call.args)


# one attempt


def work_of(job: JobScope, call: OperationCall) -> Callable[[], Any]:
    """Return what runs the code of a call."""
    callee, args = call.callee, call.args
    function = callee.bound(job.instance(callee) if callee.per_job else None)
    if call.streams:
        args = _with_readers(job, call)
    if callee.defaults:
        args = {**{name: fresh(value) for name, value in callee.defaults.items() if name not in args}, **args}
    if callee.wants_context:
        context = context_of(job, call)
        if callee.external:
            on_start(context, call.started)
        args = {**args, "context": context}
    if callee.plain:
        work: Callable[[], Any] = functools.partial(function, **args)
    else:
        positional, named = callee.arguments(args)
        work = functools.partial(function, *positional, **named)
    if call.seen is None:
        return work
    if call.seen.trace is not None and call.seen.trace.stacks is not None and not callee.external:
        work = _sampled(call.seen.trace.stacks, callee.kind, work)
    return _timed(call.seen, work) if callee.kind is CodeKind.SYNC else work


def _sampled(stacks: CallStacks, kind: CodeKind, work: Callable[[], Any]) -> Callable[[], Any]:
    match kind:
        case CodeKind.SYNC:
            return functools.partial(run_sampled, stacks, work)
        case CodeKind.ASYNC:
            return functools.partial(await_sampled, stacks, work)
        case CodeKind.GENERATOR:
            return lambda: generate_sampled(stacks, work())
        case CodeKind.ASYNC_GENERATOR:
            return lambda: iterate_sampled(stacks, work())


def _timed(seen: Observation, work: Callable[[], Any]) -> Callable[[], Any]:
    """Note when a synchronous call gets its thread."""

    def run() -> Any:
        seen.started()
        try:
            return work()
        finally:
            seen.stopped()

    return run


def _in_background(
    job: StreamingJob, call: OperationCall, work: Callable[[], Any], context: contextvars.Context
) -> None:
    remote = _remote(job, call)
    done = (remote or _RemoteCall(job, call)).done
    job.threads.start(call.operation, work, context, done, remote=remote)


async def _await(job: StreamingJob, call: OperationCall, work: Callable[[], Any]) -> None:
    resources = job.resources
    resources.coroutines += 1
    try:
        value = await work()
    except BaseException as error:
        if is_our_cancellation(error):
            raise
        _raised(job, call, error)
    else:
        _returned(job, call, value)
    finally:
        resources.coroutines -= 1
    job.advance()


# several attempts


async def _run_attempts(job: StreamingJob, call: OperationCall) -> None:
    while True:
        attempt = call.attempt
        try:
            value = await _attempt(job, call)
        except BaseException as error:
            if is_our_cancellation(error):
                if not call.in_thread and attempt > call.abandoned:
                    call.release()
                raise
            if attempt <= call.abandoned:
                return
            call.release()
            if _runs_again(job, call, error):
                continue
            pause = _pause_after(call, error)
            if pause is not None:
                _observe_end(job, call, error)
                await drop_cancellation()
                await _begin_next(job, call, pause)
                continue
            _raised(job, call, error)
        else:
            if attempt <= call.abandoned:
                return
            _returned(job, call, value)
        job.advance()
        return


def _pause_after(call: OperationCall, error: BaseException) -> float | None:
    """Return how long to wait before the next attempt, if there is one."""
    # The elements of a stream are read once only: such a call is not retried.
    if call.retry is None or call.streams or not _allows(call.retry, error, call.attempt):
        return None
    pause = call.retry.pause(call.attempt, retry_after(error))
    return pause if call.may_go_on(pause) else None


async def _begin_next(job: StreamingJob, call: OperationCall, pause: float) -> None:
    await asyncio.sleep(pause)
    call.attempt += 1
    call.renew()
    _observe_begin(job, call)


async def _run_next_attempts(job: StreamingJob, call: OperationCall, pause: float) -> None:
    await _begin_next(job, call, pause)
    await _run_attempts(job, call)


def _abandon(job: StreamingJob, call: OperationCall) -> None:
    """Fail an attempt whose asynchronous code ignores its cancellation. Its task is cancelled once more with the job.

    Further attempts run in a task of their own.
    """
    if job.stopping:
        return
    call.abandoned = call.attempt
    _log.warning(
        "%s at site %s ignores its cancellation: its deadline is over, and nothing waits for it any longer",
        *(call.operation, job.resources.site),
        extra={"site": job.resources.site, "job": job.job_id},
    )
    error = call.expired()
    pause = _pause_after(call, error)
    if pause is None:
        _raised(job, call, error)
    else:
        _observe_end(job, call, error)
        call.release()
        job.spawn(_run_next_attempts(job, call, pause), _context.fresh(context_of(job, call)))
    job.advance()


async def _attempt(job: StreamingJob, call: OperationCall) -> Any:
    if call.reads_whole:
        await call.within_limit(_read_whole(call))
    if call.attempt > 1:
        _context.enter(context_of(job, call))
    if call.callee.limits is not None:
        await call.within_limit(_wait_for_permit(job, call, call.callee.limits))
    with call.constructing():
        work = work_of(job, call)
    if call.callee.generates:
        return work()
    remote = _remote(job, call)
    if call.callee.kind is CodeKind.SYNC or (remote is not None and remote.bound):
        call.in_thread = True
        try:
            found = await job.threads.run(
                call.operation, work, call.deadline, remote=remote, late=call.release, limit=call.limit
            )
        except BaseException as error:
            call.in_thread = is_our_cancellation(error)
            raise
        call.in_thread = False
        if not inspect.iscoroutine(found):
            return found
        work = lambda: found  # noqa: E731
    resources = job.resources
    resources.coroutines += 1
    try:
        return await call.within_deadline(work, resources.grace, lambda: _abandon(job, call))
    finally:
        resources.coroutines -= 1


async def _wait_for_permit(job: StreamingJob, call: OperationCall, limits: CallLimits) -> None:
    """Wait until the limits of the site let an attempt start.

    Raises:
        TypeError: the call reads a stream, and would have to run in another worker.
        DfmError: the site does not have what it needs, or cannot run it.
    """
    if limits.gpus and call.streams:
        raise TypeError(
            f"operation {call.operation!r} needs gpus={limits.gpus}, so that it may run in another process, and cannot "
            "read a stream: pass a list"
        )
    elsewhere = call.callee.binds and job.resources.spread is not None
    permits = job.resources.permits
    call.permit = await permits.acquire(call.callee, limits, call.args, job.job_id, job.priority, elsewhere=elsewhere)
    if call.seen is not None:
        call.seen.granted(call.permit.waited_for)


# the end


def _returned(job: StreamingJob, call: OperationCall, value: Any) -> None:
    plain = type(value) in PLAIN
    if not plain and inspect.iscoroutine(value):  # a plain function that returns a coroutine
        job.spawn(_await(job, call, lambda: value))
    elif not plain and is_iterator(value):
        remote = _remote(job, call) if call.callee.kind is CodeKind.GENERATOR else None
        left = None if call.permit is None else call.release
        job.streams.returned(call.activity, value, call.seen, call.close, remote, call.reruns, left, call.recording)
    else:
        if job.observer is not None and call.seen is not None:
            job.observer.returned(call.seen, value)
        if call.opened:
            call.close()
        if call.permit is not None:
            call.release()
        if not job.resources.useful:
            job.resources.call_completed()
        if call.recording is None:
            job.game.complete(call.activity, value)
        else:
            _record(job, call, call.recording, value)


async def recall(job: StreamingJob, call: OperationCall) -> None:
    """Complete a call with the value that an earlier run of the job has recorded; else start it."""
    recording = call.recording
    assert recording is not None  # noqa: S101 - the caller has checked it
    try:
        found = await recording.checkpoints.find(recording.node, recording.frame)
        value = recording.codec.loads(found) if isinstance(found, bytes) else None
    except (StoreError, EncodingError) as error:
        _raised(job, call, error)
        job.advance()
        return
    elements = None if isinstance(found, bytes) else found
    if elements is not None:
        call.recall(elements)
    if found is None or (elements is not None and not elements.ended):
        start(job, call)
    else:
        if call.streams:
            _with_readers(job, call)  # it reads none of their elements
            call.close()
        if elements is None:
            job.game.complete(call.activity, value)
        else:
            job.streams.recalled(call.activity, recording)
    job.advance()


def _record(job: StreamingJob, call: OperationCall, recording: Recording, value: Any) -> None:
    """Record the value of a call before anything that depends on it begins, or take one that is recorded already."""

    def done(found: bytes | Exception | None) -> None:
        if job.stopping:
            return
        try:
            chosen, error = value, found if isinstance(found, Exception) else None
            if isinstance(found, bytes):
                try:
                    chosen = recording.codec.loads(found)
                except EncodingError as unreadable:
                    error = unreadable
            if error is None:
                job.game.complete(call.activity, chosen)
            else:
                job.game.fail(call.activity, job.game.error(call.activity, error, call.attempt, cause_of(error)))
            job.advance_soon()
        except BaseException as bug:  # noqa: BLE001 - a bug of this library: the job would wait for ever
            job.broken(bug)

    try:
        data = recording.codec.dumps(recording.codec.pack(value))
    except EncodingError as error:
        done(error)
    else:
        recording.checkpoints.record(recording.node, recording.frame, data, done)


def _allows(retry: RetryPolicy, error: BaseException, attempt: int) -> bool:
    return error.again if isinstance(error, RemoteFailure) else retry.allows(error, attempt)


def _raised(job: StreamingJob, call: OperationCall, error: BaseException) -> None:
    _observe_end(job, call, error)
    call.close()
    call.release()
    if isinstance(error, StreamFailed):  # it read a stream that failed: the failure is the producer's
        job.game.fail(call.activity, error.error)
    elif isinstance(error, RemoteFailure):
        job.game.fail(call.activity, error.record)
    else:
        job.game.fail(call.activity, job.game.error(call.activity, error, call.attempt, cause_of(error)))


def _observe_end(job: StreamingJob, call: OperationCall, error: BaseException) -> None:
    if job.observer is not None and call.seen is not None:
        job.observer.ended(call.seen, error.record if isinstance(error, RemoteFailure) else error)
        call.seen = None


# in other workers


class _RemoteCall:
    """Runs an attempt of a call in another worker of the site."""

    __slots__ = ("_call", "_job", "cost", "operation")

    def __init__(self, job: StreamingJob, call: OperationCall) -> None:
        self._job = job
        self._call = call
        self.operation = call.operation
        self.cost = call.callee.cost

    def done(self, value: Any, error: BaseException | None) -> None:
        """Pass the outcome to the job, wherever the call has run."""
        job, call = self._job, self._call
        if job.stopping:
            return
        try:
            if error is None:
                _returned(job, call, value)
            elif _runs_again(job, call, error):
                _in_background(job, call, work_of(job, call), _context.fresh(context_of(job, call)))
            else:
                _raised(job, call, error)
            job.advance()
        except BaseException as bug:  # noqa: BLE001 - a bug of this library: the job would wait for ever
            job.broken(bug)

    @property
    def bound(self) -> str:
        """The worker that it has to run in; empty if any will do."""
        permit = self._call.permit
        return "" if permit is None else permit.worker

    def send(self, worker: str, number: int) -> int:
        """Send the call to a worker; return the number of bytes of its arguments.

        Raises:
            EncodingError: they cannot be sent.
        """
        job, call, resources = self._job, self._call, self._job.resources
        payload = resources.call_codec.payload(resources.call_codec.pack(call.args))
        trace = None if call.seen is None else call.seen.trace
        message = msg.RunCall(
            job=job.number,
            at=job.at,
            number=number,
            home=resources.address,
            job_id=job.job_id,
            operation=call.operation,
            provider=call.callee.adapter.provider,
            node=call.activity.label,
            frame=call.activity.frame,
            attempt=call.attempt,
            payload=payload,
            retry=call.retry,
            priority=job.priority,
            trace=None if trace is None else (trace.recorder.trace_id, trace.span, trace.stacks is not None),
            timed=call.deadline is not None or call.limit is not None,
            computes=self.cost.turn,
        )
        if call.callee.per_job and resources.spread is not None:
            held = resources.spread.hold(worker, (job.number, job.at))
            if held is not None:
                job.owned_objects().keep(held)
        resources.send(worker, message)
        return size_of(payload)

    def stop(self, worker: str) -> None:
        """Have a worker stop the calls of the job."""
        self._job.resources.send(worker, msg.StopCalls(self._job.number, self._job.at))

    def elements(self, payload: Any) -> list[Any]:
        """Decode elements that came from a worker."""
        return self._job.resources.call_codec.loads_batch(payload)

    def taken(self, worker: str, number: int, count: int, size: int) -> None:
        """Have a worker produce as many elements as were read, of a size in bytes."""
        self._job.resources.send(worker, msg.ElementsTaken(self._job.number, self._job.at, number, count, size))

    def close(self, worker: str, number: int) -> None:
        """Have a worker end the generator."""
        self._job.resources.send(worker, msg.CloseCall(self._job.number, self._job.at, number))

    def can_send(self, result: Any) -> bool:
        """Return whether a result could come from another worker."""
        try:
            if inspect.iscoroutine(result) or is_iterator(result):
                return False
            self._job.resources.call_codec.pack(result)
        except BaseException:  # noqa: BLE001 - objects of users can raise anything
            return False
        return True

    def lost(self, error: BaseException) -> None:
        """Note that the worker was lost."""
        self._call.lost = error

    def outcome(self, message: msg.CallReturned | msg.CallRaised) -> tuple[Any, BaseException | None]:
        """Return the result, or the error, that a worker reports."""
        seen, recorder = self._call.seen, self._job.recorder
        if seen is not None:
            seen.ran(message.start, message.wall, message.pid, message.stacks)
        if recorder is not None and message.spans:
            recorder.adopt(message.spans)
        if isinstance(message, msg.CallRaised):
            return None, RemoteFailure(message.error, message.again, message.retry_after)
        try:
            value = self._job.resources.call_codec.loads(message.payload)
        except EncodingError as error:
            return None, error
        return (iter(value) if message.iterated else value), None


def _remote(job: StreamingJob, call: OperationCall) -> _RemoteCall | None:
    """Return how a call can run in another worker; None if it cannot."""
    bound = call.permit is not None and bool(call.permit.worker)
    spreads = (call.callee.spreads or bound) and not call.streams and job.resources.spread is not None
    return _RemoteCall(job, call) if spreads else None


def _runs_again(job: StreamingJob, call: OperationCall, error: BaseException) -> bool:
    """Return whether a call runs again that was lost with the worker that it ran in."""
    if error is not call.lost or call.reruns < 1 or job.stopping:
        return False
    call.reruns -= 1
    call.renew()
    return True


# streams among the arguments


def _with_readers(job: JobScope, call: OperationCall) -> dict[str, Any]:
    """Replace streams by readers; they are closed when the call has ended."""
    seen: set[LocalStream] = set()
    in_thread = call.callee.kind in (CodeKind.SYNC, CodeKind.GENERATOR)

    def read(stream: Any) -> Any:
        if stream in seen:
            stream.consumers += 1  # twice in one call: two readers, where one was expected
        seen.add(stream)
        subscription = stream.subscribe()
        call.opened = (*call.opened, subscription)
        return _blocking(job, subscription) if in_thread else subscription

    return {name: _replace_streams(value, read) for name, value in call.args.items()}


async def _read_whole(call: OperationCall) -> None:
    """Read streams to their end: for parameters that are declared as lists; for a program, wherever they occur."""
    args, callee = call.args, call.callee
    names = [name for name in args if callee.external or (name in callee.whole and isinstance(args[name], LocalStream))]
    opened: dict[LocalStream, Subscription] = {}

    def begin(stream: Any) -> None:
        if stream not in opened:  # twice in one call: each gets a list of its own
            opened[stream] = stream.subscribe()

    for name in names:  # all of them, before the first is read
        _replace_streams(args[name], begin)
    call.opened = (*call.opened, *opened.values())
    later: set[LocalStream] = set()
    for name in args.keys() - set(names):
        _replace_streams(args[name], later.add)
    for stream in later & opened.keys():
        stream.consumers += 1  # its elements are kept for the parameter that reads it as a stream
    read = {stream: await subscription.rest() for stream, subscription in opened.items()}
    call.args = {**args, **{name: _replace_streams(args[name], lambda s: list(read[s])) for name in names}}


def _blocking(job: JobScope, subscription: Subscription) -> Iterator[Any]:
    """Read a stream from a thread, for synchronous operations."""
    while True:
        found = job.wait(subscription.get(), contextvars.Context())
        if subscription.closed:  # the thread may still run: for it, this must not look like the end of the stream
            raise RuntimeError("the call has ended or exceeded its deadline: its stream is closed")
        if not found:
            return
        yield from found


def _replace_streams(value: Any, read: Callable[[Any], Any]) -> Any:
    """Replace streams by readers, also inside containers that were built in the pipeline."""
    if isinstance(value, StreamValue):
        return read(value)
    if type(value) is dict:
        return {key: _replace_streams(item, read) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_replace_streams(item, read) for item in value)
    return value
