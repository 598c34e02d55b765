"""Gates: an operation stops at one until the test lets it through, and the test waits until it is there."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any
from uuid import uuid4

from dfm_async.testing.relay import Line, Relay, ask

__all__ = ["Gate"]


class Gate:
    """A place in an operation where it waits for the test. Works across processes: pass it as a parameter.

    ``with Gate() as gate`` opens it at the end of the block, so that nobody is left waiting. A gate that was never
    sent to another process needs no block.
    """

    def __init__(self) -> None:
        self._key = f"gate-{uuid4().hex}"
        self._address: str | None = None
        self._state = _State()
        self._elsewhere = False
        self._stranded = multiprocessing.parent_process() is not None
        self._end: Callable[[], object] | None = None

    # in the operation

    async def arrive(self) -> None:
        """Tells the test that the operation is here, and waits until it may go on. For async operations.

        Raises:
            RuntimeError: the gate was made in a worker process, where no test can open it.
        """
        self._check()
        if not self._elsewhere:
            await self._state.arrive()
            return
        line = Line(self._address or "", self._key)
        try:
            await line.ask("arrive")
        except ConnectionError:
            return  # the gate is closed for good: all go through
        finally:
            line.close()

    def arrive_blocking(self) -> None:
        """The same for synchronous operations, in their thread.

        Raises:
            RuntimeError: as for :meth:`arrive`; or this is a thread with a running event loop.
        """
        self._check()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("arrive_blocking() would block the event loop: await gate.arrive() instead")
        if not self._elsewhere:
            passed = threading.Event()
            self._state.join(passed.set)
            passed.wait()
            return
        try:
            ask(self._address or "", self._key, "arrive")
        except ConnectionError:
            return  # the gate is closed for good: all go through

    def _check(self) -> None:
        if self._stranded:
            raise RuntimeError(
                "this gate was made in a worker process, where no test can open it: a module was imported there "
                "again. Make the gate in the test, and pass it to the operation as a parameter"
            )

    # in the test

    async def arrived(self, count: int = 1) -> None:
        """Returns when so many have arrived in all, those that went on included."""
        await self._state.arrived(count)

    async def cleared(self) -> None:
        """Returns when nobody waits: all have gone on, were cancelled, or have died with their worker."""
        await self._state.cleared()

    def open(self) -> None:
        """Lets all through, also those who come later."""
        self._state.open()

    def let_through(self, count: int = 1) -> None:
        """Lets so many through: the first that wait; if there are fewer, the next that come."""
        self._state.let_through(count)

    @property
    def arrivals(self) -> int:
        """How many have arrived in all."""
        return self._state.arrivals

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._state.queue)

    def close(self) -> None:
        """Opens the gate, and takes back what other processes reached it by."""
        self.open()
        if self._end is not None:
            self._end()
            self._end = None

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._elsewhere and self._end is None:
            state = self._state
            self._address = Relay.acquire(self._key, lambda: _Arrival(state))
            self._end = weakref.finalize(self, Relay.release, self._key)
        return (_Distant, (self._key, self._address))

    def __repr__(self) -> str:
        if self._elsewhere:
            return "<Gate of another process>"
        state = "open" if self._state.is_open else f"{self.waiting} waiting"
        return f"<Gate: {state}, {self.arrivals} arrived>"


class _Distant(Gate):
    """A gate of another process."""

    def __init__(self, key: str, address: str) -> None:
        super().__init__()
        self._key = key
        self._address = address
        self._elsewhere = True
        self._stranded = False


class _State:
    """Who waits, and for what. Any thread may use it; callbacks run in the thread that lets them go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.queue: deque[Callable[[], object]] = deque()
        self.arrivals = 0
        self.is_open = False
        self._credit = 0
        self._watchers: list[tuple[int, Callable[[], object]]] = []
        self._cleared: list[Callable[[], object]] = []

    def join(self, go_on: Callable[[], object]) -> None:
        """Arrives; ``go_on`` is called when the way is free, perhaps at once."""
        with self._lock:
            self.arrivals += 1
            free = self.is_open or self._credit > 0
            if not free:
                self.queue.append(go_on)
            elif not self.is_open:
                self._credit -= 1
            told = [tell for count, tell in self._watchers if count <= self.arrivals]
            self._watchers = [found for found in self._watchers if found[0] > self.arrivals]
        for tell in told:
            tell()
        if free:
            go_on()

    def leave(self, go_on: Callable[[], object]) -> None:
        """Does not wait any more."""
        with self._lock:
            if go_on in self.queue:
                self.queue.remove(go_on)
        self._look()

    def _look(self) -> None:
        """Tells those who wait for nobody to wait, if nobody does."""
        with self._lock:
            told: list[Callable[[], object]] = []
            if not self.queue:
                told, self._cleared = self._cleared, told
        for tell in told:
            tell()

    def open(self) -> None:
        with self._lock:
            self.is_open = True
            going = list(self.queue)
            self.queue.clear()
        for go_on in going:
            go_on()
        self._look()

    def let_through(self, count: int) -> None:
        with self._lock:
            going = [self.queue.popleft() for _ in range(min(count, len(self.queue)))]
            self._credit += count - len(going)
        for go_on in going:
            go_on()
        self._look()

    async def arrive(self) -> None:
        wake = _Wake()
        self.join(wake)
        try:
            await wake.future
        finally:
            self.leave(wake)

    async def cleared(self) -> None:
        wake = _Wake()
        with self._lock:
            if not self.queue:
                return
            self._cleared.append(wake)
        try:
            await wake.future
        finally:
            with self._lock:
                self._cleared = [found for found in self._cleared if found is not wake]

    async def arrived(self, count: int) -> None:
        wake = _Wake()
        with self._lock:
            if self.arrivals >= count:
                return
            self._watchers.append((count, wake))
        try:
            await wake.future
        finally:
            with self._lock:
                self._watchers = [found for found in self._watchers if found[1] is not wake]


class _Wake:
    """Ends a wait on a loop, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def __call__(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Arrival:
    """Somebody of another process at the gate."""

    def __init__(self, state: _State) -> None:
        self._state = state

    async def answer(self, _request: Any) -> str:
        await self._state.arrive()
        return "go on"

    async def aclose(self) -> None:
        """Nothing is left: whoever stops waiting has left the queue."""
