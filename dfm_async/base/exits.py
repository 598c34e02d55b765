"""The end of processes and of process groups, as events."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from dfm_async.base.tasks import in_thread

_ENDED: Final = frozenset("ZXx")


async def process_exit(pid: int) -> int:
    """Wait until a child process has ended, and leave it to be reaped: until then its number is not used again.

    Where the system has no ``waitid`` (macOS with Python before 3.13), the child is reaped.

    Returns:
        Its exit code; negative for a signal. 0 if somebody else has reaped it.
    """
    handle = open_handle(pid)
    if handle is None:  # it was reaped, or this is another system than Linux
        return await in_thread(lambda: _wait(pid), f"exit-of-process-{pid}")
    try:
        await all_ended([handle])
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


async def kill_group(group: int, number: int) -> None:
    """Send a signal that ends processes to a group whose leader has ended, and wait until its last member has.

    Where there is no ``/proc``, members are not known, and nothing is waited for.

    The leader must not have been reaped: until then the number of the group cannot be another's.
    """
    while members := _members(group):
        handles = [handle for handle in map(open_handle, members) if handle is not None]
        try:
            os.killpg(group, number)
            await all_ended(handles)
        except (ProcessLookupError, PermissionError):
            return
        finally:
            for handle in handles:
                os.close(handle)


def _members(group: int) -> list[int]:
    """Return the running processes of a group."""
    found = []
    try:
        listed = os.listdir("/proc")
    except OSError:
        return []
    for name in listed:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name of the program is in brackets, and can contain anything.
                    state, _, its_group, *_ = file.read().rpartition(b")")[2].split()
            except (OSError, ValueError):
                continue  # it has ended just now
            if int(its_group) == group and state.decode() not in _ENDED:
                found.append(int(name))
    return found


def open_handle(pid: int) -> int | None:
    """Return a descriptor of a process, to be closed; None if it has ended, or the system has no such descriptors."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def all_ended(handles: list[int]) -> None:
    """Wait until the processes of all these descriptors have ended."""
    loop = asyncio.get_running_loop()
    left = set(handles)
    ended = asyncio.Event()

    def gone(handle: int) -> None:
        loop.remove_reader(handle)
        left.discard(handle)
        if not left:
            ended.set()

    for handle in handles:
        loop.add_reader(handle, gone, handle)
    try:
        if left:
            await ended.wait()
    finally:
        for handle in left:
            loop.remove_reader(handle)
