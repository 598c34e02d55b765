"""The two ends of a connection: what a transport does for them, and the shell that carries out what they decide."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from dfm_async.base.signals import Outcome, Signal
from dfm_async.base.tasks import OwnedTasks
from dfm_async.exchange.bootstrap import Address
from dfm_async.exchange.endpoint import Disconnect, Endpoint, PipeTraits, SendChunks, SendMessage
from dfm_async.exchange.program_messages import Chunk, Message

E = TypeVar("E", bound=Endpoint)
T = TypeVar("T")

_FLUSH: Final = 2.0
"""How long a peer that does not read may delay the end of a connection, in seconds."""


class Receiver(Protocol):
    """Takes what comes out of a pipe. All methods are called on the loop, and must not raise."""

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """Return the memory for the bytes of a chunk; None to drop them, which is the default."""
        del chunk, size
        return None

    def received(self, message: Message, size: int) -> None:
        """Take a message.

        Args:
            message: the message.
            size: the number of bytes that :meth:`room` has received of a chunk; 0 for other messages.
        """
        ...

    def lost(self, reason: str) -> None:
        """Take note that nothing will come any longer. Called once."""
        ...


class Pipe(ABC):
    """One end of a connection: messages come in order, and none twice. Transports have subclasses of it.

    Attributes:
        traits: what the transport can do.
        silence: how long the other end accepts that nothing is sent, in seconds; 0 means for ever, or not known.
        stamp: the number that every frame of this launch carries, where frames have one; None until the peer is known.
        lost: why the connection has ended; None if it has not.
    """

    traits = PipeTraits()
    silence = 0.0
    stamp: int | None = None

    def __init__(self) -> None:
        self.lost: str | None = None
        self._receiver: Receiver | None = None
        self._early: list[Message] = []
        self._ended: Outcome[None] = Outcome()

    def open(self, receiver: Receiver) -> None:
        """Set the receiver. What came before is passed on at once."""
        self._receiver = receiver
        early, self._early = self._early, []
        for message in early:
            receiver.received(message, 0)
        if self.lost is not None:
            receiver.lost(self.lost)

    def deliver(self, message: Message) -> None:
        """Pass a message to the receiver."""
        if self._receiver is None:
            self._early.append(message)
        elif self.lost is None:
            self._receiver.received(message, 0)

    def lose(self, reason: str) -> None:
        """Take note that the connection has ended, and notify the receiver."""
        if self.lost is None:
            self.lost = reason
            if self._receiver is not None:
                self._receiver.lost(reason)

    @abstractmethod
    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Queue a message, with the bytes of a chunk behind it. Ignored when the connection has ended."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until there is room for more."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, and end the connection."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection at once; what is queued is dropped."""

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await self._ended.wait()


@dataclass(frozen=True, slots=True)
class Listener:
    """Listens for the connections of programs.

    Attributes:
        address: where it listens.
        close: stops it. Connections that were made go on.
    """

    address: Address
    close: Callable[[], object]


class Connection(Generic[E]):
    """One end of a connection that is up.

    Args:
        pipe: the transport.
        machine: decides.
        on_effect: carries out the effects that are not about the connection.
    """

    def __init__(self, pipe: Pipe, machine: E, on_effect: Callable[[Any], None]) -> None:
        self.machine = machine
        self._pipe = pipe
        self._on_effect = on_effect
        self._loop = asyncio.get_running_loop()
        self._tasks = OwnedTasks()
        self._changed = Signal()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._running = False
        self._sending = False

    def open(self) -> None:
        """Begin to take what comes."""
        self._pipe.open(self)
        self.run()

    def run(self) -> None:
        """Carry out what the endpoint has decided, set the timer, and wake the waiters: they check again."""
        if self._running:  # an effect caused an event: its effects come after those before
            return
        self._running = True
        effects = self.machine.effects
        try:
            while effects:
                effect = effects.popleft()
                if type(effect) is SendMessage:
                    self._pipe.send(effect.message)
                elif type(effect) is SendChunks:
                    if not self._sending:
                        self._sending = True
                        self._tasks.spawn(self._send_chunks(), "sending large parts")
                elif type(effect) is Disconnect:
                    self._pipe.abort()
                else:
                    self._on_effect(effect)
        finally:
            self._running = False
        if self.machine.due < self._timer_due:
            self._set_timer()
        self._changed.notify()

    async def _send_chunks(self) -> None:
        try:
            while (found := self.machine.next_chunk()) is not None:
                self._pipe.send(*found)
                await self._pipe.drain()
        finally:
            self._sending = False

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self.machine.due
        self._timer = None if self._timer_due == math.inf else self._loop.call_at(self._timer_due, self._wake)

    def _wake(self) -> None:
        if self._loop.time() < self._timer_due:  # timers can be early, by the resolution of the clock
            self._set_timer()
            return
        self.machine.wake()
        self._set_timer()
        self.run()

    async def until(self, ready: Callable[[], T], due: float | None = None) -> T | None:
        """Wait until a condition is true.

        Args:
            ready: is called after every event; the wait ends when it returns something true, or raises.
            due: when to stop waiting, on the clock of the loop; None means never.

        Returns:
            What ``ready`` returned last.
        """
        while not (found := ready()):
            if due is not None and self._loop.time() >= due:
                break
            await self._changed.wait(due)
        return found

    # Receiver

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        """Return the memory for the bytes of a chunk."""
        return self.machine.room(chunk, size)

    def received(self, message: Message, size: int) -> None:
        """Take a message."""
        self.machine.received(message, size)
        self.run()

    def lost(self, reason: str) -> None:
        """Take note that the connection has ended."""
        self.machine.lost(reason)
        self.run()

    async def aclose(self, flush: float = _FLUSH) -> None:
        """End the connection, and everything that was started for it.

        Args:
            flush: how long the other end may take to read what was sent last, in seconds.
        """
        self.run()
        self.machine.close()
        self._pipe.close()
        self.run()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
        try:
            async with asyncio.timeout(flush):
                await self._pipe.wait_closed()
        except TimeoutError:
            self._pipe.abort()
            await self._pipe.wait_closed()
