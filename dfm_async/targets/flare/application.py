"""An application, as the hub sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.duplex import Duplex
from dfm_async.targets.flare.slots import Slots

__all__ = ["Application"]

_AHEAD: Final = 64 * 1024 * 1024
"""How many bytes may be under way to one application; then its jobs wait."""
_TALK: Final = 8 * 1024 * 1024
"""From how many bytes on that are under way log records and the like are left out, and counted."""


class Application:
    """One session of an application, whichever way it speaks at present.

    Args:
        attach: its first words.
        on_message: takes its messages.
        on_room: is called when it has taken something.
        largest: the size limit of a message of it, in bytes.
    """

    def __init__(
        self,
        attach: fm.Attach,
        on_message: Callable[[Application, bytes | memoryview], None],
        on_room: Callable[[Application], None],
        largest: int,
    ) -> None:
        hello = attach.hello
        self.name = attach.session
        self.hello = hello
        self.offers: set[str] = set()
        self.slots = Slots(hello.lanes, hello.slots)
        self.pending: deque[str] = deque()
        """Jobs whose submission is answered when there is room for them in the queue."""
        self.duplex = Duplex(lambda data: on_message(self, data), lambda: on_room(self), largest)
        self.connection = ""
        """Its connection at the gateway, if it has one."""
        self.absence: asyncio.TimerHandle | None = None
        self.held_up = False
        """Whether a job waits until it has taken something."""
        self._left_out = 0

    def send(self, message: Any) -> None:
        """Says something that must arrive."""
        self.duplex.send(fm.encode(message))

    def tell(self, message: Any) -> None:
        """Says something that may be left out when the application does not listen: log records, calls, reports."""
        if self.duplex.backlog > _TALK:
            self._left_out += 1
            return
        if self._left_out and isinstance(message, fm.LogLines):
            message = msgspec.structs.replace(message, left_out=message.left_out + self._left_out)
            self._left_out = 0
        self.send(message)

    @property
    def full(self) -> bool:
        """Whether it has too much to take already."""
        return self.duplex.backlog > _AHEAD

    def here(self) -> None:
        """It is there."""
        if self.absence is not None:
            self.absence.cancel()
            self.absence = None
