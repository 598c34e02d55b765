"""Rules of tests for the operations of a federation: fakes, failures, delays; one board per federation."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Operation
from dfm_async.federation.site import Site
from dfm_async.runtime.context import OperationContext
from dfm_async.session.session import Session
from dfm_async.testing.fakes import Call, Fake
from dfm_async.testing.relay import Relay
from dfm_async.testing.tap import CallVerdict, Decision, FakeResult, Raised, Tap, plays

T = TypeVar("T")


@runtime_checkable
class _Reloadable(Protocol):
    def reload(self, federation: Federation) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The calls that a rule applies to; None means any."""

    operation: str
    site: str | None = None
    provider: str | None = None

    def matches(self, call: Call) -> bool:
        """Return whether a call is one of them."""
        return (
            self.operation == call.operation
            and self.site in (None, call.site)
            and self.provider in (None, call.provider)
        )


class Obstacle(Protocol):
    """A fault that calls meet."""

    async def meet(self, call: Call) -> None:
        """Let a call pass, perhaps later, or raise the error of the call."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule for some calls: a fake answers them, or they meet a fault."""

    chosen: Chosen
    what: Fake | Obstacle


class Board:
    """All rules for the operations of one federation. While there are any, its calls are intercepted.

    Calls are intercepted wherever they run; but not those of jobs in processes that began before the first rule.
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
        """Abandoned fakes that are being closed."""

    @classmethod
    def of(cls, federation: Federation) -> Board:
        """Return the board of a federation."""
        found = cls._of.get(federation)
        if found is None:
            found = cls._of[federation] = cls(federation)
        return found

    def add(self, rule: Rule) -> None:
        """Add a rule, for jobs of all sessions of this process."""
        with self._lock:
            self._rules.append(rule)
            first = len(self._rules) == 1
        if first:
            plays[self._key] = lambda: _Play(self)
            if self._address is not None:  # workers that live on know it
                self._serve()
            self._tap_all(self._tap)

    def remove(self, rule: Rule) -> None:
        """Remove a rule, if it is present."""
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
        for session in Session._connected_to(federation):
            _reload(session, federation)

    def _serve(self) -> str:
        if not self._serving:
            self._serving = True
            self._address = Relay.acquire(self._key, lambda: _Visitor(self))
        assert self._address is not None  # noqa: S101 - set with the first service
        return self._address

    def loop_of(self, job_id: str) -> asyncio.AbstractEventLoop | None:
        """Return the loop of the session that runs a job."""
        federation = self._federation()
        sessions = [] if federation is None else Session._connected_to(federation)
        return next((session._running_loop for session in sessions if session._coordinator(job_id) is not None), None)

    def defaults(self, call: Call) -> dict[str, Any]:
        """Return the defaults of the code of a call."""
        federation = self._federation()
        site = None if federation is None else federation.sites.get(call.site)
        adapter = None if site is None else site.adapter(call.operation, call.provider)
        listed = () if adapter is None else adapter.signature.parameters.parameters.values()
        return {found.name: found.default for found in listed if found.default is not found.empty}

    async def decide(self, call: Call) -> Fake | None:
        """Apply the rules to a call; return the fake that answers it."""
        for rule in list(self._rules):
            if not isinstance(rule.what, Fake) and rule.chosen.matches(call):
                await rule.what.meet(call)
        for rule in reversed(self._rules):  # the latest rule has precedence
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
    if session._running_loop is here:
        target.reload(federation)
    else:
        session._running_loop.call_soon_threadsafe(target.reload, federation)


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
        return CallVerdict.PROCEED if self._fake is None else CallVerdict.WANTED

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
            return FakeResult(value)
        self._stream = value
        return CallVerdict.STREAMED

    async def next(self) -> Decision:
        stream = self._stream
        try:
            return FakeResult(await anext(stream) if hasattr(stream, "__anext__") else next(stream))
        except (StopIteration, StopAsyncIteration):
            self._stream = None
            return CallVerdict.ENDED
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
    """A call in another process: its requests are answered on the loop of its session."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._play = _Play(board)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, request: Any) -> Decision:
        if isinstance(request, Call):
            self._loop = self._board.loop_of(request.job_id)
            if self._loop is None:
                return CallVerdict.PROCEED
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
    """The job of a call in another process, for the context of a fake."""

    stopping = False

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the fake of an operation that runs in another process cannot use context.{name}")


def _context_elsewhere(call: Call) -> OperationContext:
    caller: Any = _Elsewhere()
    return OperationContext(call.job_id, call.site, call.operation, call.node, call.frame, call.attempt, caller)


def _cancelled(error: BaseException) -> bool:
    """Return whether the call was cancelled. Other errors of a fake are errors of the operation."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


@contextmanager
def override(
    federation: Federation,
    operation: str | Operation[..., Any],
    fake: Fake | Callable[..., Any],
    *,
    site: str | Site | None = None,
    provider: str | None = None,
) -> Iterator[Fake]:
    """Replace an operation by a fake while the block runs, in all sessions of this process.

    The fake runs in the process of the test, on the loop of its session, even if the operation would run elsewhere. It
    can therefore use objects of the test, and must not block. It gets streams as lists.

    Args:
        federation: the federation.
        operation: the operation, or its name.
        fake: a function, an async function, a generator, ``returns(...)`` or ``raises(...)``.
        site: only calls at this site; by default at all.
        provider: only calls of this provider's code; by default of all.

    Yields:
        The fake, with its ``calls``.

    Raises:
        LookupError: the federation does not offer the operation there.
        TypeError: the parameters of the fake do not fit.
    """
    chosen = choose(federation, operation, site, provider)
    made = Fake.of(fake)
    made.check(federation.operations[chosen.operation])
    board, rule = Board.of(federation), Rule(chosen, made)
    board.add(rule)
    try:
        yield made
    finally:
        board.remove(rule)


def choose(
    federation: Federation, operation: str | Operation[..., Any], site: str | Site | None, provider: str | None
) -> Chosen:
    """Return the calls of an operation.

    Raises:
        LookupError: the federation does not offer the operation there.
    """
    name = operation.name if isinstance(operation, Operation) else operation
    place = site.name if isinstance(site, Site) else site
    offers = [(found.name, key[1]) for found in federation.sites.values() for key in found.adapters if key[0] == name]
    if not offers:
        known = ", ".join(sorted(federation.operations)) or "none"
        raise LookupError(f"federation {federation.name!r} has no operation {name!r} (it has: {known})")
    if not any(place in (None, where) and provider in (None, whose) for where, whose in offers):
        listed = ", ".join(sorted(where + (f" (provider {whose})" if whose else "") for where, whose in offers))
        there = "".join([f" at site {place!r}" if place else "", f" of provider {provider!r}" if provider else ""])
        raise LookupError(f"operation {name!r} is not offered{there} (it is at: {listed})")
    return Chosen(operation=name, site=place, provider=provider)
