"""Writing to real sockets: in order, whatever the kernel takes at a time, and at once what somebody waits for."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from dfm_async.exchange.messages import Chunk, Message, Progress, ResultOffer, TaskAnswer
from dfm_async.exchange.pipes.socket import SocketPipe

STAMP = 7
SIZES = [1, 1000, 64 * 1024, 256 * 1024, 1024 * 1024, 3, 700_000] * 4


class Taker:
    """Keeps what comes, in order."""

    def __init__(self, count: int) -> None:
        self.found: list[tuple[Message, bytes]] = []
        self.done = asyncio.Event()
        self.reason: str | None = None
        self._count = count
        self._place = bytearray()

    def room(self, chunk: Chunk, size: int) -> memoryview:
        del chunk
        self._place = bytearray(size)
        return memoryview(self._place)

    def received(self, message: Message, size: int) -> None:
        self.found.append((message, bytes(self._place) if size else b""))
        if len(self.found) == self._count:
            self.done.set()

    def lost(self, reason: str) -> None:
        self.reason = reason
        self.done.set()


async def pair(kernel: int | None) -> tuple[SocketPipe, SocketPipe]:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    _, sender = await loop.create_connection(lambda: SocketPipe(STAMP), sock=ours)
    _, receiver = await loop.create_connection(lambda: SocketPipe(STAMP), sock=theirs)
    if kernel is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel)
    return sender, receiver


async def exchange(kernel: int | None, drains: bool) -> None:
    sender, receiver = await pair(kernel)
    taker = Taker(2 * len(SIZES))
    receiver.open(taker)
    expected: list[tuple[Message, bytes]] = []
    for number, size in enumerate(SIZES):
        data = bytes([number]) * size
        # One of them waits for the end of the loop's turn, the other is written at once.
        note: Message = Progress(float(number)) if number % 2 else ResultOffer("task", str(number), "OK", b"", [])
        chunk = Chunk("tx", number, "r", 0, 0)
        sender.send(note)
        sender.send(chunk, memoryview(data))
        expected += [(note, b""), (chunk, data)]
        if drains:
            await sender.drain()
    async with asyncio.timeout(20):
        await taker.done.wait()
    assert taker.found == expected
    for pipe in (sender, receiver):
        pipe.abort()
        await pipe.wait_closed()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("kernel", [None, 4096])
@pytest.mark.parametrize("drains", [True, False])
def test_chunks_and_messages_come_in_the_order_they_were_sent(
    loop: Callable[[], asyncio.AbstractEventLoop], kernel: int | None, drains: bool
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(exchange(kernel, drains))


async def test_chunks_for_a_peer_that_is_gone_are_dropped_and_its_loss_is_told() -> None:
    sender, receiver = await pair(None)
    taker = Taker(1)
    sender.open(taker)
    receiver.abort()
    await receiver.wait_closed()
    data = memoryview(bytes(1024))
    sender.send(Chunk("tx", 1, "r", 0, 0), data)
    async with asyncio.timeout(20):
        await taker.done.wait()
    assert taker.reason is not None
    sender.send(Chunk("tx", 1, "r", 0, 0), data)
    await sender.drain()
    await sender.wait_closed()


async def test_that_a_task_is_accepted_is_said_before_the_program_can_keep_its_loop_busy() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, sender = await asyncio.get_running_loop().create_connection(lambda: SocketPipe(STAMP), sock=ours)
    sender.send(TaskAnswer("task", True))
    assert theirs.recv(1000)
    theirs.close()
    sender.abort()
    await sender.wait_closed()
