"""Both ends of an exchange in one process: real ones, and ones that are played by hand."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, TypeVar
from unittest import mock

from dfm_async.exchange import AgentOptions, ExecutorOptions, FlareAgent, LauncherExecutor, PlainCodec, Task, greeting
from dfm_async.exchange import messages as msg
from dfm_async.exchange.bootstrap import read_bootstrap
from dfm_async.exchange.gate import connect
from dfm_async.exchange.messages import Message
from dfm_async.exchange.pipes.base import Receiver, stamp_of
from dfm_async.exchange.pipes.memory import memory_pair
from tests.exchange.virtual import virtual

M = TypeVar("M", bound=Message)

ANY = ExecutorOptions(other_tasks=("*",))
"""All names of tasks are taken."""


def on_virtual_time(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test whose waits take no time: its loop jumps to the next timer."""

    @functools.wraps(work)
    def run(**arguments: Any) -> None:
        virtual(work(**arguments))  # type: ignore[arg-type]

    return run


class Hand:
    """An end of a pipe that is played by hand: keeps what comes, says what it is told to."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.got: list[Message] = []
        self.bytes: dict[tuple[int, str], bytearray] = {}
        self.lost_by: list[str] = []
        self.gone = asyncio.Event()
        self._room = bytearray()
        self._news = asyncio.Event()
        pipe.open(self)

    def room(self, chunk: msg.Chunk, size: int) -> memoryview | None:
        self._room = bytearray(size)
        return memoryview(self._room)

    def received(self, message: Message, size: int) -> None:
        if isinstance(message, msg.Chunk):
            self.bytes.setdefault((message.transfer, message.receiver), bytearray()).extend(self._room)
        self.got.append(message)
        self._news.set()

    def lost(self, reason: str) -> None:
        self.lost_by.append(reason)
        self.gone.set()
        self._news.set()

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


def offer(number: int = 1, value: Any = None, **rest: Any) -> msg.TaskOffer:
    """A task without large parts, as a site sends it."""
    fields = {"name": "train", "data": PlainCodec().encode(value).data, "parts": [], "receivers": ["site"]}
    return msg.TaskOffer(f"t{number}", **{**fields, **rest})


@contextlib.asynccontextmanager
async def agent_by_hand(options: AgentOptions | None = None, **rest: Any) -> AsyncIterator[tuple[FlareAgent, Hand]]:
    """A real agent, and a site that is played by hand."""
    ours, theirs = memory_pair()
    agent = FlareAgent(options=options, pipe=lambda: ours, **rest)
    await agent.start()
    hand = Hand(theirs)
    try:
        yield agent, hand
    finally:
        await agent.close()
        await hand.close()


async def program_by_hand(executor: LauncherExecutor) -> Hand:
    """A program that is played by hand, and has attached to a real executor."""
    bootstrap = read_bootstrap(executor.bootstrap())
    hand = Hand(await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token)))
    hand.say(msg.Hello(msg.VERSION, bootstrap.token, bootstrap.session, 1))
    await hand.next(msg.Welcome)
    return hand


class Meddler:
    """Between an agent and its pipe: drops messages, or everything."""

    can_resend = True
    shows_progress = True
    has_metrics = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sent: list[Message] = []
        self.keeps_out: Callable[[Message], bool] = lambda message: False
        self.keeps_in: Callable[[Message], bool] = lambda message: False

    def open(self, receiver: Receiver) -> None:
        self.inner.open(_Sieve(self, receiver))

    def send(self, message: Message, data: memoryview | None = None) -> None:
        self.sent.append(message)
        if not self.keeps_out(message):
            self.inner.send(message, data)

    def stop(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self.keeps_out = self.keeps_in = lambda message: True

    async def drain(self) -> None:
        await self.inner.drain()

    def close(self) -> None:
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()

    async def wait_closed(self) -> None:
        await self.inner.wait_closed()


class _Sieve:
    def __init__(self, meddler: Meddler, receiver: Receiver) -> None:
        self._meddler = meddler
        self._receiver = receiver

    def room(self, chunk: msg.Chunk, size: int) -> memoryview | None:
        return None if self._meddler.keeps_in(chunk) else self._receiver.room(chunk, size)

    def received(self, message: Message, size: int) -> None:
        if not self._meddler.keeps_in(message):
            self._receiver.received(message, size)

    def lost(self, reason: str) -> None:
        self._receiver.lost(reason)


def first(count: int, kind: type[Message]) -> Callable[[Message], bool]:
    """Keeps back the first messages of a kind."""
    left = [count]

    def keeps(message: Message) -> bool:
        if isinstance(message, kind) and left[0]:
            left[0] -= 1
            return True
        return False

    return keeps


async def attach(
    executor: LauncherExecutor, options: AgentOptions | None = None, **rest: Any
) -> tuple[FlareAgent, Meddler]:
    """Starts an agent that has attached to an executor; what passes can be meddled with."""
    meddlers: list[Meddler] = []

    async def meddled(*arguments: Any) -> Meddler:
        meddlers.append(Meddler(await connect(*arguments)))
        return meddlers[-1]

    agent = FlareAgent(executor.bootstrap(), options, **rest)
    with mock.patch.object(greeting, "connect", meddled):
        await agent.start()
    return agent, meddlers[0]


@contextlib.asynccontextmanager
async def attached(
    site: ExecutorOptions = ANY,
    program: AgentOptions | None = None,
    *,
    transport: Literal["unix", "tcp", "memory"] = "memory",
    codec: Any = None,
    agent: dict[str, Any] | None = None,
    **rest: Any,
) -> AsyncIterator[tuple[LauncherExecutor, FlareAgent, Meddler]]:
    """An executor and an agent that is attached to it."""
    async with LauncherExecutor(None, site, transport=transport, codec=codec, **rest) as executor:
        found, meddler = await attach(executor, program, codec=codec, **(agent or {}))
        try:
            yield executor, found, meddler
        finally:
            await found.close()


async def echo(agent: FlareAgent) -> list[Task]:
    """Answers every task with its data, until the end."""
    done = []
    async for task in agent:
        await agent.submit_result(task.data)
        done.append(task)
    return done


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
