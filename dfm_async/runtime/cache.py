"""The cache of one site: values by key, bounded, with one computation per missing key at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

from dfm_async.wire.codec import Codec

__all__ = ["SiteCache", "Ticket"]

_ITEMS: Final = 4096
_BYTES: Final = 256 * 1024 * 1024


class Ticket:
    """The right to compute the value of a key that is missing. Must be kept or abandoned."""

    __slots__ = ("done", "key")

    def __init__(self, key: bytes, done: asyncio.Future[None]) -> None:
        self.key = key
        self.done = done


class SiteCache:
    """Keeps encoded values in memory; the least recently used make room for new ones."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec.plain
        self._keys = Codec(trusted=codec.trusted, canonical=True)
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self._tickets: dict[bytes, Ticket] = {}

    async def look_up(self, key: Any, *, wait: bool) -> tuple[bool, Any]:
        """Gives ``(True, value)``, or ``(False, ticket)`` to the one that shall compute it. The others wait.

        Without ``wait``, another one that computes the same value is not waited for: both do.

        Raises:
            EncodingError: the key cannot be encoded.
        """
        encoded = self._keys.encode(key)
        while True:
            value = self._values.get(encoded)
            if value is not None:
                self._values.move_to_end(encoded)
                return True, self._codec.loads(value)
            ticket = self._tickets.get(encoded)
            if ticket is not None and not wait:
                return False, Ticket(encoded, asyncio.get_running_loop().create_future())
            if ticket is None:
                ticket = self._tickets[encoded] = Ticket(encoded, asyncio.get_running_loop().create_future())
                return False, ticket
            await asyncio.shield(ticket.done)

    def keep(self, ticket: Ticket, value: Any) -> None:
        """Stores the value and lets those that wait for it go on.

        Raises:
            EncodingError: the value cannot be encoded; the ticket counts as abandoned.
        """
        try:
            encoded = self._codec.encode(value)
            self._size += len(encoded) - len(self._values.pop(ticket.key, b""))
            self._values[ticket.key] = encoded
            while self._values and (len(self._values) > _ITEMS or self._size > _BYTES):
                self._size -= len(self._values.popitem(last=False)[1])
        finally:
            self.abandon(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """Gives the ticket back: another one that waits gets it."""
        if self._tickets.get(ticket.key) is ticket:
            del self._tickets[ticket.key]
        if not ticket.done.done():
            ticket.done.set_result(None)
