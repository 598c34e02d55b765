"""Unix sockets that only processes of the same user reach.

On Linux they have abstract addresses: these leave no file behind, but have no permissions either. Everybody can connect
to one, and everybody can take one whose owner has died. So both sides compare the user of the peer with their own.
Elsewhere they are files in a private folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dfm_async.base.backoff import delays
from dfm_async.base.descriptors import close_in_children, no_fork

P = TypeVar("P", bound=asyncio.BaseProtocol)

_ABSTRACT: Final = sys.platform == "linux"
_CREDENTIALS: Final = struct.Struct("iII")
"""The process, the user and the group of a peer, as the kernel writes them."""
_BACKLOG: Final = 128
_NO_USER: Final = 2**32 - 1
"""The user of the peer of a socket that is not connected."""
_CONNECT_TIMEOUT: Final = 60.0
"""The number of seconds that the queue of a listener may be full."""
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.2


def user_of(connection: Any) -> int | None:
    """Return the user that the peer of a Unix socket runs as; None for others, or if the system does not know."""
    option = getattr(socket, "SO_PEERCRED", None)
    if connection is None or option is None or connection.family != socket.AF_UNIX:
        return None
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return int(user)


def same_user(connection: Any) -> bool:
    """Whether the peer of a socket runs as the same user, as far as the system knows."""
    return user_of(connection) in (None, os.geteuid())


def require_same_user(connection: Any) -> None:
    """Check the user of the peer.

    Raises:
        PermissionError: it is another user.
        OSError: the socket is not connected.
    """
    if same_user(connection):
        return
    user = user_of(connection)
    if user == _NO_USER:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    raise PermissionError(f"a process of another user (uid {user}) listens there")


class LocalListener:
    """Listens at an address of its own.

    Args:
        name: the name of an abstract address. Elsewhere the address is a file in a new private folder.

    Attributes:
        address: where it listens.
        socket: what it listens with.
    """

    def __init__(self, name: str) -> None:
        self._folder: str | None = None
        with no_fork():
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            close_in_children(self.socket)
        try:
            if _ABSTRACT:
                self.address = f"\0{name}"
            else:
                import tempfile  # here and below: Linux does without files, and workers start faster

                self._folder = tempfile.mkdtemp(prefix="dfm-")
                self.address = os.path.join(self._folder, "socket")
            self.socket.setblocking(False)
            self.socket.bind(self.address)
            self.socket.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, and remove the file."""
        self.socket.close()
        if self._folder is not None:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def connect_local(protocol: Callable[[], P], address: str) -> P:
    """Connect to an address of a process of the same user.

    Raises:
        PermissionError: a process of another user listens there.
        TimeoutError: it has not accepted connections for a long time.
        OSError: no process listens there.
    """
    connection = await connected(address)
    try:
        _, made = await asyncio.get_running_loop().create_unix_connection(protocol, sock=connection)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise
    return made


async def connected(address: str) -> socket.socket:
    """Return a socket that is connected to an address of a process of the same user.

    By hand: uvloop cannot connect to an abstract address, and asyncio takes a socket for connected that the listener's
    full queue has refused.

    Raises:
        PermissionError: a process of another user listens there.
        TimeoutError: it has not accepted connections for a long time.
        OSError: no process listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        end, pauses = time.monotonic() + _CONNECT_TIMEOUT, delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                connection.connect(address)  # succeeds or fails at once
                break
            except BlockingIOError as error:  # nothing reports when the queue has space again
                if time.monotonic() >= end:
                    text = f"the listener at {address!r} has accepted no connection within {_CONNECT_TIMEOUT:g} s"
                    raise TimeoutError(text) from error
            await asyncio.sleep(next(pauses))
        require_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection
