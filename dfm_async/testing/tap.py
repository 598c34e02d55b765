"""Intercepts every call of an operation, and asks the test what to do; runs where the operation does.

A tap is sent to workers instead of the usual caller, so that nothing is intercepted unless a test needs it.
"""

from __future__ import annotations

import enum
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dfm_async.base.tasks import in_thread
from dfm_async.federation.operation import Adapter, CodeKind
from dfm_async.runtime.adapters import Objects
from dfm_async.runtime.callees import Callee
from dfm_async.runtime.context import OperationContext, current_context
from dfm_async.runtime.sources import is_iterator
from dfm_async.testing.fakes import Call
from dfm_async.testing.relay import RelayConnection


class CallVerdict(enum.Enum):
    """What a test decides about a call, without a value."""

    PROCEED = enum.auto()
    """The operation runs as it is."""
    WANTED = enum.auto()
    """A fake runs, and needs the arguments of the call."""
    STREAMED = enum.auto()
    """Elements follow, one for each request."""
    ENDED = enum.auto()
    """There is no further element."""


@dataclass(frozen=True, slots=True)
class FakeResult:
    """This is the result, or the next element of a stream."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """This was raised."""

    error: BaseException


Decision = CallVerdict | FakeResult | Raised


class Play(Protocol):
    """One call of an operation, as the test sees it."""

    def begin(self, call: Call) -> Coroutine[Any, Any, Decision]:
        """Decide about a call, which has no arguments yet."""
        ...

    def supply(self, arguments: dict[str, Any], context: OperationContext) -> Coroutine[Any, Any, Decision]:
        """Run the fake that wanted the arguments."""
        ...

    def next(self) -> Coroutine[Any, Any, Decision]:
        """Return the next element, if elements were announced."""
        ...

    def close(self) -> None:
        """End the call. Any thread may call it."""
        ...


plays: Final[dict[str, Callable[[], Play]]] = {}
"""The tests of this process, by key."""


class _RemotePlay:
    """A play in the process of the test, seen from a worker."""

    def __init__(self, address: str, key: str) -> None:
        self._connection = RelayConnection(address, key)
        self._operation = ""

    async def begin(self, call: Call) -> Decision:
        self._operation = call.operation
        try:
            decision: Decision = await self._connection.ask(call)
        except (ConnectionError, FileNotFoundError):  # the test is over, or wants nothing any longer
            return CallVerdict.PROCEED
        return decision

    async def supply(self, arguments: dict[str, Any], _context: OperationContext) -> Decision:
        try:
            decision: Decision = await self._connection.ask(arguments)
        except ConnectionError as error:
            raise RuntimeError(f"the test has ended before its fake of {self._operation!r} did") from error
        return decision

    async def next(self) -> Decision:
        decision: Decision = await self._connection.ask(None)
        return decision

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Tap:
    """Makes the calls of a federation under test.

    Attributes:
        key: the key of the test.
        address: where the test is reached from other processes; made when it is first needed.
    """

    key: str
    address: Callable[[], str] | str

    def __call__(self, adapter: Adapter) -> Callee:
        """Return a caller of an adapter's code."""
        return _TappedCallee(adapter, self)

    def play(self) -> Play:
        """Begin one call."""
        here = plays.get(self.key)
        return here() if here is not None else _RemotePlay(self._place(), self.key)

    def _place(self) -> str:
        return self.address if isinstance(self.address, str) else self.address()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tap, (self.key, self._place()))


class _TappedCallee(Callee):
    __slots__ = ("_tap",)

    def __init__(self, adapter: Adapter, tap: Tap) -> None:
        super().__init__(adapter)
        self._tap = tap
        self.waits = False  # a fake in its place has nothing to wait for

    def build(self, objects: Objects) -> Any:
        return _Later(functools.partial(super().build, objects))

    def bound(self, instance: Any) -> Callable[..., Any]:
        plain = super().bound

        def code() -> Callable[..., Any]:
            return plain(instance if instance is None else instance.built())

        def begin(*args: Any, **kwargs: Any) -> Any:
            # Here, because the body of a generator may run where the call is not known.
            return _WRAPPERS[self.kind](_Attempt(self, self._tap.play(), current_context(), code, args, kwargs))

        return begin


