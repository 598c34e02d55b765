"""Whether the kernel has ended processes because memory ran out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Count the kills that this process can see: on the machine, and in its own control groups.

    One kill may count more than once: only growth is meaningful. 0 where there are no such counters.
    """
    return _counter(proc / "vmstat") + sum(_counter(file) for file in _events(proc / "self" / "cgroup", cgroups))


def _events(memberships: Path, cgroups: Path) -> list[Path]:
    """Return the files with the counters of the control groups of this process (version 2 or 1)."""
    found = []
    for line in _read(memberships).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            base, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        # Inside a container the path may be one that only the outside can see; then the root is our group.
        inner = base / path.lstrip("/") / name
        found.append(inner if inner.exists() else base / name)
    return found


def _counter(file: Path) -> int:
    for line in _read(file).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def memory_of(pid: int | None) -> int | None:
    """Return the resident memory of a process in bytes; None where it is unknown."""
    if pid is None:
        return None
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
