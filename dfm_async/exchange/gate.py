"""The site's door: programs say hello here, and are let in or sent away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol

from dfm_async.exchange.bootstrap import VARIABLE, Address, Bootstrap, new_token, write_bootstrap
from dfm_async.exchange.launcher import Invitation
from dfm_async.exchange.messages import VERSION, Chunk, Hello, Message, Refused, Welcome
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.pipes.base import Pipe, stamp_of
from dfm_async.exchange.pipes.memory import MemoryPipe, memory_pair
from dfm_async.exchange.pipes.socket import SocketPipe
from dfm_async.wire.local_sockets import LocalListener, connect_local, same_user

__all__ = ["Gate", "SocketGate", "connect"]

_HELLO_TIMEOUT: Final = 10.0
"""How long somebody may be connected without a hello, in seconds."""
_STRANGERS: Final = 64
"""How many may be connected without a hello."""


class Gate(Protocol):
    """Lets programs in. Every launch is expected once."""

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Makes ready to be knocked at. The executor says how it waits, and what the program may know."""
        ...

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Expects a program, and no other any more; tells what it must be given."""
        ...

    def forget(self) -> None:
        """Expects nobody."""
        ...

    async def close(self) -> None:
        """Closes the door, and removes every trace of it."""
        ...


class SocketGate:
    """Listens on a Unix socket, on a TCP port of this machine, or within this process.

    Args:
        kind: which of them.
    """

    def __init__(self, kind: Literal["unix", "tcp", "memory"] = "unix") -> None:
        if kind not in ("unix", "tcp", "memory"):
            raise ValueError(f"the transport must be 'unix', 'tcp' or 'memory', not {kind!r}")
        self.session = secrets.token_hex(8)
        self._kind = kind
        self._site = ""
        self._job = ""
        self._silence = 0.0
        self._server: asyncio.Server | None = None
        self._address: Address | None = None
        self._listener: LocalListener | None = None
        self._expected: tuple[str, Callable[[Pipe], None]] | None = None
        self._used: str | None = None
        self._file: Path | None = None
        self._strangers: dict[_Stranger, None] = {}

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Begins to listen."""
        self._silence = options.heartbeat_timeout
        if self._address is not None:
            return
        self._site, self._job = site, job
        loop = asyncio.get_running_loop()
        if self._kind == "memory":
            self._address = Address(kind="memory", name=self.session)
            _places[self.session] = self
        elif self._kind == "tcp":
            self._server = await loop.create_server(self._knock, "127.0.0.1", 0)
            self._address = Address(kind="tcp", port=self._server.sockets[0].getsockname()[1])
        else:
            self._listener = LocalListener(f"dfm-async-{self.session}")
            self._server = await loop.create_unix_server(self._knock, sock=self._listener.socket)
            self._address = Address(kind="unix", name=self._listener.address.replace("\0", "@", 1))

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Expects a program, and no other any more."""
        self._file = self.invite(on_up, launch_once=launch_once)
        return Invitation({VARIABLE: str(self._file)})

    def invite(
        self, on_up: Callable[[Pipe], None], *, launch_once: bool, path: str | os.PathLike[str] | None = None
    ) -> Path:
        """The same, for a program that somebody else starts: gives the file that it must be told of."""
        if self._address is None:
            raise RuntimeError("the gate is not open")
        self.forget()
        bootstrap = Bootstrap(
            address=self._address,
            token=new_token(),
            session=self.session,
            site=self._site,
            job=self._job,
            launch_once=launch_once,
        )
        file = write_bootstrap(bootstrap, path)
        self._expected = (bootstrap.token, on_up)
        self._file = file
        return file

    def forget(self) -> None:
        """Expects nobody: a program that comes now is sent away."""
        self._expected = None
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
            self._file = None

    def _knock(self) -> SocketPipe:
        return _Visitor(self)

    def meet(self, pipe: SocketPipe | MemoryPipe) -> None:
        """Somebody has connected."""
        if len(self._strangers) >= _STRANGERS:
            # The one that has said nothing for the longest time: else those who only stand there keep programs out.
            next(iter(self._strangers)).refuse("it said no hello, and too many are waiting")
        stranger = _Stranger(self, pipe)
        self._strangers[stranger] = None
        pipe.open(stranger)
        if self._address is None:  # it connected while the gate was closed
            stranger.refuse("the site is ending")

    def left(self, stranger: _Stranger) -> None:
        """Somebody who had connected is known now, or gone."""
        self._strangers.pop(stranger, None)

    def admit(self, pipe: SocketPipe | MemoryPipe, hello: Hello) -> str:
        """Lets a program in; tells why not otherwise."""
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
        """Closes the door, and removes every trace of it."""
        self.forget()
        _places.pop(self.session, None)
        for stranger in list(self._strangers):
            stranger.refuse("the site is ending")
        if self._server is not None:
            self._server.close()  # not wait_closed(): that may wait for programs that were let in
            self._server = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._address = None


_places: Final[dict[str, SocketGate]] = {}
"""Gates within this process."""


class _Visitor(SocketPipe):
    """A connection to the gate. Other users of the machine are not even counted: they could keep programs out."""

    def __init__(self, gate: SocketGate) -> None:
        super().__init__()
        self._gate = gate

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if same_user(transport.get_extra_info("socket")):
            self._gate.meet(self)
        else:
            self.abort()


class _Stranger:
    """Somebody who has connected, and has not said hello yet."""

    def __init__(self, gate: SocketGate, pipe: SocketPipe | MemoryPipe) -> None:
        self._gate = gate
        self._pipe = pipe
        self._known = False
        self._timer = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT, self.refuse, "it said no hello")

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        del chunk, size
        return None

    def received(self, message: Message, size: int) -> None:
        del size
        if self._known:
            return
        self._leave()
        problem = self._gate.admit(self._pipe, message) if isinstance(message, Hello) else "it did not say hello first"
        if problem:
            self._pipe.send(Refused(problem))
            self._pipe.close()

    def lost(self, reason: str) -> None:
        del reason
        self._leave()

    def refuse(self, reason: str) -> None:
        if not self._known:
            self._leave()
            self._pipe.send(Refused(reason))
            self._pipe.close()

    def _leave(self) -> None:
        self._known = True
        self._timer.cancel()
        self._gate.left(self)


async def connect(address: Address, stamp: int) -> SocketPipe | MemoryPipe:
    """Connects to a gate, from the program's side.

    Raises:
        PermissionError: a process of another user listens there.
        TimeoutError: it has not accepted connections for a long time.
        OSError: nobody listens there.
    """
    loop = asyncio.get_running_loop()
    if address.kind == "memory":
        gate = _places.get(address.name)
        if gate is None:
            raise ConnectionRefusedError("the site's gate is not in this process")
        ours, theirs = memory_pair()
        gate.meet(theirs)
        return ours
    if address.kind == "tcp":
        _, pipe = await loop.create_connection(lambda: SocketPipe(stamp), "127.0.0.1", address.port)
        return pipe
    name = "\0" + address.name[1:] if address.name.startswith("@") else address.name
    return await connect_local(lambda: SocketPipe(stamp), name)
