"""What tests of an exchange in one process share: virtual time, recorded messages, ends played by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from dfm_async.exchange import PlainCodec
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.program_messages import Message
from dfm_async.testing.clock import VirtualClock, virtual_time

M = TypeVar("M", bound=Message)
Work: TypeAlias = Callable[..., Awaitable[None]]
Decorator: TypeAlias = Callable[[Work], Callable[..., None]]


def now() -> float:
    """The time of the loop, in seconds."""
    return asyncio.get_running_loop().time()


def block(seconds: float) -> None:
    """Block the loop for a time, on virtual time."""
    _clocks[-1]._now += seconds


_clocks: list[VirtualClock] = []


async def idle() -> None:
    """Returns when everything that can happen now has happened."""
    await asyncio.sleep(1e-6)


def on_virtual_time(work: Work) -> Callable[..., None]:
    """A test whose waits take no time: the clock moves to the next timer. No task and no timer outlives it."""

    async def checked(**arguments: Any) -> None:
        async with virtual_time() as clock:
            _clocks[:] = [clock]
            await clock.until(work(**arguments), limit=1e6)
            await clock.advance(1e-6)
            loop: Any = asyncio.get_running_loop()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left behind: {left}"
            timers = [timer for timer in loop._scheduled if not timer.cancelled()]
            assert not timers, f"timers left behind: {timers}"

    @functools.wraps(work)
    def run(**arguments: Any) -> None:
        problems: list[dict[str, Any]] = []
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
            runner.run(checked(**arguments))
        assert not problems, problems

    return run


class Recorder:
    """A receiver that keeps what a pipe gives it, and the bytes of chunks if it wants them."""

    def __init__(self, pipe: Any = None, *, wants: bool = True) -> None:
        self.got: list[Message] = []
        self.chunks: list[tuple[int, bytes]] = []
        self.bytes: dict[tuple[int, str], bytearray] = {}
        self.reasons: list[str] = []
        self.gone = asyncio.Event()
        self.place = bytearray()
        self._wants = wants
        self._news = asyncio.Event()
        if pipe is not None:
            pipe.open(self)

    def room(self, chunk: msg.Chunk, size: int) -> memoryview | None:
        self.place = bytearray(size)
        return memoryview(self.place) if self._wants else None

    def received(self, message: Message, size: int) -> None:
        if isinstance(message, msg.Chunk):
            data = bytes(self.place[:size])
            self.chunks.append((message.offset, data))
            self.bytes.setdefault((message.transfer, message.receiver), bytearray()).extend(data)
        else:
            assert size == 0
        self.got.append(message)
        self._news.set()

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self.gone.set()
        self._news.set()

    async def until(self, count: int) -> list[Message]:
        """Wait for this number of messages; return all."""
        while len(self.got) < count:
            self._news.clear()
            await self._news.wait()
        return self.got

    async def end(self) -> str:
        """Wait for the end of the connection; return its reason."""
        await self.gone.wait()
        return self.reasons[0]


class Hand(Recorder):
    """An end of a pipe that is played by hand."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.pipe = pipe

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.pipe.send(message)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.got if isinstance(message, kind)]

    async def next(self, kind: type[M], number: int = 0) -> M:
        """The message of a kind with this number, when it has come."""
        while len(found := self.all(kind)) <= number:
            assert not self.gone.is_set(), f"it ended without {kind.__name__}: {self.got}"
            self._news.clear()
            await self._news.wait()
        return found[number]

    async def close(self) -> None:
        self.pipe.abort()
        await self.pipe.wait_closed()


def supplied_with(
    ends: Callable[[], contextlib.AbstractAsyncContextManager[tuple[Any, ...]]], *names: str
) -> Decorator:
    """A test on virtual time that gets those of the ends which it names as arguments."""

    def decorate(work: Work) -> Callable[..., None]:
        signature = inspect.signature(work)
        parameters = signature.parameters

        async def supplied(**arguments: Any) -> None:
            async with ends() as found:
                given = {name: end for name, end in zip(names, found, strict=True) if name in parameters}
                await work(**arguments, **given)

        run: Any = functools.update_wrapper(on_virtual_time(supplied), work)
        others = [parameter for name, parameter in parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=others)
        return run  # type: ignore[no-any-return]

    return decorate


class CountingCodec(PlainCodec):
    """Tells how often values were encoded and decoded."""

    def __init__(self) -> None:
        self.encoded = 0
        self.decoded = 0

    def encode(self, value: Any) -> Any:
        self.encoded += 1
        return super().encode(value)

    def decode(self, encoded: Any) -> Any:
        self.decoded += 1
        return super().decode(encoded)
