"""What ``dfm-async doctor`` looks at on the machine. Every check tells one thing, and what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dfm_async.model.findings import Finding, State
from dfm_async.workers.start import choose_method

__all__ = ["CHECKS"]

_MIB: Final = 1024 * 1024
_FILES: Final = (256, 1024)
"""With fewer open files than the first nothing larger runs; the second is enough for most."""
_SOCKET_PATH: Final = 104
"""How many characters the path of a socket may have, on the strictest system."""
_SOCKET_NAME: Final = len("/pymp-12345678/listener-12345678")


def _python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"
    if platform.python_implementation() != "CPython":
        yield Finding("Python", "warn", detail, "only CPython is tested")
    else:
        yield Finding("Python", "ok", detail)


def _system() -> Iterator[Finding]:
    detail = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("system", "ok", detail)
    elif platform.system() == "Darwin":
        yield Finding("system", "warn", detail, "only Linux is tested; federations on FLARE need it")
    else:
        yield Finding("system", "bad", detail, "worker processes need Linux; macOS is not tested")


def _start_method() -> Iterator[Finding]:
    method = choose_method(None)
    if method == "forkserver":
        yield Finding("start method", "ok", method)
    else:
        yield Finding("start method", "warn", method, "processes start more slowly than with a fork server")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = _limit(soft)
    if soft == resource.RLIM_INFINITY or soft >= _FILES[1]:
        yield Finding("open files", "ok", told)
        return
    state: State = "bad" if soft < _FILES[0] else "warn"
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    advice = f"ulimit -n {most}" if most >= _FILES[0] else "have the hard limit raised: each worker needs a few"
    yield Finding("open files", state, f"{told} (hard limit {_limit(hard)})", advice)


def _processes() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or soft >= 256:
        yield Finding("processes", "ok", _limit(soft))
    else:
        yield Finding("processes", "warn", _limit(soft), "ulimit -u 4096: every site has worker processes")


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number:,}"


def _shared_memory() -> Iterator[Finding]:
    create = getattr(os, "memfd_create", None)
    slow = "large values go through sockets, which is slower"
    if create is None:
        yield Finding("shared memory", "warn", "this system has no memfd", slow)
    else:
        try:
            descriptor = create("dfm-doctor")
            try:
                os.truncate(descriptor, _MIB)
            finally:
                os.close(descriptor)
            yield Finding("shared memory", "ok", "memfd works")
        except OSError as error:
            yield Finding("shared memory", "warn", f"memfd: {error.strerror}", slow)
    folder = Path("/dev/shm")  # noqa: S108 - looked at, not used
    if folder.is_dir():
        usage = shutil.disk_usage(folder)
        detail = f"{_size(usage.free)} of {_size(usage.total)} free; only operations of your own may need it"
        small = usage.free < 16 * _MIB
        advice = "if they do: docker run --shm-size=1g" if small else ""
        yield Finding(str(folder), "warn" if small else "ok", detail, advice)


def _inotify() -> Iterator[Finding]:
    folder = Path("/proc/sys/fs/inotify")
    try:
        watches = int((folder / "max_user_watches").read_text())
        instances = int((folder / "max_user_instances").read_text())
    except (OSError, ValueError):
        return  # another system
    detail = f"{instances:,} instances, {watches:,} watches"
    if instances < 64 or watches < 1024:
        advice = "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536 (for file pipes)"
        yield Finding("inotify", "warn", detail, advice)
    else:
        yield Finding("inotify", "ok", detail)


def _processors() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{usable} usable of {os.cpu_count()}"
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
        detail += f", limited to {int(quota[0]) / int(quota[1]):g}"
    if usable < 2:
        yield Finding("processors", "warn", detail, "sites share one processor: they cannot run at the same time")
    else:
        yield Finding("processors", "ok", detail)


def _memory() -> Iterator[Finding]:
    found = _meminfo()
    if not found:
        return  # another system
    total, free = found["MemTotal"], found.get("MemAvailable", 0)
    detail = f"{_size(free)} of {_size(total)} available"
    limit = _cgroup("memory.max")
    if limit.isdigit():
        used = _cgroup("memory.current")
        free = min(free, int(limit) - int(used)) if used.isdigit() else min(free, int(limit))
        detail += f"; limited to {_size(int(limit))}"
    if free < 256 * _MIB:
        yield Finding("memory", "warn", detail, "a worker process needs about 30 MiB, and what your operations need")
    else:
        yield Finding("memory", "ok", detail)


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts if len(words) == 3}


def _cgroup(name: str) -> str:
    try:
        return (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return ""


def _temporary() -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix="dfm-doctor-") as made:
            (Path(made) / "file").write_bytes(b"x")
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding("temporary files", "bad", str(error), "set TMPDIR to a folder that you can write to")
        return
    detail = f"{folder}, {_size(free)} free"
    if platform.system() != "Linux" and len(folder) + _SOCKET_NAME > _SOCKET_PATH:  # there, sockets are files
        advice = "set TMPDIR to a shorter path: sockets of worker processes have names of at most 104 characters"
        yield Finding("temporary files", "bad", detail, advice)
    elif free < 64 * _MIB:
        yield Finding("temporary files", "warn", detail, "make room, or set TMPDIR to another folder")
    else:
        yield Finding("temporary files", "ok", detail)


def _sqlite() -> Iterator[Finding]:
    detail = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 24, 0):
        yield Finding("SQLite", "bad", detail, "stores need SQLite 3.24 or newer: use a newer Python or library")
    elif sqlite3.threadsafety == 0:
        yield Finding("SQLite", "bad", f"{detail}, not safe for threads", "stores need a build that is")
    else:
        yield Finding("SQLite", "ok", detail)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.1f} {unit}" if unit == "GiB" else f"{number:.0f} {unit}"


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _python,
    _system,
    _start_method,
    _open_files,
    _processes,
    _shared_memory,
    _inotify,
    _processors,
    _memory,
    _temporary,
    _sqlite,
)
"""Everything that is looked at, besides packages and whether jobs run."""
