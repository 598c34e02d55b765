"""An application that forks while its sessions are connected. ``python -m tests.local.forking HOW METHOD`` starts it.

It prints the pids of its workers and of the forked child, and then waits to be killed; or it prints what the child and
its sessions have done.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import warnings
from typing import Any

import psutil

from dfm_async import DfmError, Federation, JobStatus, LocalOptions, Pipeline, Session, Yield
from tests.support.pipelines import pipeline_of

# From Python 3.12 on, a fork in a process with threads warns, and our sessions have threads now and then.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)

READY, IS_READY = os.pipe()

fed = Federation("forking")
site = fed.site("site")


@site.operation
async def echo(value: int) -> int:
    return value


@site.operation
async def pid_of_worker() -> int:
    return os.getpid()


@site.operation
async def wait() -> None:
    await asyncio.get_running_loop().create_future()


@site.operation
def compute() -> None:
    while True:
        sum(range(1000))


echoes = pipeline_of(echo, "value")
pids = pipeline_of(pid_of_worker)
with Pipeline("waits") as waits:
    Yield("begun", place="begun")
    Yield(wait(), place="never")
with Pipeline("computes") as computes:
    Yield("begun", place="begun")
    Yield(compute(), place="never")


async def worker_of(session: Session) -> int:
    return (await (await session.execute(pids)).first()).value  # type: ignore[no-any-return]


def fork(until: int) -> int:
    """Fork a child that ends when the pipe does, without any of the code of the interpreter's end."""
    pid = os.fork()
    if pid == 0:
        stay(until)
        os._exit(0)
    os.read(READY, 1)
    return pid


def stay(until: int) -> None:
    """In the child: it is there, and waits."""
    os.write(IS_READY, b"+")
    os.read(until, 1)


def fork_by(how: str, until: int) -> int:
    if how == "os.fork":
        return fork(until)
    if how == "thread":
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(fork(until)))
        thread.start()
        thread.join()
        return found[0]
    child = multiprocessing.get_context("fork").Process(target=stay, args=(until,), daemon=True)
    child.start()
    assert child.pid is not None
    os.read(READY, 1)
    return child.pid


async def killed(how: str, options: LocalOptions, until: int) -> None:
    async with Session(fed, options=options) as first, Session(fed, options=options) as second:
        workers = [await worker_of(first), await worker_of(second)]
        for session, pipeline in ((first, waits), (second, computes)):
            await (await session.execute(pipeline)).first("begun")
        child = await asyncio.to_thread(fork_by, how, until) if how == "thread" else fork_by(how, until)
        print(child, *workers, flush=True)
        await asyncio.get_running_loop().create_future()


async def closes(options: LocalOptions, until: int) -> None:
    async with Session(fed, options=options) as session:
        await worker_of(session)
        child = fork(until)
    print("closed", psutil.Process(child).is_running(), flush=True)


async def child_ends(how: str, options: LocalOptions) -> None:
    async with Session(fed, options=options) as session:
        waiting = await session.execute(waits)
        await waiting.first("begun")
        worker = await worker_of(session)
        pid = os.fork()
        if pid == 0:
            if how == "exits":
                sys.exit(3)
            elif how == "raises":
                raise ValueError("in the child")
            elif how == "uses":
                try:
                    await session.execute(waits)
                except DfmError:
                    await session.close()
                    os._exit(3)
            return
        await asyncio.to_thread(os.waitpid, pid, 0)
        values = [(await (await session.execute(echoes, {"value": n})).first()).value for n in range(20)]
        same = await worker_of(session) == worker
        print(values == list(range(20)), same, waiting.status is JobStatus.RUNNING, flush=True)


def own_session() -> None:
    async def run() -> None:
        async with Session(fed) as session:
            assert (await (await session.execute(echoes, {"value": 7})).first()).value == 7

    asyncio.run(run())


async def child_connects(options: LocalOptions) -> None:
    async with Session(fed, options=options) as session:
        worker = await worker_of(session)
        child = multiprocessing.get_context("fork").Process(target=own_session)
        child.start()
        await asyncio.to_thread(child.join)
        print(child.exitcode == 0, await worker_of(session) == worker, flush=True)


async def main(how: str, method: Any) -> None:
    options = LocalOptions(start_method=method)
    here, there = os.pipe()  # ours closes with us, and the child has none
    os.register_at_fork(after_in_child=lambda: os.close(there))
    if how in ("os.fork", "thread", "multiprocessing"):
        await killed(how, options, here)
    elif how == "closes":
        await closes(options, here)
    elif how == "connects":
        await child_connects(options)
    else:
        await child_ends(how, options)
    os.close(there)


if __name__ == "__main__":
    owner = os.getpid()
    asyncio.run(main(*sys.argv[1:]))
    if os.getpid() == owner:
        print("ended", flush=True)
