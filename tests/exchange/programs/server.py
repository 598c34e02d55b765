"""A program that does what its tasks say, and ends with the exit code that it was given."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from dfm_async.exchange import messages, settling
from dfm_async.exchange.agent import FlareAgent
from dfm_async.exchange.pipes.socket import SocketPipe
from dfm_async.exchange.task import Task
from dfm_async.exchange.transfers import Pull

manner = sys.argv[1] if len(sys.argv) > 1 else ""
code = sys.argv[2] if len(sys.argv) > 2 else "0"
send, arrived, stop = SocketPipe.send, Pull.arrived, FlareAgent._stop


def say_more_than_hello(last: messages.Message) -> Any:
    def say(pipe: SocketPipe, message: messages.Message, data: memoryview | None = None) -> None:
        send(pipe, message, data)
        if isinstance(message, messages.Hello):
            send(pipe, last)

    return say


def take_slowly(pull: Pull, chunk: messages.Chunk, size: int) -> None:
    time.sleep(0.1)
    arrived(pull, chunk, size)


def tell_and_stop(agent: FlareAgent, reason: str, detail: str) -> None:
    stop(agent, reason, detail)
    print("told:", reason, flush=True)


changed: Any = FlareAgent, SocketPipe, Pull, settling
if manner == "deaf":
    changed[0]._task_offered = lambda agent, offer: print("not listening", flush=True)
elif manner == "slow":
    changed[2].arrived = take_slowly
elif manner == "ends":
    changed[1].send = say_more_than_hello(messages.End("I am not in the mood"))
elif manner == "impatient":
    changed[3]._LAST_WORD = 0.0
    changed[0]._stop = tell_and_stop
elif manner == "aborts":
    changed[1].send = say_more_than_hello(messages.Abort("I am not in the mood"))


def sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(int(name))
    return found


async def do(agent: FlareAgent, task: Task) -> Any:
    order = task.data if isinstance(task.data, dict) else {}
    match order.get("do"):
        case "measure":
            for step in range(3):
                await agent.log({"loss": step / 2}, step=step)
                agent.progress(step + 1, 3, "going on")
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
        if manner == "runs":
            await agent.run(partial(do, agent))
        async for task in agent:
            rc = "SOMETHING_ELSE" if manner == "fails" else "OK"
            await agent.submit_result(await do(agent, task), rc=rc, reason="because" if rc != "OK" else "")
    print("ended", flush=True)


asyncio.run(main())
if manner == "lingers":
    print("lingering", flush=True)
    Path(code).read_text()
    code = "0"
sys.exit(int(code))
