"""The handshake of a program and its site, the same on every transport of ours: hello, and welcome or refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dfm_async.base.signals import Outcome
from dfm_async.errors import HandshakeRefused
from dfm_async.exchange.bootstrap import VARIABLE, Address, Bootstrap, new_token, stamp_of, write_bootstrap
from dfm_async.exchange.connection import Listener, Pipe, Receiver
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.program_messages import VERSION, Hello, Message, Refused, Welcome
from dfm_async.exchange.transports import TRANSPORTS, Invitation, load

_HELLO_TIMEOUT: Final = 10.0
"""How long a connection may be open without a hello, in seconds."""
_PENDING: Final = 64
"""How many connections may be open without a hello."""


class HandshakeTransport:
    """Accepts programs that prove by a hello that the site has invited them.

    Args:
        kind: the name of the transport.
    """

    def __init__(self, kind: str = "unix") -> None:
        self.session = secrets.token_hex(8)
        self._listen = load(TRANSPORTS[kind].listen)
        self._site = ""
        self._job = ""
        self._silence = 0.0
        self._listener: Listener | None = None
        self._expected: tuple[str, Callable[[Pipe], None]] | None = None
        self._used: str | None = None
        self._file: Path | None = None
        self._pending: dict[_PendingConnection, None] = {}

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Begin to listen."""
        self._silence = options.heartbeat_timeout
        if self._listener is None:
            self._site, self._job = site, job
            self._listener = await self._listen(self.session, self._connected)

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Expect a program, and no other any longer."""
        return Invitation({VARIABLE: str(self.invite(on_up, launch_once=launch_once))})

    def invite(
        self, on_up: Callable[[Pipe], None], *, launch_once: bool, path: str | os.PathLike[str] | None = None
    ) -> Path:
        """Expect a program that somebody else starts; return the file that it must be given."""
        if self._listener is None:
            raise RuntimeError("the transport is not open: LauncherExecutor opens it in 'async with'")
        self.forget()
        bootstrap = Bootstrap(
            address=self._listener.address,
            token=new_token(),
            session=self.session,
            site=self._site,
            job=self._job,
            launch_once=launch_once,
        )
        self._file = write_bootstrap(bootstrap, path)
        self._expected = (bootstrap.token, on_up)
        return self._file

    def forget(self) -> None:
        """Expect no program: one that comes now is refused."""
        self._expected = None
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
            self._file = None

    def _connected(self, pipe: Pipe) -> None:
        if len(self._pending) >= _PENDING:
            # The one that has been silent for the longest time: else those that say nothing keep programs out.
            next(iter(self._pending)).refuse("no handshake was received, and too many connections are pending")
        pending = _PendingConnection(self, pipe)
        self._pending[pending] = None
        pipe.open(pending)
        if self._listener is None:  # it connected while the transport was closed
            pending.refuse("the site is ending")

    def no_longer_pending(self, connection: _PendingConnection) -> None:
        """Take note that a connection was accepted or refused, or has ended."""
        self._pending.pop(connection, None)

    def admit(self, pipe: Pipe, hello: Hello) -> str:
        """Accept a program. Return why not otherwise."""
        if hello.version != VERSION:
            return f"it speaks version {hello.version} of the protocol, the site version {VERSION}"
        if hello.session != self.session:
            return "it belongs to another session"
        if self._expected is None or not secrets.compare_digest(hello.token.encode(), self._expected[0].encode()):
            if self._used is not None and secrets.compare_digest(hello.token.encode(), self._used.encode()):
                return "its token was used already"
            return "it is not expected"
        token, on_up = self._expected
        self._used = token
        self.forget()
        pipe.stamp = stamp_of(self.session, token)
        pipe.silence = max(0.0, hello.silence)
        on_up(pipe)
        pipe.send(Welcome(self._site, self._job, self._silence))
        return ""

    async def close(self) -> None:
        """Stop listening, and remove all files."""
        self.forget()
        listener, self._listener = self._listener, None
        for connection in list(self._pending):
            connection.refuse("the site is ending")
        if listener is not None:
            listener.close()


class _PendingConnection(Receiver):
    """A connection without a hello."""

    def __init__(self, transport: HandshakeTransport, pipe: Pipe) -> None:
        self._transport = transport
        self._pipe = pipe
        self._decided = False
        self._timer = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT, self.refuse, "no handshake was received")

    def received(self, message: Message, size: int) -> None:
        del size
        if not isinstance(message, Hello):
            self.refuse("the first message was not a handshake")
        elif self._decide() and (problem := self._transport.admit(self._pipe, message)):
            self._refuse(problem)

    def lost(self, reason: str) -> None:
        del reason
        self._decide()

    def refuse(self, reason: str) -> None:
        if self._decide():
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._pipe.send(Refused(reason))
        self._pipe.close()

    def _decide(self) -> bool:
        """Return whether nothing was decided before."""
        first, self._decided = not self._decided, True
        self._timer.cancel()
        self._transport.no_longer_pending(self)
        return first


class _WelcomeReceiver(Receiver):
    """Waits for the answer to a hello. The first task may come right behind it: it is kept."""

    def __init__(self) -> None:
        self.early: list[Message] = []
        self.welcome: Outcome[Welcome] = Outcome()

    def received(self, message: Message, size: int) -> None:
        del size
        if self.welcome.done():
            self.early.append(message)
        elif isinstance(message, Welcome):
            self.welcome.settle(message)
        else:
            self.lost(message.reason if isinstance(message, Refused) else "unexpected answer to the handshake")

    def lost(self, reason: str) -> None:
        self.welcome.fail(HandshakeRefused(reason))


async def connect(address: Address, stamp: int) -> Pipe:
    """Connect to a site.

    Raises:
        HandshakeRefused: there is no such transport here.
        OSError: no site listens there.
    """
    row = TRANSPORTS.get(address.kind)
    if row is None or not row.connect:
        raise HandshakeRefused(f"this program has no transport {address.kind!r}")
    found: Pipe = await load(row.connect)(address, stamp)
    return found


async def perform_handshake(bootstrap: Bootstrap, limit: float, silence: float) -> tuple[Pipe, Welcome, list[Message]]:
    """Connect to a site, and perform the handshake.

    Args:
        bootstrap: how to find it.
        limit: how long it may take to answer, in seconds.
        silence: how long the program accepts that it sends nothing, in seconds; 0 means for ever.

    Returns:
        The connection, the answer, and what came right behind it.

    Raises:
        HandshakeRefused: the site does not accept this program, or cannot be found.
        TimeoutError: it did not answer in time.
    """
    receiver = _WelcomeReceiver()
    pipe: Pipe | None = None
    try:
        async with asyncio.timeout(limit) as scope:
            pipe = await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token))
            pipe.open(receiver)
            pipe.send(Hello(VERSION, bootstrap.token, bootstrap.session, os.getpid(), silence))
            welcome = await receiver.welcome
    except BaseException as error:
        if pipe is not None:
            pipe.abort()
            await pipe.wait_closed()
        if isinstance(error, TimeoutError) and scope.expired():
            raise TimeoutError(f"the site did not answer the hello within {limit:g} s") from error
        if isinstance(error, OSError):
            raise HandshakeRefused(f"no site listens at the address in the bootstrap file: {error}") from error
        raise
    pipe.silence = welcome.silence
    return pipe, welcome, receiver.early
