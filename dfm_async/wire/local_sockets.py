"""Unix sockets that only processes of the same user reach.

On Linux they have abstract addresses: these leave no file behind, but have no permissions either. Everybody can connect
to one, and everybody can take one whose owner has died. So both sides compare the user of the peer with their own.
Elsewhere they are files in a private folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dfm_async.base.descriptors import close_in_children, no_fork

__all__ = ["LocalListener", "connect_local", "require_same_user", "same_user", "user_of"]

P = TypeVar("P", bound=asyncio.BaseProtocol)

_ABSTRACT: Final = sys.platform == "linux"
_CREDENTIALS: Final = struct.Struct("3i")
_BACKLOG: Final = 128


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
    """
    if not same_user(connection):
        raise PermissionError(f"a process of another user (uid {user_of(connection)}) listens there")


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
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def connect_local(protocol: Callable[[], P], address: str) -> P:
    """Connect to an address of a process of the same user.

    By hand, because uvloop cannot connect to an abstract address.

    Raises:
        PermissionError: a process of another user listens there.
        OSError: nobody listens there.
    """
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, address)
        require_same_user(connection)
        _, made = await loop.create_unix_connection(protocol, sock=connection)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise
    return made
