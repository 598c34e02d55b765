"""Sample what calls do while they run: the stacks of their threads, about a hundred times per second.

One thread per process takes the samples. It exists only while calls run that are sampled. A sample stands for the time
since the previous one, so that times are correct on average, however short the calls are. Threads that use no processor
meanwhile wait: for a file, a lock, or the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from types import CodeType, FrameType
from typing import Any, Final

import msgspec

INTERVAL: Final = 0.01
"""The number of seconds between samples."""
OTHER: Final = "(other)"
"""Takes the place of the stacks that are not kept."""
NO_ROOM: Final = "(waits for its reader)"
"""Takes the place of the stack of a generator that does not run."""
_MOST_STACKS: Final = 256
"""The most different stacks of a call that are kept."""
_MOST_BYTES: Final = 64 * 1024
"""The most bytes of them that are sent."""
_DEEPEST: Final = 200
"""The most frames of a stack, the innermost ones."""
_LONGEST_NAME: Final = 200
_HAS_CLOCKS: Final = hasattr(time, "pthread_getcpuclockid")  # macOS has none: all threads count as running

_log = logging.getLogger(__name__)


class CallStacks:
    """The samples of one call: how long each stack ran and waited, in seconds."""

    __slots__ = ("_stacks",)

    def __init__(self) -> None:
        self._stacks: dict[str, tuple[float, float]] = {}

    def add(self, stack: str, running: float, waiting: float) -> None:
        """Add a sample. Only the thread that samples does."""
        if stack not in self._stacks and len(self._stacks) >= _MOST_STACKS:
            stack = OTHER
        before = self._stacks.get(stack, (0.0, 0.0))
        self._stacks[stack] = (before[0] + running, before[1] + waiting)

    def text(self) -> str:
        """Return a line for each stack: microseconds that it ran, and waited, and its frames, the outermost first."""
        lines, size, rest = [], 0, [0.0, 0.0]
        for stack, (running, waiting) in sorted(self._stacks.copy().items(), key=lambda item: -sum(item[1])):
            size += len(stack)
            if size <= _MOST_BYTES and stack != OTHER:
                lines.append(f"{running * 1e6:.0f} {waiting * 1e6:.0f} {stack}")
            else:
                rest[0] += running
                rest[1] += waiting
        if any(rest):
            lines.append(f"{rest[0] * 1e6:.0f} {rest[1] * 1e6:.0f} {OTHER}")
        return "\n".join(lines)


class _Thread(msgspec.Struct, eq=False):
    """A thread that runs a call; since when, and which processor time it had then."""

    stacks: CallStacks
    since: float
    clock: float
    before: _Thread | None = None
    """The call that this one interrupts in its thread."""
    left: bool = False


class _Sampler:
    """Samples the calls of this process."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin anew: a forked process has no thread that samples."""
        self._lock = threading.Lock()
        self._threads: dict[int, _Thread] = {}
        self._tasks: dict[asyncio.Task[Any], CallStacks] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        """The threads of the loops of these tasks."""
        self._sampling = False

    def enter_thread(self, stacks: CallStacks) -> tuple[int, _Thread]:
        """Sample this thread from now on; return what :meth:`leave_thread` takes."""
        ident = threading.get_ident()
        entered = _Thread(stacks, time.perf_counter(), time.thread_time())
        with self._lock:
            entered.before = self._threads.get(ident)
            self._threads[ident] = entered
            begins, self._sampling = not self._sampling, True
        if begins:
            self._start()
        return ident, entered

    def leave_thread(self, ident: int, entered: _Thread) -> None:
        """Do not sample a call in its thread any longer, but again the one that it has interrupted, if that goes on."""
        with self._lock:
            entered.left = True
            if self._threads.get(ident) is not entered:
                return  # another call in the same thread goes on, or the process was forked
            before = entered.before
            while before is not None and before.left:
                before = before.before
            if before is None:
                del self._threads[ident]
            else:
                before.since, before.clock = entered.since, entered.clock
                self._threads[ident] = before

    def enter_task(self, stacks: CallStacks) -> asyncio.Task[Any]:
        """Sample the running task from now on, and return it."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - coroutines of calls run in tasks
        with self._lock:
            self._tasks[task] = stacks
            self._loops[task.get_loop()] = threading.get_ident()
            begins, self._sampling = not self._sampling, True
        if begins:
            self._start()
        return task

    def leave_task(self, task: asyncio.Task[Any]) -> None:
        """Do not sample a task any longer."""
        with self._lock:
            self._tasks.pop(task, None)
            if not self._tasks:
                self._loops.clear()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="dfm-sampler", daemon=True).start()
        except RuntimeError as error:  # the system cannot start it
            with self._lock:
                self._sampling = False
            _log.warning("calls cannot be sampled: %s", error)

    def _run(self) -> None:
        time.sleep(random.uniform(0, INTERVAL))  # noqa: S311 - else calls that are shorter would never be seen
        last = time.perf_counter() - INTERVAL
        try:
            while True:
                now = time.perf_counter()
                with self._lock:
                    if not self._threads and not self._tasks:
                        self._sampling = False
                        return
                    self._sample(now, now - last)
                last = now
                time.sleep(INTERVAL)
        except BaseException:
            with self._lock:
                self._sampling = False  # the next call that is sampled starts another thread
            raise

    def _sample(self, now: float, elapsed: float) -> None:
        frames = sys._current_frames()  # noqa: SLF001 - its name is documented
        for ident, thread in self._threads.items():
            with _survived("a thread"):
                _sample_thread(thread, ident, frames.get(ident), now, elapsed)
        for loop, ident in self._loops.items():
            with _survived("a task"):
                task = asyncio.current_task(loop)
                _sample_task(None if task is None else self._tasks.get(task), frames.get(ident), elapsed)


_sampler: Final = _Sampler()


@contextlib.contextmanager
def _survived(what: str) -> Iterator[None]:
    """Go on with the other threads and tasks if one cannot be sampled."""
    try:
        yield
    except Exception:  # noqa: BLE001 - frames of users, whose globals can be anything
        _log.debug("%s cannot be sampled", what, exc_info=True)


def _sample_thread(thread: _Thread, ident: int, frame: FrameType | None, now: float, elapsed: float) -> None:
    if frame is not None and (found := _stack(frame)) is not None:
        running = elapsed * _busy(thread, ident, now)
        thread.stacks.add(found or NO_ROOM, running, elapsed - running)


def _sample_task(stacks: CallStacks | None, frame: FrameType | None, elapsed: float) -> None:
    if stacks is not None and frame is not None and (found := _stack(frame)):
        stacks.add(found, elapsed, 0.0)  # a task that waits has no stack


def _busy(thread: _Thread, ident: int, now: float) -> float:
    """Return the part of the time since the previous sample that a thread has used a processor."""
    if not _HAS_CLOCKS:
        return 1.0
    # It has frames and we have the interpreter, so that it cannot end meanwhile.
    clock = time.clock_gettime(time.pthread_getcpuclockid(ident))
    used, passed = clock - thread.clock, now - thread.since
    thread.clock, thread.since = clock, now
    return min(1.0, used / passed) if passed > 0 else 1.0


def _stack(frame: FrameType | None) -> str | None:
    """Return the frames of a call, the outermost first; empty if its code is not on the stack; None in code of ours."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code is _RUN or code is _GENERATE or code is _AWAIT or code is _ITERATE:
            return ";".join(reversed(names))
        if frame.f_globals is _OWN:
            return None
        if len(names) == _DEEPEST:
            return ";".join(["...", *reversed(names)])
        names.append(_name(code, frame))
        frame = frame.f_back
    return ""


