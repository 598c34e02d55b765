"""The application's way to the hub: through the gateway of its homesite, else by short app commands."""

from __future__ import annotations

import asyncio
import base64
import secrets
import socket
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

from dfm_async.errors import FlareError
from dfm_async.targets.flare.admin import Admin
from dfm_async.targets.flare.gateway import Frames, split_address

__all__ = ["CommandLine", "GatewayLine", "Line"]

_WAIT: Final = 0.1
"""How long a command waits at the hub for something to say; FLARE serves one command at a time."""
_REST: Final = 20.0
"""While nothing is expected, a command this often tells the hub that we are there."""
_BATCH: Final = 4 * 1024 * 1024
_UNKNOWN: Final = "the hub does not know this application any more"
_FINAL: Final = (_UNKNOWN, "AuthorizationError", "AuthenticationError", "JobNotFound")
"""What begins so does not become better when it is tried again."""


class Line(Protocol):
    """Takes messages to the hub, and those of the hub to us, in order."""

    @property
    def kind(self) -> Literal["gateway", "commands"]:
        """How it works."""
        ...

    def send(self, data: bytes) -> None:
        """Sends a message."""
        ...

    def expect(self, *, busy: bool) -> None:
        """Says whether the hub will have something to say."""
        ...

    async def close(self) -> None:
        """Ends it, when everything is sent."""
        ...


class GatewayLine:
    """A connection to the gateway on this machine."""

    kind: Final = "gateway"

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[FlareError], None]) -> None:
        self._on_lost = on_lost
        self._closing = False
        self._ended = asyncio.Event()
        self._frames = Frames(on_message, self._lost)

    async def open(self, address: str) -> None:
        """Connects.

        Raises:
            OSError: nobody is there: the homesite's client is on another machine, or in another container.
        """
        name, secret = split_address(address)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(connection, name)
            await asyncio.get_running_loop().create_unix_connection(lambda: self._frames, sock=connection)
        except BaseException:
            connection.close()
            raise
        self._frames.send(secret)

    def send(self, data: bytes) -> None:
        """Sends a message."""
        self._frames.send(data)

    def expect(self, *, busy: bool) -> None:
        """Makes no difference: messages come by themselves."""

    def _lost(self) -> None:
        self._ended.set()
        if not self._closing:
            self._on_lost(FlareError("the gateway of the homesite has ended", ""))

    async def close(self) -> None:
        """Ends the connection, when everything is written."""
        self._closing = True
        self._frames.close()
        if not self._frames.lost:
            await self._ended.wait()


class CommandLine:
    """Commands to the hub, one at a time: each takes our messages along, and brings back those of the hub.

    While something is expected a command follows the other at once, and waits at the hub for a tenth of a second: it
    is the hub's answer that says when to ask again, not a clock of ours.
    """

    kind: Final = "commands"

    def __init__(
        self,
        admin: Admin,
        carrier: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[FlareError], None],
        patience: float,
    ) -> None:
        self._admin = admin
        self._carrier = carrier
        self._on_message = on_message
        self._on_lost = on_lost
        self._patience = patience
        self._app = secrets.token_hex(8)
        self._number = 0
        self._waiting: list[bytes] = []
        self._wake = asyncio.Event()
        self._busy = False
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def open(self) -> None:
        """Begins to send commands."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="app commands")

    def send(self, data: bytes) -> None:
        """Sends a message."""
        self._waiting.append(data)
        self._wake.set()

    def expect(self, *, busy: bool) -> None:
        """Says whether the hub will have something to say."""
        self._busy = busy
        if busy:
            self._wake.set()

    async def _run(self) -> None:
        more = False
        try:
            while not (self._closing and not self._waiting):
                if not (self._waiting or self._busy or more):
                    self._wake.clear()
                    try:
                        async with asyncio.timeout(_REST):
                            await self._wake.wait()
                    except TimeoutError:
                        pass  # time to say that we are there
                    if self._closing and not self._waiting:
                        return
                more = await self._command()
        except FlareError as error:
            if not self._closing:
                self._on_lost(error)

    async def _command(self) -> bool:
        batch = self._next_batch()
        self._number += 1
        wait = 0.0 if self._waiting or self._closing else _WAIT
        data = {
            "app": self._app,
            "number": self._number,
            "messages": [base64.b64encode(part).decode() for part in batch],
            "wait": wait,
        }
        answer = await self._deliver(data)
        for part in answer.get("messages", ()):
            self._on_message(base64.b64decode(part))
        return bool(answer.get("more"))

    async def _deliver(self, data: dict[str, Any]) -> dict[str, Any]:
        """Sends one command until it is answered; the hub knows it by its number."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        pause = 0.05
        while True:
            try:
                answer = await self._admin.command(self._carrier, data)
                reason = "the hub is still starting"
                if isinstance(answer, dict) and not answer.get("starting"):
                    return _known(answer)
            except FlareError as error:
                if self._closing or error.problem.startswith(_FINAL):
                    raise
                reason = error.problem
            if loop.time() - began + pause > self._patience:
                raise FlareError(f"the hub has not answered for {self._patience:g} s: {reason}", "Connect again")
            await asyncio.sleep(pause)  # it failed just now: at once it would fail again
            pause = min(pause * 2, 1.0)

    def _next_batch(self) -> list[bytes]:
        batch: list[bytes] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0]) <= _BATCH):
            batch.append(self._waiting.pop(0))
            size += len(batch[-1])
        return batch

    async def close(self) -> None:
        """Sends what waits, and ends it."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])


def _known(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("gone"):
        raise FlareError(_UNKNOWN, "Connect again")
    return answer
