"""How many cores, and how much memory, this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores that this process may use: by its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota() or cores))


def _quota() -> int | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else math.ceil(int(limit) / int(period))
    except (OSError, ValueError):
        return None


def usable_memory() -> int:
    """Return the number of bytes of memory that this process may use: of the machine, or of its control group."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2 or 1 of control groups
        with contextlib.suppress(OSError, ValueError):
            return min(there, int(Path("/sys/fs/cgroup", name).read_text()))
    return there
