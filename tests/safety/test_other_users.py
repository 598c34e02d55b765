"""Another user of the machine takes our local addresses, or floods them: no code runs, no token is given away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dfm_async import Federation, JobAborted, Session, WorkerLost
from dfm_async.base.sockets import connect_local
from dfm_async.exchange.bootstrap import Address, read_bootstrap, stamp_of
from dfm_async.exchange.handshake import HandshakeTransport, connect
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.program_messages import VERSION, Chunk, Hello, Message, Welcome
from dfm_async.targets.flare import gateway as gateways
from dfm_async.targets.flare.gateway import Frames, Gateway, prove, split_address
from tests.support.pipelines import yielding
from tests.support.processes import started
from tests.support.sessions import first_value

NOBODY = 65534


_ATTACKER = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
address, what = "\\0" + sys.argv[1], sys.argv[2]
if what == "takes":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    print("has it", flush=True)
    connection, _ = listener.accept()
    print("connected", flush=True)
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionError:
        pass
    print(f"got {{len(data)}} bytes", flush=True)
else:
    held = []
    for _ in range(300):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        held.append(connection)
    print("has flooded", flush=True)
sys.stdin.read()
"""


class Attacker:
    """A process of another user."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def says(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            return (await asyncio.to_thread(self._process.stdout.readline)).strip()


@contextlib.contextmanager
def attacker(address: str, what: str) -> Iterator[Attacker]:
    command = [sys.executable, "-c", _ATTACKER, address.lstrip("\0@"), what]
    with started(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Attacker(process)


@pytest.mark.parametrize("who", ["worker", "program"])
async def test_nothing_is_sent_to_an_address_that_another_user_has_taken(who: str) -> None:
    name = f"dfm-async-{secrets.token_hex(8)}"
    with attacker(name, "takes") as other:
        assert await other.says() == "has it"
        with pytest.raises(PermissionError, match="another user"):
            if who == "worker":
                await connect_local(asyncio.Protocol, f"\0{name}")
            else:
                await connect(Address(kind="unix", name=f"@{name}"), 1)
        assert [await other.says(), await other.says()] == ["connected", "got 0 bytes"]


async def test_worker_sends_no_token_to_a_reused_address_of_another_user() -> None:
    fed = Federation("taken")
    lab, desk = fed.site("lab"), fed.site("desk")

    @lab.operation
    def secret() -> str:
        return "confidential"

    @desk.operation
    def take(value: str) -> str:
        return value

    takes = yielding(lambda: take("nothing"))
    sends = yielding(lambda: take(secret()))
    name = f"dfm-async-{secrets.token_hex(8)}"
    async with Session(fed) as session:
        await (await session.execute(takes))
        with attacker(name, "takes") as other:
            assert await other.says() == "has it"
            # As if the worker had died, and the application were too busy to notice it.
            (worker,) = session.target.workers("desk")  # type: ignore[attr-defined]
            address, worker.address = worker.address, f"\0{name}"
            job = await session.execute(sends)
            assert [await other.says(), await other.says()] == ["connected", "got 0 bytes"]
            with pytest.raises(JobAborted) as caught:
                async with asyncio.timeout(30):
                    await job
            assert isinstance(caught.value.__cause__, WorkerLost)
            assert any("a process of another user" in line for line in caught.value.__cause__.lines)
            worker.address = address
        assert await first_value(session, sends) == "confidential"


async def test_flood_by_another_user_does_not_block_programs() -> None:
    gate = HandshakeTransport("unix")
    await gate.open(ExecutorOptions(), "berlin", "j1")
    try:
        bootstrap = read_bootstrap(gate.invite(lambda _: None, launch_once=True))
        with attacker(bootstrap.address.name, "floods") as other:
            assert await other.says() == "has flooded"
            pipe = await connect(bootstrap.address, stamp_of(bootstrap.session, bootstrap.token))
            receiver = _Receiver()
            pipe.open(receiver)
            pipe.send(Hello(VERSION, bootstrap.token, bootstrap.session, os.getpid()))
            async with asyncio.timeout(30):
                assert isinstance(await receiver.first, Welcome)
            assert not gate._pending, "others are not counted"
            pipe.close()
    finally:
        await gate.close()


class _Receiver:
    def __init__(self) -> None:
        self.first: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def room(self, chunk: Chunk, size: int) -> memoryview | None:
        return None

    def received(self, message: Message, size: int) -> None:
        if not self.first.done():
            self.first.set_result(message)

    def lost(self, reason: str) -> None:
        if not self.first.done():
            self.first.set_exception(ConnectionError(reason))


async def test_flood_by_another_user_does_not_block_the_gateway() -> None:
    sent: asyncio.Queue[list[bytes]] = asyncio.Queue()
    gateway = Gateway(lambda message: sent.put_nowait(list(getattr(message, "data", ()))))
    await gateway.open()
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    lost = asyncio.Event()
    connection = Frames(answers.put_nowait, lost.set)
    try:
        name, secret = split_address(gateway.address)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, name)
        with attacker(name, "floods") as other:
            assert await other.says() == "has flooded"
            connection.send(b"challenge")
            async with asyncio.timeout(30):
                answer = await answers.get()
                connection.send(prove(secret, b"application", answer[32:]))
                connection.send(b"for the hub")
                assert await sent.get() == [b"for the hub"]
            assert not lost.is_set()
            assert len(gateway._unauthenticated) <= gateways._MOST_UNAUTHENTICATED
    finally:
        connection.abort()
        await gateway.close()
