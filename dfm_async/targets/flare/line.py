"""The application's way to the hub: through the gateway of its homesite, else by short app commands."""

from __future__ import annotations

import asyncio
import base64
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

from dfm_async.errors import FlareError
from dfm_async.targets.flare.admin import Admin
from dfm_async.targets.flare.duplex import Duplex
from dfm_async.targets.flare.gateway import Frames, prove, split_address
from dfm_async.targets.flare.messages import Attach, Attached, decode_attached, encode

__all__ = ["CarrierEnded", "CommandLine", "GatewayLine", "Line"]

_WAIT: Final = 0.1
"""How long a command waits at the hub for something to say; FLARE serves one command at a time."""
_REST: Final = 20.0
"""While nothing is expected, a command this often tells the hub that we are there."""
_COMMAND: Final = 30.0
"""For how many seconds one command may take."""
_ENDED: Final = ("JobNotFound", "JobNotRunning", "JobDone", "InvalidJob")
"""What FLARE says of a job that does not run."""
_FINAL: Final = ("AuthorizationError", "AuthenticationError", "NoClientsAvailable")
"""What begins so does not become better when it is tried again."""


class CarrierEnded(FlareError):
    """The carrier does not run any more, or not yet."""


def _why_ended(why: str) -> str:
    if "BYOC" in why:
        return "The user must have the right to bring code (byoc), and the sites must allow it; or bring none"
    return "Look at the logs of the server and of the sites that it names"


class Line(Protocol):
    """Carries what the duplex has to say, and what comes for it."""

    @property
    def kind(self) -> Literal["gateway", "commands"]:
        """How it works."""
        ...

    async def open(self, attach: Attach) -> Attached:
        """Connects to the hub.

        Raises:
            FlareError: the hub cannot be reached this way.
        """
        ...

    def expect(self, *, busy: bool) -> None:
        """Says whether the hub will have something to say."""
        ...

    async def close(self, *, at_once: bool) -> None:
        """Ends it; unless at once, when everything is said."""
        ...


class GatewayLine:
    """A connection to the gateway on this machine.

    Args:
        address: where it is, and its secret.
        duplex: what is said.
        on_lost: is told once that it has ended, and why, if nobody has closed it.
    """

    kind: Final = "gateway"

    def __init__(self, address: str, duplex: Duplex, on_lost: Callable[[Line, FlareError], None]) -> None:
        self.address = address
        self._duplex = duplex
        self._on_lost = on_lost
        self._closing = False
        self._ended = asyncio.Event()
        self._frames = Frames(self._first, self._lost)
        self._answer: asyncio.Future[bytes] | None = None
        self._early: list[bytes] = []

    async def open(self, attach: Attach) -> Attached:
        """Connects.

        Raises:
            FlareError: nobody is there who knows the secret: the homesite's client is on another machine, or in
                another container, or has ended.
        """
        try:
            await self._connect()
        except (OSError, ValueError, EOFError) as error:
            self._closing = True
            self._frames.abort()
            raise FlareError(f"the gateway cannot be reached: {error or type(error).__name__}", "") from error
        except BaseException:
            self._closing = True
            self._frames.abort()
            raise
        try:
            attached = decode_attached(await self._ask(encode(attach)))
        except (EOFError, ValueError) as error:
            raise FlareError(f"the hub has not answered through the gateway: {error}", "") from error
        if not attached.refused:
            self._duplex.attach(self._frames.send, attached.have)
            self._frames.on_frame = self._take
            for data in self._early:
                self._take(data)
        return attached

    async def _connect(self) -> None:
        name, secret = split_address(self.address)
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(connection, name)
            await loop.create_unix_connection(lambda: self._frames, sock=connection)
        except BaseException:
            connection.close()
            raise
        challenge = secrets.token_bytes(16)
        answer = await self._ask(challenge)
        if not hmac.compare_digest(answer[:32], prove(secret, b"gateway", challenge)):
            raise ValueError("whoever listens there does not know its secret")
        self._frames.send(prove(secret, b"application", answer[32:]))

    async def _ask(self, data: bytes) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        self._frames.on_frame = self._first
        self._frames.send(data)
        if not self._frames.connected:
            raise EOFError("the connection was closed")
        return await self._answer

    def _first(self, data: bytes) -> None:
        self._frames.on_frame = self._early.append  # it may come in the same breath
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(data)

    def _take(self, data: bytes) -> None:
        try:
            self._duplex.take(data)
        except ValueError as error:
            self._fail(FlareError(f"what came through the gateway cannot be read: {error}", ""))

    def _fail(self, error: FlareError) -> None:
        if not self._closing:
            self._closing = True
            self._frames.abort()
            self._on_lost(self, error)

    def expect(self, *, busy: bool) -> None:
        """Makes no difference: messages come by themselves."""

    def _lost(self) -> None:
        self._ended.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EOFError("the connection was closed"))
        else:
            self._fail(FlareError("the gateway of the homesite has ended", ""))

    async def close(self, *, at_once: bool) -> None:
        """Ends the connection; unless at once, when everything is written."""
        self._closing = True
        if at_once:
            self._frames.abort()
        else:
            await asyncio.sleep(0)  # what was said in this turn of the loop
            self._frames.close()
        if self._frames.connected:
            await self._ended.wait()


