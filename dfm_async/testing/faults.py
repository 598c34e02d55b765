"""Injected faults: workers that die, connections that break, operations that fail, are slow, or hang."""

from __future__ import annotations

import asyncio
import os
import signal as signals
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Protocol, runtime_checkable

from dfm_async.federation.operation import Operation
from dfm_async.federation.site import Site
from dfm_async.session.session import Session
from dfm_async.testing.board import Board, Chosen, Rule, choose
from dfm_async.testing.fakes import Call
from dfm_async.testing.gates import Gate
from dfm_async.wire.channel import Channel

_SURVIVED: Final = frozenset(
    {
        signals.SIGINT,
        signals.SIGSTOP,
        signals.SIGTSTP,
        signals.SIGTTIN,
        signals.SIGTTOU,
        signals.SIGCONT,
        signals.SIGCHLD,
        signals.SIGURG,
        signals.SIGWINCH,
    }
)
"""Signals that do not end a worker: there is no end to wait for."""


class _WorkerProcess(Protocol):
    @property
    def pid(self) -> int | None: ...

    ready: asyncio.Future[None]
    ended: asyncio.Future[int | None]
    channel: Channel | None
    assignments: dict[Any, None]


@runtime_checkable
class _HasWorkers(Protocol):
    def workers(self, site: str) -> list[Any]: ...


class Fault:
    """A fault of calls. ``with`` removes it at the end of the block; so does ``remove``.

    Attributes:
        calls: the calls that met it, without their arguments.
    """

    def __init__(self, session: Session, times: int | None, act: Callable[[], Any]) -> None:
        if times is not None and times < 1:
            raise ValueError(f"times must be at least 1, not {times}")
        self.calls: list[Call] = []
        self._session = session
        self._times = times
        self._act = act
        self._remove: Callable[[], object] | None = None

    def valid(self, remove: Callable[[], object]) -> Fault:
        """Record how to remove it."""
        self._remove = remove
        return self

    async def meet(self, call: Call) -> None:
        """Apply the fault to a call of its session."""
        if self._times is not None and len(self.calls) >= self._times:
            return
        if self._session._coordinator(call.job_id) is None:
            return  # of another session with the same federation
        self.calls.append(call)
        await self._act()

    def remove(self) -> None:
        """Remove the fault; calls that it already delays are not released."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


class Faults:
    """Inject faults into a session, even while jobs run. All faults end with the session, or with the ``with`` block.

    Faults of operations do not affect jobs in worker processes that started before this object was created.

    Args:
        session: a connected session.

    Raises:
        SessionClosed: it is not connected.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._board = Board.of(session.federation)
        self._rules: list[Rule] = []
        self._gates: list[Gate] = []
        session._running_loop  # noqa: B018 - raises if it is not connected
        # A rule for an operation that does not exist: from now on all calls are intercepted.
        self._add(Chosen(operation=""), Fault(session, None, lambda: asyncio.sleep(0)))
        session._when_closed(self.close)

    # operations

    def delay(
        self,
        operation: str | Operation[..., Any],
        seconds: float,
        *,
        times: int | None = None,
        site: str | Site | None = None,
        provider: str | None = None,
    ) -> Fault:
        """Make calls wait before they begin.

        Args:
            operation: the operation, or its name.
            seconds: for how long; by the clock of the session's loop.
            times: how many calls; by default all.
            site: only calls at this site.
            provider: only calls of this provider's code.
        """
        if seconds < 0:
            raise ValueError(f"the delay must not be negative, not {seconds}")
        fault = Fault(self._session, times, lambda: asyncio.sleep(seconds))
        return self._add(choose(self._session.federation, operation, site, provider), fault)

    def fail_operation(
        self,
        operation: str | Operation[..., Any],
        error: BaseException | type[BaseException],
        times: int | None = 1,
        *,
        site: str | Site | None = None,
        provider: str | None = None,
    ) -> Fault:
        """Make calls raise an exception instead of running the operation.

        Args:
            operation: the operation, or its name.
            error: what they raise.
            times: how many calls, retries included; None means all.
            site: only calls at this site.
            provider: only calls of this provider's code.
        """

        async def fail() -> None:
            raise error

        if not isinstance(error, Exception) and not (isinstance(error, type) and issubclass(error, Exception)):
            raise TypeError(f"an operation fails with an exception, not {error!r}")
        fault = Fault(self._session, times, fail)
        return self._add(choose(self._session.federation, operation, site, provider), fault)

    def hold(
        self,
        operation: str | Operation[..., Any],
        *,
        times: int | None = None,
        site: str | Site | None = None,
        provider: str | None = None,
    ) -> Gate:
        """Make calls wait at a gate before they begin; return the gate.

        Args:
            operation: the operation, or its name.
            times: how many calls; by default all.
            site: only calls at this site.
            provider: only calls of this provider's code.
        """
        gate = Gate()
        self._gates.append(gate)
        self._add(choose(self._session.federation, operation, site, provider), Fault(self._session, times, gate.arrive))
        return gate

    def _add(self, chosen: Chosen, fault: Fault) -> Fault:
        rule = Rule(chosen, fault)
        self._rules.append(rule)
        self._board.add(rule)
        return fault.valid(lambda: self._board.remove(rule))

    # workers

    async def kill_worker(self, site: str | Site, signal: int = signals.SIGKILL) -> int:
        """Send a signal to a worker process of a site, that with the most jobs; return its process id.

        Returns when the process has ended and its jobs have been notified; for signals that do not end it, at once. A
        worker that is just starting is waited for.

        Args:
            site: the site.
            signal: the signal; SIGSTOP makes a worker hang, SIGCONT lets it go on.

        Raises:
            LookupError: the site has no worker process: none was needed yet, or the target has none.
        """
        worker = await self._worker(site)
        pid = worker.pid
        assert pid is not None  # noqa: S101 - it is ready
        os.kill(pid, signal)
        if signal not in _SURVIVED:
            await asyncio.shield(worker.ended)
        return pid

    async def drop_connection(self, site: str | Site) -> int:
        """Break the connection between the application and a worker of a site, that with the most jobs.

        A worker ends without it. Returns its process id when it has ended and its jobs have been notified.

        Args:
            site: the site.

        Raises:
            LookupError: the site has no worker process: none was needed yet, or the target has none.
        """
        worker = await self._worker(site)
        pid = worker.pid
        assert pid is not None  # noqa: S101 - it is ready
        assert worker.channel is not None  # noqa: S101 - it is ready
        worker.channel.abort()
        await asyncio.shield(worker.ended)
        return pid

    async def _worker(self, site: str | Site) -> _WorkerProcess:
        name = site.name if isinstance(site, Site) else site
        target = self._session.target
        if name not in self._session.federation.sites:
            raise LookupError(f"federation {self._session.federation.name!r} has no site {name!r}")
        if not isinstance(target, _HasWorkers):
            raise LookupError(  # noqa: TRY004 - the site is there, its process is not
                f"site {name!r} has no worker process: its session has none. Use target='local'"
            )
        found: list[_WorkerProcess] = [worker for worker in target.workers(name) if not worker.ended.done()]
        if not found:
            why = "it is the application's own" if name == self._session.homesite else "no job has needed one yet"
            raise LookupError(f"site {name!r} has no worker process: {why}")
        chosen = max(found, key=lambda worker: len(worker.assignments))
        await asyncio.shield(chosen.ready)
        return chosen

    # the end

    def close(self) -> None:
        """Remove all faults, and open all gates."""
        for rule in self._rules:
            self._board.remove(rule)
        self._rules.clear()
        for gate in self._gates:
            gate.close()
        self._gates.clear()

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
