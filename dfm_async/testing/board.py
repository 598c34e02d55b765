"""What tests want of the operations of a federation: fakes, failures, delays; one board per federation."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

from dfm_async.federation.federation import Federation
from dfm_async.runtime.context import OperationContext
from dfm_async.session.session import Session
from dfm_async.testing.fakes import Call, Fake
from dfm_async.testing.relay import Relay
from dfm_async.testing.tap import PROCEED, Answer, Decision, Ended, Raised, Streamed, Tap, Wanted, plays

__all__ = ["Board", "Chosen", "Obstacle", "Rule"]

T = TypeVar("T")


@runtime_checkable
class _Reloadable(Protocol):
    def reload(self, federation: Federation) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The calls that a rule is about; None means any."""

    operation: str
    site: str | None = None
    provider: str | None = None

    def matches(self, call: Call) -> bool:
        """Whether a call is one of them."""
        return (
            self.operation == call.operation
            and self.site in (None, call.site)
            and self.provider in (None, call.provider)
        )


class Obstacle(Protocol):
    """What stands in the way of calls."""

    async def meet(self, call: Call) -> None:
        """Lets a call through, perhaps later; or raises what the call raises."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What becomes of some calls: a fake answers them, or something stands in their way."""

    chosen: Chosen
    what: Fake | Obstacle


class Board:
    """All rules for the operations of one federation. While there are any, its calls are asked about.

    Operations ask wherever they run: jobs that began before the first rule may not, if they run in processes.
    """

    _of: Final[weakref.WeakKeyDictionary[Federation, Board]] = weakref.WeakKeyDictionary()

    def __init__(self, federation: Federation) -> None:
        self._federation = weakref.ref(federation)
        self._key = f"board-{uuid4().hex}"
        self._tap = Tap(self._key, self._serve)
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._address: str | None = None
        self._serving = False
        self.closing: set[asyncio.Task[None]] = set()
        """Fakes that nobody reads any more, on their way out."""

    @classmethod
    def of(cls, federation: Federation) -> Board:
        """The board of a federation."""
        found = cls._of.get(federation)
        if found is None:
            found = cls._of[federation] = cls(federation)
        return found

    def add(self, rule: Rule) -> None:
        """Makes a rule valid, for jobs of all sessions of this process."""
        with self._lock:
            self._rules.append(rule)
            first = len(self._rules) == 1
        if first:
            plays[self._key] = lambda: _Play(self)
            if self._address is not None:  # workers that live on know it
                self._serve()
            self._tap_all(self._tap)

    def remove(self, rule: Rule) -> None:
        """Takes a rule back, if it is still there."""
        with self._lock:
            if rule not in self._rules:
                return
            self._rules.remove(rule)
            last = not self._rules
        if last:
            self._tap_all(None)
            if self._serving:
                self._serving = False
                Relay.release(self._key)

    def _tap_all(self, tap: Tap | None) -> None:
        federation = self._federation()
        if federation is None:
            return
        federation.callee = tap
        for site in federation.sites.values():
            for key, adapter in site.adapters.items():
                site.adapters[key] = replace(adapter, callee=tap)
        if tap is None:
            return  # sessions keep it: without a rule it does nothing, and their workers need not be replaced
        for session in Session.connected_to(federation):
            _reload(session, federation)

    def _serve(self) -> str:
        if not self._serving:
            self._serving = True
            self._address = Relay.acquire(self._key, lambda: _Visitor(self))
        assert self._address is not None  # noqa: S101 - set with the first service
        return self._address

    def loop_of(self, job_id: str) -> asyncio.AbstractEventLoop | None:
        """The loop of the session that runs a job."""
        federation = self._federation()
        sessions = [] if federation is None else Session.connected_to(federation)
        return next((session.loop for session in sessions if session.coordinator(job_id) is not None), None)

    def defaults(self, call: Call) -> dict[str, Any]:
        """What the code that a call is for takes as its defaults."""
        federation = self._federation()
        site = None if federation is None else federation.sites.get(call.site)
        adapter = None if site is None else site.adapter(call.operation, call.provider)
        listed = () if adapter is None else adapter.signature.parameters.parameters.values()
        return {found.name: found.default for found in listed if found.default is not found.empty}

    async def decide(self, call: Call) -> Fake | None:
        """Lets a call meet what stands in its way, and gives the fake that answers it."""
        for rule in list(self._rules):
            if not isinstance(rule.what, Fake) and rule.chosen.matches(call):
                await rule.what.meet(call)
        for rule in reversed(self._rules):  # the last that was said counts
            if isinstance(rule.what, Fake) and rule.chosen.matches(call):
                return rule.what
        return None


