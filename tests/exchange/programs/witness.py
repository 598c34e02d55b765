"""A program that stops at a moment of an exchange, and writes down what it sees of the end of its site."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

moment, manner, folder = sys.argv[1:4]
seen: dict[str, object] = {}


def saw(**what: object) -> None:
    """Writes it down, in one step: two threads do this."""
    handle = os.open(Path(folder, f"{moment}.seen"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(handle, json.dumps(what).encode() + b"\n")
    os.close(handle)
    seen.update(what)


def reached() -> None:
    """Tells the site, whose turn it is to die."""
    if manner != "natural":
        subprocess.Popen(["sh", "-c", 'trap "" TERM; sleep 600'])
    saw(moment=moment)
    print("at", moment, flush=True)


def listen() -> None:
    """Waits for SIGTERM. Not by a handler: one that comes just before the main thread waits would not wake it."""
    while True:
        signal.sigwait({signal.SIGTERM})
        saw(SIGTERM=True)
        if manner == "polite" and ("closed" in seen or moment == "before hello"):
            os._exit(0)


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
threading.Thread(target=listen, daemon=True).start()
if moment == "before hello":
    reached()
    threading.Event().wait()

from dfm_async.exchange import program_messages  # noqa: E402
from dfm_async.exchange.agent import FlareAgent  # noqa: E402
from dfm_async.exchange.agent_machine import AgentMachine  # noqa: E402
from dfm_async.exchange.socket_pipe import SocketPipe  # noqa: E402
from dfm_async.exchange.transfers import Download  # noqa: E402

stop, arrived, send = AgentMachine._stop, Download.received, SocketPipe.send
done: set[str] = set()


def at(where: str) -> bool:
    """Whether this is the moment, for the first time."""
    if where != moment or where in done:
        return False
    done.add(where)
    reached()
    return True


def on_stop(machine: AgentMachine, reason: Any, detail: str) -> None:
    stop(machine, reason, detail)
    if "closed" not in seen:  # the end of the connection follows whatever was said before
        saw(closed=reason)
    if manner == "polite" and "SIGTERM" in seen:
        os._exit(0)


def after_a_chunk(download: Download, chunk: program_messages.Chunk, size: int) -> None:
    if moment == "receiving" and download.started:
        at("receiving")
        return  # it never gets any further
    arrived(download, chunk, size)


def instead_of_sending(pipe: SocketPipe, message: program_messages.Message, data: memoryview | None = None) -> None:
    if isinstance(message, program_messages.ResultOffer) and moment == "offering":
        at("offering")
    elif isinstance(message, program_messages.Chunk) and message.offset and moment == "transferring":
        at("transferring")
    else:
        send(pipe, message, data)


changed: Any = AgentMachine, Download, SocketPipe
changed[0]._stop, changed[1].received, changed[2].send = on_stop, after_a_chunk, instead_of_sending
if moment == "after hello":
    changed[0]._task_offered = lambda machine, offer: None


async def main() -> None:
    async with FlareAgent() as agent:
        at("after hello")
        task = await agent.get_task()
        assert task is not None
        if not at("computing"):
            await agent.submit_result(task.data)
            at("settled")
        await asyncio.get_running_loop().create_future()


try:
    asyncio.run(main())
except Exception as error:
    saw(raised=type(error).__name__)
    if manner == "natural":
        raise
threading.Event().wait()  # a polite one ends when it has seen both, the signal and the end of the connection
