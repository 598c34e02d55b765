"""The transports between an application and the hub: the gateway of the homesite, or short app commands."""

from __future__ import annotations

import asyncio
import base64
import hmac
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

from dfm_async.base.backoff import delays
from dfm_async.base.signals import Outcome
from dfm_async.errors import FlareError
from dfm_async.targets.flare.admin import Admin, AdminError
from dfm_async.targets.flare.gateway import Frames, prove, split_address
from dfm_async.targets.flare.protocol import Attach, Attached, decode_attached, encode
from dfm_async.targets.flare.reliable_stream import ReliableStream

_WAIT: Final = 0.1
"""The number of seconds that a command waits at the hub for messages; FLARE serves one command at a time."""
_REST: Final = 20.0
"""The interval of commands while nothing is expected, in seconds: they are heartbeats."""
_COMMAND: Final = 30.0
"""The timeout of one command, in seconds."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.4
_ENDED: Final = ("JobNotFound", "JobNotRunning", "JobDone", "InvalidJob")
"""The kinds of errors of FLARE for a job that does not run."""
_FINAL: Final = ("AuthorizationError", "AuthenticationError", "NoClientsAvailable")
"""The kinds of errors that a retry cannot mend."""


class HostJobEnded(FlareError):
    """The host job does not run any longer, or not yet."""


def _why_ended(why: str) -> str:
    if "BYOC" in why:
        return "Give the user the right to bring code (byoc) and allow it at the sites, or use code='installed'"
    return "Read the logs of the server and of the sites that it names"


class GatewayTransport:
    """A connection to the gateway on this machine.

    Args:
        address: the name of its socket, and its secret.
        stream: the messages.
        on_lost: is called once with the reason when it ends, unless it was closed.
    """

    kind: Final = "gateway"

    def __init__(self, address: str, stream: ReliableStream, on_lost: Callable[[Transport, FlareError], None]) -> None:
        self.address = address
        self._stream = stream
        self._on_lost = on_lost
        self._closing = False
        self._ended = asyncio.Event()
        self._frames = Frames(self._first, self._lost)
        self._answer: Outcome[bytes] | None = None
        self._early: list[bytes] = []

    async def open(self, attach: Attach) -> Attached:
        """Connect. Close the transport also if that fails.

        Raises:
            FlareError: nobody listens who knows the secret: the homesite's client is on another machine, or in
                another container, or has ended.
        """
        try:
            await self._connect()
        except (OSError, ValueError, EOFError) as error:
            raise FlareError(f"the gateway cannot be reached: {error or type(error).__name__}", "") from error
        try:
            attached = decode_attached(await self._ask(encode(attach)))
        except (EOFError, ValueError) as error:
            raise FlareError(f"the hub has not answered through the gateway: {error}", "") from error
        if not attached.refused:
            self._stream.attach(self._frames.send, attached.have)
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
            raise ValueError("the process that listens there does not know the secret of the gateway")
        self._frames.send(prove(secret, b"application", answer[32:]))

    async def _ask(self, data: bytes) -> bytes:
        self._answer = Outcome()
        self._frames.on_frame = self._first
        self._frames.send(data)
        if not self._frames.connected:
            raise EOFError("the gateway closed the connection")
        return await self._answer

    def _first(self, data: bytes) -> None:
        self._frames.on_frame = self._early.append  # it may arrive with the answer
        if self._answer is not None:
            self._answer.settle(data)

    def _take(self, data: bytes) -> None:
        try:
            self._stream.take(data)
        except ValueError as error:
            self._fail(FlareError(f"cannot decode a message from the gateway: {error}", ""))

    def _fail(self, error: FlareError) -> None:
        if not self._closing:
            self._closing = True
            self._frames.abort()
            self._on_lost(self, error)

    def expect(self, *, busy: bool) -> None:
        """Do nothing: messages are pushed."""

    def _lost(self) -> None:
        self._ended.set()
        if self._answer is None or not self._answer.fail(EOFError("the connection was closed")):
            self._fail(FlareError("the gateway of the homesite has ended", ""))

    async def close(self, *, at_once: bool) -> None:
        """End the connection; unless at once, when everything is written."""
        self._closing = True
        if at_once:
            self._frames.abort()
        else:
            await asyncio.sleep(0)  # what was sent in this turn of the loop
            self._frames.close()
        if self._frames.connected:
            await self._ended.wait()


class CommandTransport:
    """Sends commands to the hub, one at a time: each carries our messages, and its answer those of the hub.

    While messages are expected, one command follows another at once, and waits at the hub for a tenth of a second: the
    hub's answer, and no clock of ours, triggers the next one.

    Args:
        admin: sends commands.
        host_job: the FLARE job.
        stream: the messages.
        on_lost: is called once with the reason when the hub does not answer any longer.
        timeout: the number of seconds for which a command is retried.
        ran: whether the host job has run before: then one that does not run has ended, and is not about to start.
    """

    kind: Final = "commands"

    def __init__(
        self,
        admin: Admin,
        host_job: str,
        stream: ReliableStream,
        on_lost: Callable[[Transport, FlareError], None],
        timeout: float,
        *,
        ran: bool,
    ) -> None:
        self._ran = ran
        self._admin = admin
        self._host_job = host_job
        self._stream = stream
        self._on_lost = on_lost
        self._timeout = timeout
        self._session = ""
        self._wake = asyncio.Event()
        self._busy = True
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self, attach: Attach) -> Attached:
        """Send the first command.

        Raises:
            HostJobEnded: FLARE reports that the host job does not run, until the timeout.
            FlareError: the hub has not answered in time.
        """
        self._session = attach.session
        answer = await self._deliver({"attach": base64.b64encode(encode(attach)).decode()})
        self._ran = True
        attached = decode_attached(base64.b64decode(answer["attached"]))
        if not attached.refused:
            self._stream.attach_pull(self._wake.set)
            self._stream.release(attached.have)
            self._task = asyncio.get_running_loop().create_task(self._run(), name="app commands")
        return attached

    def expect(self, *, busy: bool) -> None:
        """Set whether messages of the hub are expected."""
        self._busy = busy
        if busy:
            self._wake.set()

    async def _run(self) -> None:
        more = False
        try:
            while not (self._closing and not self._stream.waiting):
                if not (self._stream.waiting or self._busy or more or self._closing):
                    await self._rest()
                more = await self._command()
        except FlareError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - the hub cannot be reached after any error
            self._lose(FlareError(f"app commands have ended: {type(error).__name__}: {error}", ""))

    def _lose(self, error: FlareError) -> None:
        if not self._closing:
            self._closing = True
            self._on_lost(self, error)

    async def _rest(self) -> None:
        """Wait until there is something to send, or a heartbeat is due."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST):
                await self._wake.wait()

    async def _command(self) -> bool:
        packet = base64.b64encode(self._stream.pull()).decode()
        wait = _WAIT if self._busy and not self._closing else 0.0
        answer = await self._deliver({"packet": packet, "wait": wait})
        if answer.get("gone"):
            raise FlareError("the hub does not know this application any longer", "Open a new session")
        try:
            self._stream.take(base64.b64decode(answer["packet"]))
        except (KeyError, ValueError) as error:
            raise FlareError(f"cannot decode the hub's answer: {error}", "") from error
        return bool(answer.get("more"))

    async def _deliver(self, data: dict[str, Any]) -> dict[str, Any]:
        """Send one command until it is answered."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        pauses = delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            pause = next(pauses)
            try:
                answer = await self._admin.command(self._host_job, {"session": self._session, **data}, _COMMAND)
                ended, reason = False, "the hub is still starting"
            except FlareError as error:
                kind = error.kind if isinstance(error, AdminError) else ""
                if self._closing or kind in _FINAL:
                    raise
                answer, ended, reason = None, kind in _ENDED, error.problem
            if isinstance(answer, dict) and "ended" in answer:
                raise HostJobEnded(f"the host job has ended: {answer['ended']}", "")
            if isinstance(answer, dict) and not answer.get("starting"):
                return answer
            if self._ran and ended:
                raise HostJobEnded(f"the host job has ended: {reason}", "Open a new session")
            if ended and (why := await self._admin.ended(self._host_job)):
                raise HostJobEnded(f"FLARE does not run the host job: {why}", _why_ended(why))
            if self._admin.lost or loop.time() - began + pause > self._timeout:
                problem = f"the hub has not answered for {loop.time() - began:.1f} s: {reason}"
                raise (HostJobEnded if ended else FlareError)(problem, "Open a new session")
            await asyncio.sleep(pause)  # it failed just now: at once it would fail again

    async def close(self, *, at_once: bool) -> None:
        """Close the transport; unless ``at_once``, after everything is sent."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            if at_once:
                self._task.cancel()
            await asyncio.wait([self._task])


Transport: TypeAlias = GatewayTransport | CommandTransport
"""Carries the packets of a stream to the hub and back."""
