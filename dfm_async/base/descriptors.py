"""Descriptors that belong to one process: forked children must not hold them, and none may be a standard stream.

The end of a connection notifies its peer that a process has ended. A forked child has copies of all descriptors, so it
would keep the connection open after its parent has died. What registers here is disconnected in forked children.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class ClosedInChildren(Protocol):
    """Something that a forked child must not keep open: it would look alive in its parent's place."""

    def close_in_child(self) -> None:
        """Disconnect the descriptors of this process. Called in a forked child, before any other code."""
        ...


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


_registered: weakref.WeakSet[ClosedInChildren | _HasDescriptor] = weakref.WeakSet()
_lock = threading.RLock()


def close_in_children(item: ClosedInChildren | _HasDescriptor) -> None:
    """Disconnect the item (such as a socket) in every child that is forked from now on, as long as the item exists."""
    _registered.add(item)


@contextmanager
def no_fork() -> Iterator[None]:
    """Keep other threads from forking while descriptors exist that are not registered yet. Must not wait inside."""
    with _lock:
        yield


def disconnect(item: int | _HasDescriptor) -> None:
    """Put ``/dev/null`` in the place of a descriptor. Does nothing if it is closed.

    The number stays in use, so closing it later closes nothing else. An event loop that is shared with the parent
    cannot remove the parent's registration either: for epoll the number is another file now.
    """
    with contextlib.suppress(OSError, ValueError):
        number = item if isinstance(item, int) else item.fileno()
        if number >= 0:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, number, inheritable=False)
            if null != number:
                os.close(null)


class OwnLoop:
    """An event loop that forked children cannot use.

    They share its selector. What a child removed there, also when it only closed the loop, would not wake
    the parent any longer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._selector = getattr(loop, "_selector", None)
        close_in_children(self)

    def release(self) -> None:
        """Leave the loop to its children."""
        self._selector = None

    def close_in_child(self) -> None:
        """Disconnect the selector, in a forked child."""
        if self._selector is not None and hasattr(self._selector, "fileno"):
            disconnect(self._selector)


def occupy_standard_streams() -> None:
    """Open ``/dev/null`` for each standard stream that is closed.

    Otherwise the next socket or pipe gets its number, and everything that is printed goes there.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:  # another thread was faster
                os.close(null)
            else:
                os.set_inheritable(number, True)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for item in list(_registered):
        if hasattr(item, "close_in_child"):
            item.close_in_child()
        else:
            disconnect(item)


os.register_at_fork(
    before=lambda: _lock.acquire() and None,
    after_in_parent=lambda: _lock.release(),
    after_in_child=_after_fork_in_child,
)
