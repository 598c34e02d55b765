"""Calls operations for jobs: in tasks, in threads, or as generators; with retries and deadlines.

Plain functions of a job: an object per job that knows its job would be a cycle, and there are many jobs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dfm_async.federation.operation import GENERATORS, CodeKind
from dfm_async.model.constants import fresh
from dfm_async.net import effects as fx
from dfm_async.net.game import Activity
from dfm_async.net.tokens import StreamValue
from dfm_async.runtime import context as _context
from dfm_async.runtime.context import OperationContext, on_start
from dfm_async.runtime.faults import cause_of, drop_cancellation, is_our_cancellation
from dfm_async.runtime.iterators import is_iterator
from dfm_async.runtime.job_threads import in_background, in_thread, late
from dfm_async.runtime.objects import JobObjects
from dfm_async.runtime.observer import Observation
from dfm_async.runtime.operations import Callee
from dfm_async.runtime.streams import Stream, StreamFailed, Subscription

if TYPE_CHECKING:
    from dfm_async.model.policies import RetryPolicy
    from dfm_async.runtime.job import SiteJob

__all__ = ["context_of", "instance_of", "invoke", "wait"]

T = TypeVar("T")


class _Call:
    """One call: what is called, with what, and how often it may be tried."""

    __slots__ = (
        "activity",
        "args",
        "attempt",
        "callee",
        "deadline",
        "opened",
        "operation",
        "reads_whole",
        "retry",
        "scope",
        "seen",
        "streams",
    )

    def __init__(self, effect: fx.Invoke, callee: Callee) -> None:
        action = effect.action
        self.activity: Activity = effect.activity
        self.operation = action.operation
        self.callee = callee
        self.args = effect.args
        self.streams = effect.streams
        self.reads_whole = effect.streams and (callee.external or bool(callee.whole))
        self.retry: RetryPolicy | None = action.retry or callee.retry
        self.deadline: float | None = action.deadline or callee.deadline
        self.attempt = 1
        self.opened: list[Subscription] = []
        self.seen: Observation | None = None
        self.scope: asyncio.Timeout | None = None
        """Ends an asynchronous call when its deadline is over."""

    def started(self) -> None:
        """The call has what it waited for, such as its thread. May be called from any thread, if there is no scope."""
        if self.seen is not None:
            self.seen.started()
        if self.scope is not None and self.deadline is not None:
            self.scope.reschedule(asyncio.get_running_loop().time() + self.deadline)

    @property
    def simple(self) -> bool:
        """Whether one try is all there is, and nothing has to be awaited before it."""
        return self.retry is None and self.deadline is None and not self.reads_whole

    def close(self) -> None:
        """The call has ended: it reads no stream any more."""
        for subscription in self.opened:
            subscription.close()


def invoke(job: SiteJob, effect: fx.Invoke) -> None:
    """Calls an operation; the game is told of the result."""
    try:
        callee = job.find(effect.action.operation, effect.action.provider)
    except (LookupError, PermissionError) as error:
        job.game.fail(effect.activity, job.game.error(effect.activity, error))
        return
    call = _Call(effect, callee)
    if job.observer is not None:
        call.seen = job.observer.began(call.activity, call.operation, 1)
        job.observer.given(call.seen, callee.adapter.provider, None if call.streams else call.args)
    context = contextvars.Context()  # fresh: an operation sees nothing of the code that happens to drive it
    context.run(_context.enter, context_of(job, call.activity, call.operation, 1, call.seen))
    if not call.simple:
        job.spawn(_try(job, call), context)
        return
    try:
        work = _work(job, call)
        if callee.kind in GENERATORS:
            _returned(job, call, context.run(work))  # runs nothing of its body yet
            return
    except BaseException as error:  # noqa: BLE001 - the constructor of a class, a wrapper: the user's code
        _raised(job, call, error)
        return
    if callee.kind is CodeKind.ASYNC:
        job.spawn(_await(job, call, work), context)
    else:
        _in_background(job, call, work, context)


def context_of(
    job: SiteJob, activity: Activity, operation: str, attempt: int, seen: Observation | None
) -> OperationContext:
    """What an operation can know about a call."""
    site, trace = job.runtime.site, None if seen is None else seen.trace
    return OperationContext(job.job_id, site, operation, activity.label, activity.frame, attempt, job, trace)


# one try


def _work(job: SiteJob, call: _Call) -> Callable[[], Any]:
    callee, args = call.callee, call.args
    function = callee.bound(instance_of(job, callee))
    if call.streams:
        args = _with_readers(job, call)
    if callee.defaults:
        args = {**{name: fresh(value) for name, value in callee.defaults.items() if name not in args}, **args}
    if callee.wants_context:
        context = context_of(job, call.activity, call.operation, call.attempt, call.seen)
        if callee.external:
            on_start(context, call.started)
        args = {**args, "context": context}
    if callee.plain:
        work: Callable[[], Any] = lambda: function(**args)  # noqa: E731
    else:
        positional, named = callee.arguments(args)
        work = lambda: function(*positional, **named)  # noqa: E731
    return _timed(call.seen, work) if call.seen is not None and callee.kind is CodeKind.SYNC else work


def _timed(seen: Observation, work: Callable[[], Any]) -> Callable[[], Any]:
    """Notes when a synchronous call gets its thread."""

    def run() -> Any:
        seen.started()
        return work()

    return run


def instance_of(job: SiteJob, callee: Callee) -> Any:
    """The object of a class, built once per job."""
    if not callee.adapter.per_job:
        return None
    if job.objects is None:
        job.objects = JobObjects(job)
    return job.objects.get(callee)


def _in_background(job: SiteJob, call: _Call, work: Callable[[], Any], context: contextvars.Context) -> None:
    def done(value: Any, error: BaseException | None) -> None:
        if job.stopping:
            return
        try:
            if error is None:
                _returned(job, call, value)
            else:
                _raised(job, call, error)
            job.advance()
        except BaseException as fault:  # noqa: BLE001 - a fault of ours: the job would wait for ever
            job.broken(fault)

    in_background(job, call.operation, work, context, done)


async def _await(job: SiteJob, call: _Call, work: Callable[[], Any]) -> None:
    try:
        value = await work()
    except BaseException as error:
        if is_our_cancellation(error):
            raise
        _raised(job, call, error)
    else:
        _returned(job, call, value)
    job.advance()


# several tries


async def _try(job: SiteJob, call: _Call) -> None:
    while True:
        try:
            value = await _attempt(job, call)
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            # What was read of a stream is gone: such a call is not tried again.
            if call.retry is not None and not call.streams and call.retry.allows(error, call.attempt):
                _observe_end(job, call, error)
                await drop_cancellation()
                await asyncio.sleep(call.retry.pause(call.attempt))
                call.attempt += 1
                if job.observer is not None:
                    call.seen = job.observer.began(call.activity, call.operation, call.attempt)
                    job.observer.given(call.seen, call.callee.adapter.provider, call.args)
                continue
            _raised(job, call, error)
        else:
            _returned(job, call, value)
        job.advance()
        return


async def _attempt(job: SiteJob, call: _Call) -> Any:
    if call.reads_whole:
        await _read_whole(call)
    if call.attempt > 1:
        _context.enter(context_of(job, call.activity, call.operation, call.attempt, call.seen))
    work = _work(job, call)
    if call.callee.kind in GENERATORS:
        return work()
    if call.callee.kind is CodeKind.SYNC:
        found = await in_thread(job, call.operation, work, call.deadline)
        if not inspect.iscoroutine(found):
            return found
        work = lambda: found  # noqa: E731
    loop = asyncio.get_running_loop()
    queued = loop.time()
    # A program reports when a process is free for the call: its deadline counts from then on.
    scope = call.scope = asyncio.timeout(None if call.callee.waits else call.deadline)
    try:
        async with scope:
            return await work()
    except TimeoutError as error:
        if scope.expired() and call.deadline is not None:
            waited = (scope.when() or 0.0) - call.deadline - queued
            raise late(call.operation, call.deadline, waited) from error
        raise
    finally:
        call.scope = None


# the end


def _returned(job: SiteJob, call: _Call, value: Any) -> None:
    if inspect.iscoroutine(value):  # a plain function that returns a coroutine
        job.spawn(_await(job, call, lambda: value))
    elif is_iterator(value):
        job.streams.returned(call.activity, value, call.seen, call.close)
    else:
        if job.observer is not None and call.seen is not None:
            job.observer.returned(call.seen, value)
        call.close()
        job.game.complete(call.activity, value)


def _raised(job: SiteJob, call: _Call, error: BaseException) -> None:
    _observe_end(job, call, error)
    call.close()
    game = job.game
    if isinstance(error, StreamFailed):  # it read a stream that failed: the failure is the producer's
        game.fail(call.activity, error.error)
    else:
        game.fail(call.activity, game.error(call.activity, error, call.attempt, cause_of(error)))


def _observe_end(job: SiteJob, call: _Call, error: BaseException) -> None:
    if job.observer is not None and call.seen is not None:
        job.observer.ended(call.seen, error)
        call.seen = None


# streams among the arguments


def _with_readers(job: SiteJob, call: _Call) -> dict[str, Any]:
    """Puts readers in the place of streams; they are closed when the call has ended."""
    seen: set[Stream] = set()
    in_thread = call.callee.kind in (CodeKind.SYNC, CodeKind.GENERATOR)

    def read(stream: Any) -> Any:
        if stream in seen:
            stream.consumers += 1  # twice in one call: two readers, where one was expected
        seen.add(stream)
        subscription = stream.subscribe()
        call.opened.append(subscription)
        return _blocking(job, subscription, asyncio.get_running_loop()) if in_thread else subscription

    return {name: _replace_streams(value, read) for name, value in call.args.items()}


async def _read_whole(call: _Call) -> None:
    """Reads streams to their end: for parameters that are declared as lists; for a program, wherever they stand."""
    args, callee = call.args, call.callee
    names = [name for name in args if callee.external or (name in callee.whole and isinstance(args[name], Stream))]
    opened: dict[Stream, Subscription] = {}

    def begin(stream: Any) -> None:
        if stream not in opened:  # twice in one call: each gets a list of its own
            opened[stream] = stream.subscribe()

    for name in names:  # all of them, before the first is read
        _replace_streams(args[name], begin)
    call.opened.extend(opened.values())
    later: set[Stream] = set()
    for name in args.keys() - set(names):
        _replace_streams(args[name], later.add)
    for stream in later & opened.keys():
        stream.consumers += 1  # its elements are kept for the parameter that reads it as a stream
    read = {stream: await subscription.rest() for stream, subscription in opened.items()}
    call.args = {**args, **{name: _replace_streams(args[name], lambda s: list(read[s])) for name in names}}


def _blocking(job: SiteJob, subscription: Subscription, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Reads a stream from a thread, for synchronous operations."""
    while True:
        future: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        loop.call_soon_threadsafe(_read_for, job, subscription, future)
        found = future.result()
        if not found:
            return
        yield from found


