"""Processes that belong together, wherever they went: each carries a mark in its environment, and passes it on.

FLARE starts its jobs in sessions of their own, so that neither groups nor parents tell who belongs to whom.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

from dfm_async.exchange.groups import all_ended, open_handle

if TYPE_CHECKING:
    import psutil

__all__ = ["MARK", "end_marked", "marked"]

MARK: Final = "DFM_FLARE_MARK"
"""The variable that marks them."""


def marked(mark: str) -> list[psutil.Process]:
    """The processes with a mark, and those with one below it, such as ``f7a1/home`` below ``f7a1``."""
    import psutil  # comes with nvflare

    found = []
    for process in psutil.process_iter(["environ"]):
        theirs = (process.info["environ"] or {}).get(MARK)  # none of one that has ended, or is another user's
        if theirs is not None and (theirs == mark or theirs.startswith(f"{mark}/")) and process.pid != os.getpid():
            found.append(process)
    return found


async def end_marked(mark: str) -> None:
    """Kills all processes with a mark, and waits until none is left, also of those that they start meanwhile."""
    import psutil

    while processes := marked(mark):
        handles = [handle for process in processes if (handle := open_handle(process.pid)) is not None]
        try:
            # Only now: the number of one that has ended may be another's.
            processes = [process for process in processes if process.is_running()]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if len(handles) == len(processes):
                await all_ended(handles)
            else:  # another system than Linux, or one has ended just now
                await asyncio.to_thread(psutil.wait_procs, processes)
        finally:
            for handle in handles:
                os.close(handle)
