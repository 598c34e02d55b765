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

from dfm_async import Federation, JobAborted, Pipeline, Session, WorkerLost, Yield
from dfm_async.exchange.bootstrap import Address, read_bootstrap
from dfm_async.exchange.gate import SocketGate, connect
from dfm_async.exchange.messages import VERSION, Chunk, Hello, Message, Welcome
from dfm_async.exchange.options import ExecutorOptions
from dfm_async.exchange.pipes.base import stamp_of
from dfm_async.targets.flare import gateway as gateways
from dfm_async.targets.flare.gateway import Frames, Gateway, prove, split_address
from dfm_async.wire.local_sockets import connect_local

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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Attacker(process)
        finally:
            process.kill()


async def test_nothing_is_sent_to_an_address_that_another_user_has_taken() -> None:
    name = f"dfm-async-{secrets.token_hex(8)}"
    with attacker(name, "takes") as other:
        assert await other.says() == "has it"
        with pytest.raises(PermissionError, match="another user"):
            await connect_local(asyncio.Protocol, f"\0{name}")
        assert [await other.says(), await other.says()] == ["connected", "got 0 bytes"]


async def test_programs_do_not_speak_to_a_gate_of_another_user() -> None:
    name = f"dfm-async-{secrets.token_hex(8)}"
    with attacker(name, "takes") as other:
        assert await other.says() == "has it"
        with pytest.raises(PermissionError):
            await connect(Address(kind="unix", name=f"@{name}"), 1)
        assert [await other.says(), await other.says()] == ["connected", "got 0 bytes"]


async def test_a_worker_sends_no_token_to_another_user_who_has_the_address_of_a_dead_one() -> None:
    fed = Federation("taken")
    lab, desk = fed.site("lab"), fed.site("desk")

    @lab.operation
    def secret() -> str:
        return "confidential"

    @desk.operation
    def take(value: str) -> str:
        return value

    with Pipeline("takes") as takes:
        Yield(take("nothing"))
    with Pipeline("sends") as sends:
        Yield(take(secret()))
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
        assert (await (await session.execute(sends)).first()).value == "confidential"


async def test_a_flood_of_another_user_keeps_no_program_from_the_gate() -> None:
    gate = SocketGate("unix")
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
            assert not gate._strangers, "others are not counted"
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


async def test_a_flood_of_another_user_keeps_no_application_from_the_gateway() -> None:
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
            assert len(gateway._strangers) <= gateways._STRANGERS
    finally:
        connection.abort()
        await gateway.close()
