"""A program that does what its tasks say, and ends with the exit code that it was given."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from dfm_async.exchange import program_messages
from dfm_async.exchange.agent import FlareAgent
from dfm_async.exchange.agent_machine import AgentMachine
from dfm_async.exchange.socket_pipe import SocketPipe
from dfm_async.exchange.task import Task

manner = sys.argv[1] if len(sys.argv) > 1 else ""
code = sys.argv[2] if len(sys.argv) > 2 else "0"
send = SocketPipe.send


def say_more_than_hello(last: program_messages.Message) -> Any:
    def say(pipe: SocketPipe, message: program_messages.Message, data: memoryview | None = None) -> None:
        send(pipe, message, data)
        if isinstance(message, program_messages.Hello):
            send(pipe, last)

    return say


changed: Any = AgentMachine, SocketPipe
if manner == "deaf":
    changed[0]._task_offered = lambda machine, offer: print("not listening", flush=True)
elif manner == "ends":
    changed[1].send = say_more_than_hello(program_messages.EndOfTasks("I am not in the mood"))
elif manner == "aborts":
    changed[1].send = say_more_than_hello(program_messages.Abort("I am not in the mood"))


def sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(int(name))
    return found


async def do(task: Task) -> Any:
    order = task.data if isinstance(task.data, dict) else {}
    match order.get("do"):
        case "double":
            return order["array"] * 2
        case "wait":
            print("waiting", flush=True)
            await asyncio.get_running_loop().create_future()
        case "leave the connection to a child":
            # A process that is forked has no copy of the connection; one that is executed can be given one.
            subprocess.Popen(["sleep", "60"], pass_fds=sockets())  # noqa: ASYNC220 - it ends at once anyway
            os._exit(order["code"])
        case "raise":
            raise ValueError("no such data")
    return order.get("answer", os.getpid())


async def main() -> None:
    async with FlareAgent() as agent:
        if manner == "leaves":
            return
        async for task in agent:
            await agent.submit_result(await do(task))
    print("ended", flush=True)


asyncio.run(main())
if manner == "lingers":
    print("lingering", flush=True)
    Path(code).read_text()
    code = "0"
sys.exit(int(code))
