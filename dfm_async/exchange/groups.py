"""The end of everything in a process group, as an event. Where there is no ``/proc``, only of what we started."""

from __future__ import annotations

import asyncio
import os
from typing import Final

__all__ = ["all_ended", "kill_group", "open_handle"]

_ENDED: Final = frozenset("ZXx")


async def kill_group(group: int, number: int) -> None:
    """Sends a signal that ends processes to a group whose leader has ended, and waits until its last member has.

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
    """The processes of a group that live."""
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
    """A descriptor of a process, to be closed; None if it has ended, or the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def all_ended(handles: list[int]) -> None:
    """Waits until the processes of all these descriptors have ended."""
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