def _name(code: CodeType, frame: FrameType) -> str:
    module = frame.f_globals.get("__name__")
    return f"{module}.{code.co_qualname}".replace(";", ",").replace("\n", " ")[:_LONGEST_NAME]


# code that is sampled; its frames are those above the frame of one of these functions


def run_sampled(stacks: CallStacks, work: Callable[[], Any]) -> Any:
    """Run synchronous code."""
    entered = _sampler.enter_thread(stacks)
    try:
        return work()
    finally:
        _sampler.leave_thread(*entered)


def generate_sampled(stacks: CallStacks, generator: Generator[Any, Any, Any]) -> Iterator[Any]:
    """Run a generator, which has a thread of its own."""
    entered = _sampler.enter_thread(stacks)
    try:
        yield from generator
    finally:
        _sampler.leave_thread(*entered)


async def await_sampled(stacks: CallStacks, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Await a coroutine."""
    task = _sampler.enter_task(stacks)
    try:
        return await work()
    finally:
        _sampler.leave_task(task)


async def iterate_sampled(stacks: CallStacks, iterator: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Run an asynchronous generator, in the tasks of its readers."""
    try:
        while True:
            task = _sampler.enter_task(stacks)
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                return
            finally:
                _sampler.leave_task(task)
            yield item
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


_OWN: Final = globals()
_RUN, _GENERATE, _AWAIT, _ITERATE = (
    function.__code__ for function in (run_sampled, generate_sampled, await_sampled, iterate_sampled)
)
