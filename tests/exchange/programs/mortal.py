"""A program that reaches a moment of an exchange, and does there, once, what programs should not do."""

import os
import signal
import subprocess
import sys
import time

moment, deed, flag = sys.argv[1:4]


def flood() -> None:
    block = b"x" * (1024 * 1024)
    for _ in range(100):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(1, rest) :]


def close_output() -> None:
    os.close(1)
    os.close(2)


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ignoring SIGTERM", flush=True)
    while True:
        signal.pause()


def leave_a_child() -> None:
    subprocess.Popen(["sleep", "600"])
    os._exit(3)


DEEDS = {
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "sys.exit 0": lambda: sys.exit(0),
    "sys.exit 3": lambda: sys.exit(3),
    "closes its output": close_output,
    "leaves a child with the pipe": leave_a_child,
    "ignores SIGTERM": hang,
    "invalid UTF-8": lambda: os.write(1, b"caf\xe9 \xff\xfe\n"),
    "100 MB without newline": flood,
}


def at(where: str) -> None:
    if where != moment:
        return
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # it was done by the process before
        return
    print("at", where, time.monotonic(), flush=True)
    DEEDS[deed]()


at("before hello")

import asyncio  # noqa: E402 - what follows takes longer than to say hello
from typing import Any  # noqa: E402

from dfm_async.exchange import program_messages  # noqa: E402
from dfm_async.exchange.agent import FlareAgent  # noqa: E402
from dfm_async.exchange.connection import Pipe  # noqa: E402
from dfm_async.exchange.options import AgentOptions  # noqa: E402
from dfm_async.exchange.socket_pipe import SocketPipe  # noqa: E402
from dfm_async.exchange.transfers import Download  # noqa: E402

perform_handshake, arrived, send = FlareAgent._perform_handshake, Download.received, SocketPipe.send


async def after_handshake(agent: FlareAgent) -> tuple[Pipe, list[program_messages.Message]]:
    found = await perform_handshake(agent)
    at("after hello")
    return found


def after_a_chunk(download: Download, chunk: program_messages.Chunk, size: int) -> None:
    arrived(download, chunk, size)
    at("receiving")


def after_sending(pipe: SocketPipe, message: program_messages.Message, data: memoryview | None = None) -> None:
    send(pipe, message, data)
    if isinstance(message, program_messages.ResultOffer):
        at("offering")
    elif isinstance(message, program_messages.Chunk) and message.offset:
        at("transferring")


changed: Any = FlareAgent, Download, SocketPipe
changed[0]._perform_handshake, changed[1].received, changed[2].send = after_handshake, after_a_chunk, after_sending


async def main() -> None:
    async with FlareAgent(options=AgentOptions(heartbeat_interval=0.2)) as agent:
        async for task in agent:
            at("computing")
            await agent.submit_result(task.data)
            at("settled")


asyncio.run(main())
