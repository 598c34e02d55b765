"""What the system knows about a process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["memory_of"]


def memory_of(pid: int | None) -> int | None:
    """How many bytes of memory a process uses (its resident set); None where that cannot be known."""
    if pid is None:
        return None
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
