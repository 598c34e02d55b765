"""The cache of one site: values by key, bounded, with one computation per missing key at a time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from dfm_async.errors import EncodingError
from dfm_async.runtime.stored_values import StoredValues
from dfm_async.wire.codec import Codec

__all__ = ["SiteCache", "Ticket"]

_ITEMS: Final = 4096
_BYTES: Final = 256 * 1024 * 1024


class Ticket:
    """The right to compute the value of a key that is missing. Must be kept or abandoned."""

    __slots__ = ("done", "key", "refused")

    def __init__(self, key: bytes, refused: str) -> None:
        self.key = key
        self.refused = refused
        """Why the key cannot be stored in files, if it cannot."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Entry(NamedTuple):
    data: bytes | memoryview
    written: float


class SiteCache:
    """Keeps encoded values in memory, and in files if the site has a place for them.

    The least recently used make room for new ones. Files may have been written by anybody: nothing in them is
    unpickled. What cannot be written without pickle stays in memory.

    Args:
        codec: how values are kept in memory.
        stored: the files.
    """

    def __init__(self, codec: Codec, stored: StoredValues | None = None) -> None:
        self._codec = codec.plain
        self._keys = Codec(trusted=codec.trusted, canonical=True)
        self._stored = stored
        self._file_codec = Codec(trusted=False)
        self._file_keys = Codec(trusted=False, canonical=True)
        self._values: OrderedDict[bytes, _Entry] = OrderedDict()
        self._size = 0
        self._tickets: dict[bytes, Ticket] = {}

    async def look_up(self, key: Any, *, wait: bool) -> tuple[bool, Any]:
        """Gives ``(True, value)``, or ``(False, ticket)`` to the one that shall compute it. The others wait.

        Without ``wait``, another one that computes the same value is not waited for: both do.

        Raises:
            EncodingError: the key cannot be encoded.
        """
        encoded, refused = self._encode_key(key)
        while True:
            entry = self._remembered(encoded)
            if entry is not None:
                return True, self._codec.loads(entry.data)
            ticket = self._tickets.get(encoded)
            if ticket is None or not wait:
                break
            await asyncio.shield(ticket.done)
        own = Ticket(encoded, refused)
        if ticket is None:
            self._tickets[encoded] = own  # from now on others wait, also while the files are asked
        if self._stored is None or refused:
            return False, own
        try:
            return await self._look_into_files(self._stored, own)
        except BaseException:
            self.abandon(own)
            raise

    async def _look_into_files(self, stored: StoredValues, ticket: Ticket) -> tuple[bool, Any]:
        found = await stored.read(ticket.key)
        if found is None:
            return False, ticket
        data, written = found
        try:
            value = self._file_codec.loads(data)
        except EncodingError:
            # A class whose module is not loaded here. No file can make us import one: it is computed once more.
            return False, ticket
        self._remember(ticket.key, _Entry(data, written))
        self.abandon(ticket)
        return True, value

    def keep(self, ticket: Ticket, value: Any, node: str) -> bytes | None:
        """Keeps the value in memory and lets those that wait for it go on. Gives what :meth:`write` shall write.

        Args:
            ticket: the right to keep it.
            value: what was computed.
            node: who wants it to be kept.

        Raises:
            EncodingError: the value cannot be encoded; the ticket counts as abandoned.
        """
        try:
            data = None if self._stored is None else self._for_files(self._stored, ticket, value, node)
            self._remember(ticket.key, _Entry(self._codec.encode(value) if data is None else data, time.time()))
            return data
        finally:
            self.abandon(ticket)

    async def write(self, ticket: Ticket, data: bytes, node: str) -> None:
        """Writes what was kept into a file. Trouble is told to the log."""
        assert self._stored is not None  # noqa: S101 - else there is nothing to write
        await self._stored.write(ticket.key, data, node)

    def abandon(self, ticket: Ticket) -> None:
        """Gives the ticket back: another one that waits gets it."""
        if self._tickets.get(ticket.key) is ticket:
            del self._tickets[ticket.key]
        if not ticket.done.done():
            ticket.done.set_result(None)

    def close(self) -> None:
        """Lets the threads of the cache end."""
        if self._stored is not None:
            self._stored.close()

    def _encode_key(self, key: Any) -> tuple[bytes, str]:
        """Gives the key as bytes, and why it cannot be stored in files if it cannot."""
        if self._stored is None:
            return self._keys.encode(key), ""
        try:
            return self._file_keys.encode(key), ""
        except EncodingError as error:
            return self._keys.encode(key), f"its key, {error}"

    def _for_files(self, stored: StoredValues, ticket: Ticket, value: Any, node: str) -> bytes | None:
        if ticket.refused:
            stored.refused(node, ticket.refused)
            return None
        try:
            return self._file_codec.encode(value)
        except EncodingError as error:
            stored.refused(node, str(error))
            return None

    def _remembered(self, key: bytes) -> _Entry | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        max_age = None if self._stored is None else self._stored.max_age
        if max_age is not None and time.time() - entry.written > max_age:
            self._forget(key)
            return None
        self._values.move_to_end(key)
        return entry

    def _remember(self, key: bytes, entry: _Entry) -> None:
        self._forget(key)
        self._values[key] = entry
        self._size += len(entry.data)
        while self._values and (len(self._values) > _ITEMS or self._size > _BYTES):
            self._forget(next(iter(self._values)))

    def _forget(self, key: bytes) -> None:
        entry = self._values.pop(key, None)
        if entry is not None:
            self._size -= len(entry.data)
