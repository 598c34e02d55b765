"""How worker processes start: from a fork server of our own, or by spawn; never importing the user's ``__main__``.

The standard library imports the main script again in every child, so that it needs a ``__main__`` guard. Our workers
get what they need from there by value, so their starters leave that step out.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import threading
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from typing import Any, Literal

__all__ = ["ForkServer", "WorkerProcess", "choose_method"]

_PRELOAD = ["dfm_async.workers.worker"]


def choose_method(asked: Literal["forkserver", "spawn"] | None) -> Literal["forkserver", "spawn"]:
    """The start method to use: the one asked for, else forkserver where there is one."""
    if asked is not None:
        return asked
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _pickled(process: Any, popen: Any) -> bytes:
    """What the child reads first: how to set itself up, and the process object."""
    data = spawn.get_preparation_data(process.name)
    data.pop("init_main_from_name", None)
    data.pop("init_main_from_path", None)
    data["sys_argv"] = data["sys_argv"][:1]  # our own arguments are not theirs, and there may be secrets among them
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump(data, buffer)
        reduction.dump(process, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue()


class ForkServer:
    """A fork server with the runtime preloaded, shared by the sessions of this process; the last to leave ends it."""

    _lock = threading.Lock()
    _shared: ForkServer | None = None

    def __init__(self) -> None:
        self.server = forkserver.ForkServer()
        self.users = 0

    @classmethod
    def acquire(cls, preload: tuple[str, ...]) -> ForkServer:
        """Gives the fork server; it is started when the first process is."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared.users += 1
            cls._shared.server.set_forkserver_preload([*_PRELOAD, *preload])
            return cls._shared

    def warm(self) -> None:
        """Starts the server, so that the first worker need not wait for it. Blocks for a moment."""
        self.server.ensure_running()

    def release(self) -> None:
        """Ends the server if nobody else uses it. Blocks for a moment."""
        with self._lock:
            self.users -= 1
            if self.users:
                return
            ForkServer._shared = None
        self.server._stop()  # type: ignore[attr-defined] # noqa: SLF001 - the standard library has no public name for it


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _ForkServerPopen(popen_forkserver.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        data = _pickled(process_obj, self)
        self.sentinel, write_end = process_obj.fork_server.server.connect_to_new_process(self._fds)
        kept = os.dup(write_end)  # the child sees by it whether we are alive
        self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))
        with open(write_end, "wb", closefd=True) as file:
            file.write(data)
        self.pid = forkserver.read_signed(self.sentinel)


class _SpawnPopen(popen_spawn_posix.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None  # noqa: S101 - getfd starts the tracker
        self._fds.append(tracker)
        data = _pickled(process_obj, self)
        sentinel, child_write = os.pipe()
        child_read, data_write = os.pipe()
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_read)
            self._fds.extend([child_read, child_write])
            self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, self._fds)
            self.sentinel = sentinel
            with open(data_write, "wb", closefd=False) as file:
                file.write(data)
        finally:
            self.finalizer = util.Finalize(self, _close, (sentinel, data_write))
            os.close(child_read)
            os.close(child_write)


class WorkerProcess(context.ForkServerProcess):
    """A process that starts as described above."""

    fork_server: ForkServer | None

    def __init__(self, fork_server: ForkServer | None, **options: Any) -> None:
        super().__init__(**options)
        self.fork_server = fork_server
        self._start_method = "spawn" if fork_server is None else "forkserver"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _SpawnPopen(process_obj) if process_obj.fork_server is None else _ForkServerPopen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fork_server": None}

    def start(self) -> None:
        """Starts the process. It is ours to end: multiprocessing shall not wait for it when the interpreter exits."""
        super().start()
        multiprocessing.process._children.discard(self)  # type: ignore[attr-defined] # noqa: SLF001 - nor for this