class _Later:
    """The object of a class, built when the test has let a call pass: a class that a fake replaces need not work."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._built: list[Any] = []

    def built(self) -> Any:
        with self._lock:
            if not self._built:
                self._built.append(self._build())
            return self._built[0]

    async def aclose(self) -> None:
        for found in self._built:
            close = getattr(found, "aclose", None) or getattr(found, "close", None)
            if callable(close):
                asynchronous = hasattr(found, "aclose") or inspect.iscoroutinefunction(close)
                done = close() if asynchronous else await in_thread(close, "close")
                if inspect.isawaitable(done):
                    await done


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """One call, which runs unless the test decides otherwise."""

    callee: Callee
    play: Play
    context: OperationContext
    code: Callable[[], Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def call(self) -> Call:
        """The call, without its arguments, which only a fake needs."""
        adapter, context = self.callee.adapter, self.context
        return Call(
            operation=adapter.operation,
            site=context.site,
            provider=adapter.provider,
            arguments={},
            job_id=context.job_id,
            node=context.node,
            frame=tuple(context.frame),
            attempt=context.attempt,
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by the names of the operation's parameters."""
        parameters = self.callee.adapter.signature.parameters
        own = self.callee.wants_context
        named = {name: value for name, value in self.kwargs.items() if not (own and name == "context")}
        found: dict[str, Any] = dict(parameters.bind_partial(*self.args, **named).arguments)
        for name, parameter in parameters.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found.update(found.pop(name, {}))
        return found

    def run(self) -> Any:
        """Call the operation's own code."""
        return self.code()(*self.args, **self.kwargs)

    async def decide(self) -> Decision:
        """Ask the test, on the loop."""
        decision = _checked(await self.play.begin(self.call))
        if decision is CallVerdict.WANTED:
            arguments = {name: await _whole(value) for name, value in self.arguments.items()}
            decision = _checked(await self.play.supply(arguments, self.context))
        return decision

    def decide_blocking(self) -> Decision:
        """Ask the test, in a thread."""
        decision = _checked(self.context.wait(self.play.begin(self.call)))
        if decision is CallVerdict.WANTED:
            arguments = {name: list(v) if is_iterator(v) else v for name, v in self.arguments.items()}
            decision = _checked(self.context.wait(self.play.supply(arguments, self.context)))
        return decision

    async def elements(self) -> AsyncGenerator[Any, None]:
        """Return what a fake yields, on the loop."""
        try:
            while isinstance(decision := _checked(await self.play.next()), FakeResult):
                yield decision.value
        finally:
            self.play.close()

    def elements_blocking(self) -> Iterator[Any]:
        """Return what a fake yields, in a thread."""
        try:
            while isinstance(decision := _checked(self.context.wait(self.play.next())), FakeResult):
                yield decision.value
        finally:
            self.play.close()


def _checked(decision: Decision) -> Decision:
    if isinstance(decision, Raised):
        raise decision.error
    return decision


async def _whole(value: Any) -> Any:
    return [item async for item in value] if is_iterator(value) else value


async def _async(attempt: _Attempt) -> Any:
    kept = False
    try:
        decision = await attempt.decide()
        kept = decision is CallVerdict.STREAMED
    finally:
        if not kept:
            attempt.play.close()
    if isinstance(decision, FakeResult):
        return decision.value
    return attempt.elements() if kept else await attempt.run()


def _sync(attempt: _Attempt) -> Any:
    kept = False
    try:
        decision = attempt.decide_blocking()
        kept = decision is CallVerdict.STREAMED
    finally:
        if not kept:
            attempt.play.close()
    if isinstance(decision, FakeResult):
        return decision.value
    return attempt.elements_blocking() if kept else attempt.run()


async def _async_generator(attempt: _Attempt) -> AsyncGenerator[Any, None]:
    try:
        decision = await attempt.decide()
        if isinstance(decision, FakeResult):
            for element in _several(attempt, decision.value):
                yield element
            return
        found = attempt.elements() if decision is CallVerdict.STREAMED else attempt.run()
        try:
            async for element in found:
                yield element
        finally:
            await found.aclose()
    finally:
        attempt.play.close()


def _generator(attempt: _Attempt) -> Iterator[Any]:
    try:
        decision = attempt.decide_blocking()
        if isinstance(decision, FakeResult):
            yield from _several(attempt, decision.value)
        elif decision is CallVerdict.STREAMED:
            yield from attempt.elements_blocking()
        else:
            yield from attempt.run()
    finally:
        attempt.play.close()


def _several(attempt: _Attempt, value: Any) -> Iterator[Any]:
    """Return what a fake returned in the place of a generator: its elements."""
    try:
        return iter(value)
    except TypeError:
        name = attempt.callee.adapter.operation
        raise TypeError(f"{name!r} is a generator: its fake must yield, or return a list, not {value!r}") from None


_WRAPPERS: Final[dict[CodeKind, Callable[[_Attempt], Any]]] = {
    CodeKind.SYNC: _sync,
    CodeKind.ASYNC: _async,
    CodeKind.GENERATOR: _generator,
    CodeKind.ASYNC_GENERATOR: _async_generator,
}
