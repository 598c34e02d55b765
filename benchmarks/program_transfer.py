"""Large results of programs arrive at the speed of a socket, and use no more memory than they need.

A program answers with an array of 256 MiB; our executor pulls it in chunks, checks them, and keeps the array in
memory. The peer is a process that sends as many bytes over a Unix socket, with nothing around them, to another that
reads them into memory as fresh as ours; once as sockets are made, and once with a buffer in the kernel as large as
ours. Claimed: at least half of the plain one's bandwidth.

Memory is how far the resident size of a process with nothing but an executor rises above what it was before and the
array itself; with the array in a file, above what it was before. What is used for a moment while the array is not
whole shows only in the second. Claimed: 16 MiB, the window of chunks and the rest.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import programs
from benchmarks.common import Figure, Options, Target, interleave, main
from benchmarks.external import ROOT, environment
from dfm_async.exchange import ExecutorOptions, LauncherExecutor, Task

MIB = 1 << 20
SIZE = 256 * MIB
ANY = ExecutorOptions(other_tasks=("*",))
_spawn = multiprocessing.get_context("spawn")


def _send(connection: socket.socket) -> None:
    import numpy

    array = numpy.arange(SIZE // 8, dtype="f8").data
    while connection.recv(1):
        connection.sendall(array)


class _Plain:
    """A process that sends the array over a socket, and nothing else.

    Args:
        buffer: how much the kernel may hold; None leaves that to the system.
    """

    def __init__(self, buffer: int | None = None) -> None:
        self._buffer = buffer

    def __enter__(self) -> _Plain:
        self._socket, theirs = socket.socketpair()
        if self._buffer is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer)
        self._process = _spawn.Process(target=_send, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.join(5)

    async def once(self) -> float:
        """Nothing else runs meanwhile: it is as fast as it goes."""
        start = time.perf_counter()
        self._socket.send(b"x")
        memory = memoryview(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        done = 0
        while done < SIZE:
            done += self._socket.recv_into(memory[done:])
        return SIZE / 1e9 / (time.perf_counter() - start)


async def _ours(executor: LauncherExecutor) -> float:
    start = time.perf_counter()
    result = await executor.execute(Task("array", SIZE))
    seconds = time.perf_counter() - start
    _check(result.data)
    return SIZE / 1e9 / seconds


def _check(array: Any) -> None:
    if array.nbytes != SIZE or array[-1] != SIZE // 8 - 1:
        raise RuntimeError("another array came")


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the system does not tell {name}")


def _forget_highest() -> float:
    """Begins to look for the highest value anew; gives the current one."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


async def _memory(in_file: bool) -> float:
    """How far the resident size of this process rises, in MiB; of the array it holds only what is in memory."""
    async with LauncherExecutor(programs.launcher("work"), ANY) as executor:
        await executor.execute(Task("array", MIB))  # loads what is needed
        before = _forget_highest()
        if in_file:
            with tempfile.TemporaryDirectory() as folder:
                offered = await executor.offer(Task("array", SIZE), ["here"])
                result = await offered.pull("here", folder=folder)
                peak = _resident("VmHWM")
        else:
            result = await executor.execute(Task("array", SIZE))
            peak = _resident("VmHWM") - SIZE / MIB
        _check(result.data)
        return peak - before


def _memory_of_another(in_file: bool) -> float:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.program_transfer", "memory", json.dumps(in_file)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, timeout=120, check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


async def run(options: Options) -> list[Figure]:
    with _Plain() as plain, _Plain(MIB) as large:
        async with LauncherExecutor(programs.launcher("work"), ANY) as executor:
            found = await interleave(
                {"ours": lambda: _ours(executor), "plain": plain.once, "large buffer": large.once}, 2 * options.repeats
            )
    ours = found.pop("ours")
    figures = [Figure("result of 256 MiB", "GB/s", ours, found, Target(0.5, "plain", at_least=True))]
    for in_file, name in ((False, "in memory, without the array"), (True, "in a file")):
        peak = await asyncio.to_thread(_memory_of_another, in_file)
        figures.append(Figure(f"memory for a result of 256 MiB, {name}", "MiB", peak, target=Target(16)))
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        print(asyncio.run(_memory(json.loads(sys.argv[2]))))
    else:
        main("program_transfer", __doc__, run)
