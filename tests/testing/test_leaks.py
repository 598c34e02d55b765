"""What is left behind is found and named."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from dfm_async import Federation, Session
from dfm_async.testing import Faults, Gate, no_leaks, override, returns
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of

fed = Federation("tidy")
lab = fed.site("lab")


@lab.operation
def echo(data: bytes) -> bytes:
    return data


echoes = pipeline_of(echo, "data")


async def test_a_session_leaves_nothing_behind(connect: Connect) -> None:
    with no_leaks():
        with Gate() as gate:
            async with connect(fed) as session:
                faults = Faults(session)
                faults.delay("echo", 0)
                job = await session.execute(echoes, [{"data": bytes(size)} for size in (1, 1_000_000)])
                assert len(await job.collect()) == 2
                with override(fed, "echo", returns(gate)):
                    await (await session.execute(echoes, {"data": b""}))
                del job
        del session, faults


async def test_a_task_is_found() -> None:
    with pytest.raises(AssertionError, match=r"task 'forgotten' of Event.wait, at .*locks.py") as caught, no_leaks():
        task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        await asyncio.sleep(0)
    assert str(caught.value).startswith("the block left these open; close or cancel them:\n  task")
    task.cancel()
    await asyncio.wait([task])


def test_a_thread_is_found() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(AssertionError, match="thread 'forgotten'"), no_leaks():
        thread.start()
    stop.set()
    thread.join()


def test_ending_thread_is_waited_for() -> None:
    with no_leaks():
        stop = threading.Event()
        threading.Thread(target=stop.wait, name="dfm-leaving").start()
        threading.Thread(target=stop.set, name="dfm-letting-go").start()


def test_process_is_found_even_as_a_zombie() -> None:
    with pytest.raises(AssertionError, match=r"process \d+: .*sys.stdin.read"), no_leaks():
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    with pytest.raises(AssertionError, match="zombie"), no_leaks():
        child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.waitpid(child, 0)


def test_a_descriptor_is_found() -> None:
    with pytest.raises(AssertionError, match=r"descriptor \d+: /dev/null"), no_leaks():
        number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)


def test_a_socket_is_found_with_its_address() -> None:
    with pytest.raises(AssertionError, match=r"socket, descriptor \d+: AF_INET \('127.0.0.1', \d+\)"), no_leaks():
        server = socket.create_server(("127.0.0.1", 0))
    server.close()


def test_shared_memory_is_found() -> None:
    with pytest.raises(AssertionError, match="shared memory /dev/shm/dfm_forgotten"), no_leaks():
        memory = shared_memory.SharedMemory("dfm_forgotten", create=True, size=100)
    memory.close()
    memory.unlink()


def test_shared_memory_of_unrelated_processes_is_not_a_leak() -> None:
    code = """
import os, sys
from multiprocessing import shared_memory
if os.fork() == 0:  # an orphan: nobody's child
    sys.stdin.readline()
    memory = shared_memory.SharedMemory(create=True, size=100)
    print(memory.name, flush=True)
    sys.stdin.read()
    memory.close()
    memory.unlink()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.wait() == 0
        with no_leaks():
            other.stdin.write("go\n")
            other.stdin.flush()
            assert Path("/dev/shm", other.stdout.readline().strip()).exists()
        other.stdin.close()
        assert other.stdout.read() == ""  # it has ended


def test_a_semaphore_that_a_killed_process_leaves_is_not_a_leak() -> None:
    left = Path("/dev/shm/sem.dfm_left")
    try:
        with no_leaks():
            left.write_bytes(bytes(32))
    finally:
        left.unlink()


def test_existing_resources_are_not_leaks() -> None:
    left, right = socket.socketpair()
    with no_leaks():
        pass
    left.close()
    right.close()


async def test_a_session_that_is_open_is_a_leak() -> None:
    session = Session(fed)
    with pytest.raises(AssertionError, match="task 'dfm_async session'"), no_leaks():
        await session.connect()
    await session.close()
