"""The end of a child process, as an event."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

__all__ = ["process_exit"]


async def process_exit(pid: int) -> int:
    """Wait until a child process has ended, and leave it to be reaped: until then its number is not used again.

    Where the system has no ``waitid`` (macOS with Python before 3.13), the child is reaped.

    Returns:
        Its exit code; negative for a signal. 0 if somebody else has reaped it.
    """
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system than Linux: a thread waits
        return await _wait_in_thread(pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
    finally:
        os.close(handle)
    return _wait(pid, os.WNOHANG)


def _wait(pid: int, flags: int = 0) -> int:
    """Wait for the end of a child in this thread, and return its exit code."""
    try:
        if not hasattr(os, "waitid"):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | flags)
    except ChildProcessError:  # somebody else reaped it
        return 0
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


async def _wait_in_thread(pid: int) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def settle(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = 0
        try:
            code = _wait(pid)
        finally:  # whatever happens: else the waiter never wakes
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, code)

    threading.Thread(target=wait, name=f"exit of process {pid}", daemon=True).start()
    return await ended
