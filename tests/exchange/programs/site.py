"""A site with a program at every moment of an exchange, that dies when all of them are there."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from dfm_async.exchange import LauncherExecutor, SubprocessLauncher, Task
from dfm_async.exchange.process import OrphanReaper, orphan_reaper
from dfm_async.wire.worker_output import LogRecord

way, manner, folder, *moments = sys.argv[1:]
WITNESS = str(Path(__file__).with_name("witness.py"))
DATA = bytes(6 * 1024 * 1024)


class Death(Exception):
    """What nobody handles."""


async def run(moment: str, there: asyncio.Event) -> None:
    def listen(record: LogRecord) -> None:
        if record.message == f"at {moment}":
            there.set()

    launcher = SubprocessLauncher([sys.executable, WITNESS, moment, manner, folder], on_output=listen)
    executor = LauncherExecutor(launcher)
    await executor.initialize()
    await executor.execute(Task("train", DATA, round=1, total_rounds=1))
    await asyncio.get_running_loop().create_future()


async def replace_the_reaper() -> None:
    """Kills the reaper, and waits for the next one."""
    replaced = asyncio.Event()
    replace = OrphanReaper._replace

    def and_tell(self: OrphanReaper, process: subprocess.Popen[bytes]) -> None:
        replace(self, process)
        replaced.set()

    OrphanReaper._replace = and_tell  # type: ignore[method-assign]
    assert orphan_reaper._process is not None
    orphan_reaper._process.kill()
    await replaced.wait()


async def main() -> None:
    events = [asyncio.Event() for _ in moments]
    tasks = [asyncio.create_task(run(moment, event)) for moment, event in zip(moments, events, strict=True)]
    there = asyncio.gather(*(event.wait() for event in events))
    waiting: set[asyncio.Future[Any]] = {*tasks, there}
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        each.result()
    print("dying", flush=True)
    if way == "the reaper first":
        await replace_the_reaper()
    if way == "with its reaper":
        assert orphan_reaper._process is not None
        orphan_reaper._process.kill()
    if way in ("SIGKILL", "the reaper first", "with its reaper"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif way == "os._exit":
        os._exit(5)
    elif way == "exec":
        os.execv("/bin/true", ["true"])
    else:
        raise Death


asyncio.run(main())