def _reload(session: Session, federation: Federation) -> None:
    target = session.target
    if not isinstance(target, _Reloadable):
        raise TypeError(f"{type(target).__name__} cannot exchange the code of a session that is connected")
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if session.loop is here:
        target.reload(federation)
    else:
        session.loop.call_soon_threadsafe(target.reload, federation)


class _Play:
    """One call, on the loop of the session that it belongs to."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._call: Call | None = None
        self._fake: Fake | None = None
        self._stream: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def begin(self, call: Call) -> Decision:
        self._loop = asyncio.get_running_loop()
        self._call = call
        try:
            self._fake = await self._board.decide(call)
        except BaseException as error:
            if _cancelled(error):
                raise
            return Raised(error)
        return PROCEED if self._fake is None else Wanted()

    async def supply(self, arguments: Mapping[str, Any], context: OperationContext | None) -> Decision:
        assert self._call is not None  # noqa: S101 - the call comes first
        assert self._fake is not None  # noqa: S101 - it wanted them
        call, fake = replace(self._call, arguments=dict(arguments)), self._fake
        fake.calls.append(call)
        if context is None:
            context = _context_elsewhere(call)
        try:
            value = fake.call({**self._board.defaults(call), **arguments}, context)
            if inspect.isawaitable(value):
                value = await value
        except BaseException as error:
            if _cancelled(error):
                raise
            return Raised(error)
        if not hasattr(value, "__anext__") and not hasattr(value, "__next__"):
            return Answer(value)
        self._stream = value
        return Streamed()

    async def next(self) -> Decision:
        stream = self._stream
        try:
            return Answer(await anext(stream) if hasattr(stream, "__anext__") else next(stream))
        except (StopIteration, StopAsyncIteration):
            self._stream = None
            return Ended()
        except BaseException as error:
            if _cancelled(error):
                raise
            self._stream = None
            return Raised(error)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close, stream)

    def _close(self, stream: Any) -> None:
        if hasattr(stream, "aclose"):
            task = asyncio.ensure_future(stream.aclose())
            self._board.closing.add(task)
            task.add_done_callback(self._board.closing.discard)
        elif hasattr(stream, "close"):
            stream.close()


class _Visitor:
    """A call in another process: what it asks is answered on the loop of its session."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._play = _Play(board)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, request: Any) -> Decision:
        if isinstance(request, Call):
            self._loop = self._board.loop_of(request.job_id)
            if self._loop is None:
                return PROCEED
            return await _on(self._loop, self._play.begin(request))
        assert self._loop is not None  # noqa: S101 - the call comes first
        work = self._play.next() if request is None else self._play.supply(request, None)
        return await _on(self._loop, work)

    async def aclose(self) -> None:
        self._play.close()


async def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # it is closed: the session has ended, and with it the call
        work.close()
        raise ConnectionResetError("the loop of the test is closed") from None
    return await asyncio.wrap_future(future)


class _Elsewhere:
    """The job of a call in another process. A fake sees whose call it serves, and can do nothing to it."""

    stopping = False

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the fake of an operation that runs in another process cannot use context.{name}")


def _context_elsewhere(call: Call) -> OperationContext:
    caller: Any = _Elsewhere()
    return OperationContext(call.job_id, call.site, call.operation, call.node, call.frame, call.attempt, caller)


def _cancelled(error: BaseException) -> bool:
    """Whether the call was cancelled. Anything else that a fake raises is for the operation."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
