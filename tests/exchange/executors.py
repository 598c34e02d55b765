"""Real executors, with real agents or with programs that are played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal
from unittest import mock

import numpy as np

from dfm_async.errors import AgentClosed, ResultNotDelivered
from dfm_async.exchange import (
    AgentOptions,
    ExecutorOptions,
    FlareAgent,
    LauncherExecutor,
    PlainCodec,
    Task,
    TaskResult,
    handshake,
)
from dfm_async.exchange import program_messages as msg
from dfm_async.exchange.bootstrap import read_bootstrap, stamp_of
from dfm_async.exchange.connection import Receiver
from dfm_async.exchange.handshake import connect
from dfm_async.exchange.program_connection import OfferedResult
from dfm_async.exchange.program_messages import Message
from tests.exchange.rig import Decorator, Hand, supplied_with

ANY = ExecutorOptions(other_tasks=("*",))
"""All names of tasks are taken."""
LARGE = np.arange(300_000, dtype=np.int64)
"""An array of several chunks."""
NOTHING = PlainCodec().encode(None).data


def with_executor(*arguments: Any, **rest: Any) -> Decorator:
    """A test on virtual time with a real ``executor``, and a program that is played by ``hand``."""
    return supplied_with(lambda: by_hand(*arguments, **rest), "executor", "hand")


def with_pair(*arguments: Any, **rest: Any) -> Decorator:
    """A test on virtual time with an ``executor``, its ``agent``, and the ``meddler`` between them."""
    return supplied_with(lambda: attached(*arguments, **rest), "executor", "agent", "meddler")


def with_program(*arguments: Any, **rest: Any) -> Decorator:
    """The same, with an agent that works until its end."""
    return supplied_with(lambda: serving(*arguments, **rest), "executor", "agent", "meddler")


def with_no_program() -> Decorator:
    """A test on virtual time with an ``executor`` that programs can attach to."""

    @contextlib.asynccontextmanager
    async def alone() -> AsyncIterator[tuple[LauncherExecutor]]:
        async with LauncherExecutor(None, ANY, transport="memory") as executor:
            yield (executor,)

    return supplied_with(alone, "executor")


async def program_by_hand(executor: LauncherExecutor) -> Hand:
    """A program that is played by hand, and has attached to a real executor."""
    bootstrap = read_bootstrap(executor.bootstrap())
    hand = Hand(await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token)))
    hand.say(msg.Hello(msg.VERSION, bootstrap.token, bootstrap.session, 1))
    await hand.next(msg.Welcome)
    return hand


class Meddler:
    """Between an agent and its pipe: drops messages, or everything."""

    silence = 0.0

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.traits = inner.traits
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
        """Drop everything from now on, silently."""
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
    with mock.patch.object(handshake, "connect", meddled):
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


@contextlib.asynccontextmanager
async def by_hand(options: ExecutorOptions = ANY, **rest: Any) -> AsyncIterator[tuple[LauncherExecutor, Hand]]:
    """A real executor, and a program that is played by hand."""
    async with LauncherExecutor(None, options, transport="memory", **rest) as executor:
        hand = await program_by_hand(executor)
        try:
            yield executor, hand
        finally:
            await hand.close()


@contextlib.asynccontextmanager
async def serving(
    options: ExecutorOptions = ANY,
    work: Callable[[FlareAgent], Awaitable[Any]] = echo,
    **rest: Any,
) -> AsyncIterator[tuple[LauncherExecutor, FlareAgent, Meddler]]:
    """A real executor, and an agent that works until its end."""
    async with attached(options, **rest) as (executor, agent, meddler):
        working = asyncio.ensure_future(_ended(agent, work(agent)))
        try:
            yield executor, agent, meddler
        finally:
            await executor.finalize()
            await asyncio.wait({working})
            if (error := working.exception()) is not None and not isinstance(error, (AgentClosed, ResultNotDelivered)):
                raise error


async def _ended(agent: FlareAgent, work: Awaitable[Any]) -> None:
    try:
        await work
    finally:
        await agent.close()


def answering(*results: Any) -> Callable[[FlareAgent], Awaitable[None]]:
    """A program that gives these results, one after the other."""

    async def work(agent: FlareAgent) -> None:
        left = iter(results)
        async for _ in agent:
            with contextlib.suppress(ResultNotDelivered):
                await agent.submit_result(next(left))

    return work


async def begin_task(
    executor: LauncherExecutor, hand: Hand, data: Any = None, number: int = 0, **rest: Any
) -> tuple[asyncio.Task[TaskResult], msg.TaskOffer]:
    """The execution of a task that has been offered to the program."""
    running = asyncio.ensure_future(executor.execute(Task("any", data), **rest))
    return running, await hand.next(msg.TaskOffer, number)


async def offer_result(
    executor: LauncherExecutor, agent: FlareAgent, receivers: list[str], result: Any
) -> tuple[OfferedResult, asyncio.Future[None]]:
    """A result that several receivers can pull, and the call that submits it."""
    offering = asyncio.ensure_future(executor.offer(Task("any"), receivers))
    await agent.get_task()
    submitting = asyncio.ensure_future(agent.submit_result(result))
    return await offering, submitting


def result_of(task: msg.TaskOffer, *parts: tuple[int, int], result: str = "r1") -> msg.ResultOffer:
    """The result of a task, as a program sends it."""
    return msg.ResultOffer(task.task, result, "OK", NOTHING, list(parts))
