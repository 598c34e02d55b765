"""Waiting for changes in two folders: the kernel says what happens in them.

The kernel does not see what other hosts do in a shared folder, and there is no way to ask whether one is shared. So
whoever waits also looks by himself, once per second; and ten times per second, as the peer does, where the kernel does
not watch at all: elsewhere than on Linux, or if all of its watchers are in use.

``asyncinotify`` reads from a descriptor that the loop watches. ``watchfiles`` would need a thread, which stays, takes
longer to notice a file, and does not tell files that were moved from those that were deleted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

try:
    import asyncinotify
except ImportError:  # elsewhere than on Linux
    _is_available = False
else:
    _is_available = True

__all__ = ["FolderWatch"]

_log = logging.getLogger(__name__)

_WATCHED: Final = 1.0
"""How often to look although the kernel watches, in seconds."""
_UNWATCHED: Final = 0.1


class FolderWatch:
    """Watches an inbox for messages that come, and an outbox for messages that are taken.

    Args:
        inbox: messages come here.
        outbox: messages are taken from here.
        left: told the name of every file that leaves the outbox, and whether it was moved rather than deleted.
    """

    def __init__(self, inbox: Path, outbox: Path, left: Callable[[str, bool], None]) -> None:
        self._left = left
        self._is_broken = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._inotify = _start()
        if self._inotify is not None:
            mask = asyncinotify.Mask
            ends = mask.DELETE_SELF | mask.MOVE_SELF | mask.ONLYDIR
            try:
                self._inotify.add_watch(inbox, mask.MOVED_TO | ends)
                self._outbox = self._inotify.add_watch(outbox, mask.MOVED_FROM | mask.DELETE | ends)
            except OSError as error:  # too many folders are watched
                _warn(error)
                self._inotify.close()
                self._inotify = None
            else:
                self._loop.add_reader(self._inotify.fd, self.drain)

    @property
    def is_broken(self) -> bool:
        """Whether one of the folders was removed, as far as the kernel has said."""
        return self._is_broken

    @property
    def is_watched(self) -> bool:
        """Whether the kernel watches."""
        return self._inotify is not None

    async def wait(self) -> None:
        """Waits until something has happened since the last look, or it is time to look anyway.

        What happens between a look and this call is not missed as long as there is no ``await`` between them: the
        kernel keeps it until the loop runs again.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        timer = self._loop.call_later(_WATCHED if self.is_watched else _UNWATCHED, _settle, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def wake(self) -> None:
        """Lets everybody who waits look."""
        for waiter in self._waiters:
            _settle(waiter)

    def drain(self) -> None:
        """Takes note of everything that the kernel has said by now, and lets everybody who waits look."""
        while self._inotify is not None:
            try:
                event = self._inotify.sync_get()
            except BlockingIOError:  # that was all
                return
            self.wake()
            if event is None:
                return
            mask = asyncinotify.Mask
            if event.mask & (mask.DELETE_SELF | mask.MOVE_SELF | mask.IGNORED | mask.UNMOUNT):
                self._is_broken = True
            elif event.watch is self._outbox and event.name is not None:
                self._left(str(event.name), bool(event.mask & mask.MOVED_FROM))

    def close(self) -> None:
        """Stops watching, and lets everybody who waits look once more."""
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        self.wake()


def _start() -> asyncinotify.Inotify | None:
    if not _is_available:
        return None
    try:
        inotify = asyncinotify.Inotify()
    except OSError as error:  # too many are open
        _warn(error)
        return None
    # It should be so already, but asyncinotify 4.4 takes the wrong constant for its flag.
    os.set_blocking(inotify.fd, False)
    return inotify


def _warn(error: OSError) -> None:
    _log.warning(
        "folders are looked at every %g s instead of watched: %s. Raise fs.inotify.max_user_instances and "
        "fs.inotify.max_user_watches with sysctl",
        _UNWATCHED,
        error,
    )


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
