"""Gates: an operation waits at one until the test lets it pass, and the test can wait for its arrival."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any
from uuid import uuid4

from dfm_async.testing.relay import Relay, RelayConnection


class Gate:
    """A place in an operation where it waits for the test. Works across processes: pass it as a parameter.

    ``with Gate() as gate`` opens it at the end of the block, so that no operation is left waiting. A gate that was
    never sent to another process needs no block.
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
        """Report the arrival of the operation to the test, and wait until it may go on. For async operations.

        Raises:
            RuntimeError: the gate was made in a worker process, where no test can open it.
        """
        self._check()
        if not self._elsewhere:
            await self._state.arrive()
            return
        connection = RelayConnection(self._address or "", self._key)
        try:
            await connection.ask("arrive")
        except ConnectionError:
            return  # the gate is closed for good: all go through
        finally:
            connection.close()

    def arrive_blocking(self) -> None:
        """Do the same for synchronous operations, in their thread.

        Raises:
            RuntimeError: as for :meth:`arrive`; or this is a thread with a running event loop.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("arrive_blocking() would block the event loop: await gate.arrive() instead")
        asyncio.run(self.arrive())

    def _check(self) -> None:
        if self._stranded:
            raise RuntimeError(
                "this gate was made in a worker process, where no test can open it: a module was imported there "
                "again. Make the gate in the test, and pass it to the operation as a parameter"
            )

    # in the test

    async def arrived(self, count: int = 1) -> None:
        """Return when this many callers have arrived in all, including those that have passed."""
        await self._state.wait_until(lambda: self.arrivals >= count)

    async def cleared(self) -> None:
        """Return when there are no waiters: all have passed, were cancelled, or were lost with their worker."""
        await self._state.wait_until(lambda: not self._state.queue)

    def open(self) -> None:
        """Let all callers pass, also later ones."""
        self._state.open()

    def let_through(self, count: int = 1) -> None:
        """Let a number of callers pass: the first waiters; if there are fewer, the next that arrive."""
        self._state.let_through(count)

    @property
    def arrivals(self) -> int:
        """The number of callers that have arrived in all."""
        return self._state.arrivals

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        return len(self._state.queue)

    def close(self) -> None:
        """Open the gate, and close its address for other processes."""
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
        return (_RemoteGate, (self._key, self._address))

    def __repr__(self) -> str:
        if self._elsewhere:
            return "<Gate of another process>"
        state = "open" if self._state.is_open else f"{self.waiting} waiting"
        return f"<Gate: {state}, {self.arrivals} arrived>"


class _RemoteGate(Gate):
    """A gate of another process."""

    def __init__(self, key: str, address: str) -> None:
        super().__init__()
        self._key = key
        self._address = address
        self._elsewhere = True
        self._stranded = False


class _State:
    """The waiters of a gate. Any thread may use it; callbacks run in the thread that releases them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.queue: deque[Callable[[], object]] = deque()
        self.arrivals = 0
        self.is_open = False
        self._credit = 0
        self._watchers: list[tuple[Callable[[], bool], _Wake]] = []

    def join(self, go_on: Callable[[], object]) -> None:
        """Add a caller; ``go_on`` is called when it may pass, perhaps at once."""
        with self._lock:
            self.arrivals += 1
            free = self.is_open or self._credit > 0
            if not free:
                self.queue.append(go_on)
            elif not self.is_open:
                self._credit -= 1
        self._notify([go_on] if free else [])

    def leave(self, go_on: Callable[[], object]) -> None:
        """Remove a caller that does not wait any longer."""
        with self._lock:
            if go_on in self.queue:
                self.queue.remove(go_on)
        self._notify()

    def _notify(self, going: Iterable[Callable[[], object]] = ()) -> None:
        """Let callers pass, and wake the tests whose conditions hold now."""
        with self._lock:
            reached: list[Callable[[], object]] = [wake for holds, wake in self._watchers if holds()]
        for notify in [*reached, *going]:
            notify()

    def open(self) -> None:
        with self._lock:
            self.is_open = True
            going = list(self.queue)
            self.queue.clear()
        self._notify(going)

    def let_through(self, count: int) -> None:
        with self._lock:
            going = [self.queue.popleft() for _ in range(min(count, len(self.queue)))]
            self._credit += count - len(going)
        self._notify(going)

    async def arrive(self) -> None:
        wake = _Wake()
        self.join(wake)
        try:
            await wake.future
        finally:
            self.leave(wake)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        wake = _Wake()
        with self._lock:
            if holds():
                return
            self._watchers.append((holds, wake))
        try:
            await wake.future
        finally:
            with self._lock:
                self._watchers.remove((holds, wake))


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
    """A caller in another process."""

    def __init__(self, state: _State) -> None:
        self._state = state

    async def answer(self, _request: Any) -> str:
        await self._state.arrive()
        return "go on"

    async def aclose(self) -> None:
        """Do nothing: a cancelled caller has left the queue already."""
