"""Leaks of a test: tasks, threads, processes, descriptors, shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from dfm_async.workers.fork_server import ForkServer

_GRACE = 5.0
"""The number of seconds that an ending thread may take."""
_RUNNER = "TestRunner._"
"""The names of the tasks in which anyio runs tests and fixtures."""


class ResourceSnapshot:
    """The resources of this process at some moment."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._processes = _descendants()
        self._descriptors = _descriptors()
        self._memory = _shared_memory()

    def leaks(self) -> list[str]:
        """Describe new resources. Waits a little for ending threads."""
        gc.collect()  # what only waits to be collected was not forgotten
        found = []
        for thread in threading.enumerate():
            if thread not in self._threads and thread is not threading.current_thread():
                thread.join(_GRACE if thread.name.startswith("dfm-") else 0.1)
                if thread.is_alive():
                    found.append(f"thread {thread.name!r}")
        known = _kept()
        processes = _descendants()
        found += [f"process {pid}: {processes[pid]}" for pid in processes.keys() - self._processes.keys() - known]
        new = _descriptors().items() - self._descriptors.items()
        found += [_describe(number, what) for number, what in sorted(new) if number not in known]
        found += [f"shared memory {name}" for name in _not_of_others(_shared_memory() - self._memory)]
        return found


@contextmanager
def no_leaks() -> Iterator[None]:
    """Check that a block leaves no task, thread, child process, descriptor or shared memory behind.

    Raises:
        AssertionError: the block left something behind; names all of it.
    """
    before, ours = ResourceSnapshot(), all_tasks()
    yield
    left = [*tasks(ours), *before.leaks()]
    if left:
        raise AssertionError(leak_report("the block", left))


def leak_report(who: str, left: list[str]) -> str:
    """Return the message about leaks."""
    return "\n".join([f"{who} left these open; close or cancel them:", *(f"  {found}" for found in left)])


def all_tasks() -> set[asyncio.Task[Any]]:
    """Return the tasks of the running loop; none outside of a loop."""
    try:
        return asyncio.all_tasks()
    except RuntimeError:
        return set()


def tasks(before: set[asyncio.Task[Any]]) -> list[str]:
    """Describe the tasks of the running loop that were not there before."""
    current = asyncio.current_task() if all_tasks() else None
    left = all_tasks() - before - {current}
    return sorted(_describe_task(task) for task in left if not _name(task).startswith(_RUNNER))


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_coro()))


def _describe_task(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f", at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
    return f"task {task.get_name()!r} of {_name(task)}{where}"


# processes


def _kept() -> set[int]:
    """Return shared processes and descriptors: those of multiprocessing, and of a fork server that is still used."""
    tracker: Any = resource_tracker._resource_tracker  # noqa: SLF001 - there is no public name for it
    shared = ForkServer._shared  # noqa: SLF001 - nor for this
    found = {number for number in (tracker._pid, tracker._fd) if number is not None}  # noqa: SLF001 - as above
    return found if shared is None else found | shared.kept


def _descendants() -> dict[int, str]:
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for pid, parent, name in _listed():
        parents[pid], names[pid] = parent, name
    found: dict[int, str] = {}
    family = {os.getpid()}
    while family:
        family = {pid for pid, parent in parents.items() if parent in family}
        found.update({pid: names[pid] for pid in family})
    return found


def _listed() -> Iterator[tuple[int, int, str]]:
    if not Path("/proc/self/stat").exists():
        done = subprocess.run(["ps", "-axo", "pid=,ppid=,command="], capture_output=True, text=True, check=True)  # noqa: S607 - wherever it is
        for line in done.stdout.splitlines():
            pid, parent, *words = line.split(None, 2)
            command = " ".join(words)
            if not command.startswith("ps "):
                yield int(pid), int(parent), command
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended in the meantime
                name, _, rest = (folder / "stat").read_text().partition(" (")[2].rpartition(") ")
                state, parent = rest.split()[:2]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                ended = " (a zombie: it has ended, but was not waited for)" if state == "Z" else ""
                yield int(folder.name), int(parent), (command or name)[:120] + ended


# descriptors


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            status = os.fstat(int(name))
            try:
                what = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                what = f"{stat.filemode(status.st_mode)} {status.st_dev}:{status.st_ino}"
            found[int(name)] = what
    return found


def _describe(number: int, what: str) -> str:
    kind = "descriptor"
    if "memfd:" in what:
        kind = "shared memory, descriptor"
    elif what.startswith("socket:"):
        kind = "socket, descriptor"
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            ends = [repr(end) for end in (found.getsockname(), _peer(found)) if end]
            what = f"{found.family.name} {' to '.join(ends)}".strip()
    return f"{kind} {number}: {what}"


def _peer(found: socket.socket) -> Any:
    try:
        return found.getpeername()
    except OSError:
        return None


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")  # noqa: S108 - where the kernel shows it
    return {str(path) for path in folder.iterdir()} if folder.exists() else set()


def _not_of_others(names: set[str]) -> list[str]:
    """Leave out files of unrelated processes: the folder is shared by the whole machine.

    Semaphores are left out that nobody uses: they are what killed processes leave, and a test that leaks one uses it.
    """
    family = {os.getpid(), *_descendants()} if names else set()
    ours: set[str] = set()
    others: set[str] = set()
    for folder in Path("/proc").iterdir() if names else ():
        if folder.name.isdigit():
            users = ours if int(folder.name) in family else others
            with contextlib.suppress(OSError):  # it has ended in the meantime, or is none of our business
                maps = (folder / "maps").read_text()
                users.update(name for name in names if name in maps)
    unused = {name for name in names - ours if Path(name).name.startswith("sem.")}
    return sorted(names - others - unused)
