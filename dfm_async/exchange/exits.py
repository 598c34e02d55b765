"""The end of a child process, as an event."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

__all__ = ["process_exit"]


async def process_exit(pid: int) -> int:
    """Waits until a child process has ended, and leaves it to be reaped: until then its number is not used again.

    Returns:
        Its exit code; negative for a signal.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def done() -> None:
        if not ended.done():
            ended.set_result(None)

    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system than Linux: a thread waits
        _wait_in_thread(pid, loop, done)
        await ended
        return _exit_code(pid)
    try:
        loop.add_reader(handle, done)
        try:
            await ended
        finally:
            loop.remove_reader(handle)
    finally:
        os.close(handle)
    return _exit_code(pid)


def _exit_code(pid: int) -> int:
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else reaped it
        return 0
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _wait_in_thread(pid: int, loop: asyncio.AbstractEventLoop, done: object) -> None:
    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if not loop.is_closed():
            loop.call_soon_threadsafe(done)  # type: ignore[arg-type]

    threading.Thread(target=wait, name=f"exit of process {pid}", daemon=True).start()