class CommandLine:
    """Commands to the hub, one at a time: each takes our messages along, and brings back those of the hub.

    While something is expected a command follows the other at once, and waits at the hub for a tenth of a second: it
    is the hub's answer that says when to ask again, not a clock of ours.

    Args:
        admin: sends commands.
        carrier: the FLARE job.
        duplex: what is said.
        on_lost: is told once that the hub does not answer any more, and why.
        patience: for how many seconds a command is sent again.
        ran: whether the carrier has run before: then one that does not run has ended, and is not about to start.
    """

    kind: Final = "commands"

    def __init__(
        self,
        admin: Admin,
        carrier: str,
        duplex: Duplex,
        on_lost: Callable[[Line, FlareError], None],
        patience: float,
        *,
        ran: bool,
    ) -> None:
        self._ran = ran
        self._admin = admin
        self._carrier = carrier
        self._duplex = duplex
        self._on_lost = on_lost
        self._patience = patience
        self._session = ""
        self._wake = asyncio.Event()
        self._busy = True
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self, attach: Attach) -> Attached:
        """Sends the first command.

        Raises:
            CarrierEnded: FLARE says that the carrier does not run, and goes on saying so.
            FlareError: the hub has not answered in time.
        """
        self._session = attach.session
        answer = await self._deliver({"attach": base64.b64encode(encode(attach)).decode()})
        self._ran = True
        attached = decode_attached(base64.b64decode(answer["attached"]))
        if not attached.refused:
            self._duplex.answer_by(self._wake.set)
            self._duplex.release(attached.have)
            self._task = asyncio.get_running_loop().create_task(self._run(), name="app commands")
        return attached

    def expect(self, *, busy: bool) -> None:
        """Says whether the hub will have something to say."""
        self._busy = busy
        if busy:
            self._wake.set()

    async def _run(self) -> None:
        more = False
        try:
            while not (self._closing and not self._duplex.waiting):
                if not (self._duplex.waiting or self._busy or more or self._closing):
                    await self._rest()
                more = await self._command()
        except FlareError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody hears the hub any more
            self._lose(FlareError(f"app commands have ended: {type(error).__name__}: {error}", ""))

    def _lose(self, error: FlareError) -> None:
        if not self._closing:
            self._closing = True
            self._on_lost(self, error)

    async def _rest(self) -> None:
        """Waits until there is something to say, or it is time to say that we are there."""
        self._wake.clear()
        try:
            async with asyncio.timeout(_REST):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _command(self) -> bool:
        packet = base64.b64encode(self._duplex.pull()).decode()
        wait = _WAIT if self._busy and not self._closing else 0.0
        answer = await self._deliver({"packet": packet, "wait": wait})
        if answer.get("gone"):
            raise FlareError("the hub does not know this application any more", "Connect again")
        try:
            self._duplex.take(base64.b64decode(answer["packet"]))
        except (KeyError, ValueError) as error:
            raise FlareError(f"the hub's answer cannot be read: {error}", "") from error
        return bool(answer.get("more"))

    async def _deliver(self, data: dict[str, Any]) -> dict[str, Any]:
        """Sends one command until it is answered."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        pause = 0.05
        while True:
            try:
                answer = await self._admin.command(self._carrier, {"session": self._session, **data}, _COMMAND)
                reason = "the hub is still starting"
            except FlareError as error:
                if self._closing or error.problem.startswith(_FINAL):
                    raise
                answer, reason = None, error.problem
            if isinstance(answer, dict) and "ended" in answer:
                raise CarrierEnded(f"the carrier has ended: {answer['ended']}", "")
            if isinstance(answer, dict) and not answer.get("starting"):
                return answer
            if self._ran and reason.startswith(_ENDED):
                raise CarrierEnded(f"the carrier has ended: {reason}", "Connect again")
            if reason.startswith(_ENDED) and (why := await self._admin.ended(self._carrier)):
                raise CarrierEnded(f"FLARE does not run the carrier of the jobs: {why}", _why_ended(why))
            if self._admin.lost or loop.time() - began + pause > self._patience:
                told = f"the hub has not answered for {loop.time() - began:.1f} s: {reason}"
                kind = CarrierEnded if reason.startswith(_ENDED) else FlareError
                raise kind(told, "Connect again")
            await asyncio.sleep(pause)  # it failed just now: at once it would fail again
            pause = min(pause * 2, 0.4)

    async def close(self, *, at_once: bool) -> None:
        """Ends it; unless at once, when everything is said."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            if at_once:
                self._task.cancel()
            await asyncio.wait([self._task])
