"""Connections between processes of one machine and one user."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dfm_async.base import sockets
from dfm_async.base.sockets import connect_local, require_same_user


@pytest.fixture
def full() -> Iterator[tuple[socket.socket, str]]:
    """A listener whose queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = f"\0dfm-async-{secrets.token_hex(8)}"
        listener.bind(address)
        listener.listen(1)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect(address)
        yield listener, address


async def test_a_connection_waits_for_space_in_the_queue_of_the_listener(full: tuple[socket.socket, str]) -> None:
    listener, address = full
    made: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set_result(transport)

    connecting = asyncio.create_task(connect_local(Protocol, address))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not connecting.done()
    listener.accept()[0].close()
    async with asyncio.timeout(30):
        await connecting
    assert made.result().get_extra_info("socket").getpeername() == address.encode()
    made.result().close()


async def test_a_listener_that_accepts_nothing_is_not_waited_for_without_end(
    full: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_CONNECT_TIMEOUT", 0.05)
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError, match=r"has accepted no connection within 0\.05 s"):
            await connect_local(asyncio.Protocol, full[1])


def test_a_socket_that_is_not_connected_is_not_taken_for_one_of_another_user() -> None:
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(OSError, match="not connected"):
        require_same_user(connection)


def test_users_with_large_numbers_are_the_same_user() -> None:
    program = (
        "import os, socket; from dfm_async.base.sockets import same_user, user_of;"
        "os.setuid(3_000_000_000); ours, theirs = socket.socketpair(); print(user_of(ours), same_user(ours))"
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout.split() == ["3000000000", "True"]