def _read_for(job: SiteJob, subscription: Subscription, future: concurrent.futures.Future[list[Any]]) -> None:
    def ended(_task: object = None) -> None:
        if not future.done():
            future.set_exception(RuntimeError("the job was cancelled, or the stream was closed"))

    if job.stopping:
        ended()
    else:
        job.spawn(_read_into(subscription, future)).add_done_callback(ended)


async def _read_into(subscription: Subscription, future: concurrent.futures.Future[list[Any]]) -> None:
    try:
        found = await subscription.get()
    except StreamFailed as failed:
        future.set_exception(failed)
    else:
        if subscription.closed:  # the thread may still run: it must not take this for the end of the stream
            error = "the call has ended or exceeded its deadline: its stream is closed"
            future.set_exception(RuntimeError(error))
        else:
            future.set_result(found)


def wait(job: SiteJob, work: Coroutine[Any, Any, T]) -> T:
    """Runs something as a task of the job, and waits for it in a thread."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    async def run() -> None:
        try:
            found = await work
        except BaseException as error:
            if is_our_cancellation(error):
                raise
            future.set_exception(error)
        else:
            future.set_result(found)

    def ended(_task: object = None) -> None:
        work.close()
        if not future.done():
            future.set_exception(RuntimeError("the job was cancelled"))

    def begin() -> None:
        if job.stopping:
            ended()
        else:
            job.spawn(run(), contextvars.copy_context()).add_done_callback(ended)

    job.runtime.threads.post(begin)
    return future.result()


def _replace_streams(value: Any, read: Callable[[Any], Any]) -> Any:
    """Puts readers in the place of streams, also inside containers that were put together in the pipeline."""
    if isinstance(value, StreamValue):
        return read(value)
    if type(value) is dict:
        return {key: _replace_streams(item, read) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_replace_streams(item, read) for item in value)
    return value
