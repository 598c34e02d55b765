"""A program's hello, and the site's answer to it."""

from __future__ import annotations

import asyncio
import os

from dfm_async.errors import HandshakeRefused
from dfm_async.exchange import messages as msg
from dfm_async.exchange.bootstrap import Bootstrap
from dfm_async.exchange.gate import connect
from dfm_async.exchange.pipes.base import Pipe, stamp_of

__all__ = ["Greeting", "greet"]


class Greeting:
    """Waits for the answer to a hello. The first task may come with it, in the same breath: it is kept.

    Attributes:
        early: what came right behind the answer.
    """

    def __init__(self) -> None:
        self.early: list[msg.Message] = []
        self.welcome: asyncio.Future[msg.Welcome] = asyncio.get_running_loop().create_future()

    def room(self, chunk: msg.Chunk, size: int) -> memoryview | None:
        """Nothing is pulled yet."""
        del chunk, size
        return None

    def received(self, message: msg.Message, size: int) -> None:
        """Takes the answer, or what comes behind it."""
        del size
        if self.welcome.done():
            self.early.append(message)
        elif isinstance(message, msg.Welcome):
            self.welcome.set_result(message)
        else:
            reason = message.reason if isinstance(message, msg.Refused) else "it answered with something else"
            self.welcome.set_exception(HandshakeRefused(reason))

    def lost(self, reason: str) -> None:
        """The connection has ended."""
        if not self.welcome.done():
            self.welcome.set_exception(HandshakeRefused(reason))


async def greet(bootstrap: Bootstrap, limit: float, silence: float) -> tuple[Pipe, msg.Welcome, list[msg.Message]]:
    """Connects to a site, and says hello.

    Args:
        bootstrap: how to find it.
        limit: how long it may take to answer, in seconds.
        silence: how long we accept that it says nothing, in seconds; 0 means for ever.

    Returns:
        The connection, the answer, and what came right behind it.

    Raises:
        HandshakeRefused: the site does not want this program, or cannot be found.
        TimeoutError: it did not answer in time.
    """
    greeting = Greeting()
    pipe: Pipe | None = None
    try:
        async with asyncio.timeout(limit) as scope:
            pipe = await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token))
            pipe.open(greeting)
            pipe.send(msg.Hello(msg.VERSION, bootstrap.token, bootstrap.session, os.getpid(), silence))
            welcome = await greeting.welcome
    except BaseException as error:
        if pipe is not None:
            pipe.abort()
            await pipe.wait_closed()
        if isinstance(error, TimeoutError) and scope.expired():
            raise TimeoutError(f"the site did not answer the hello within {limit:g} s") from error
        if isinstance(error, OSError):
            raise HandshakeRefused(f"nobody listens where the site was: {error}") from error
        raise
    pipe.silence = welcome.silence
    return pipe, welcome, greeting.early
