"""How worker processes start: from a fork server of our own, or by spawn; never importing the user's ``__main__``.

The standard library imports the main script again in every child, so that it needs a ``__main__`` guard. Our workers
get what they need from there by value, so their starters leave that step out.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import select
import signal
import sys
from multiprocessing import context, popen_fork, popen_spawn_posix, process, reduction, spawn, util
from typing import Any, Literal

from dfm_async.base.descriptors import occupy_standard_streams
from dfm_async.workers.fork_server import (
    ForkServer,
    InheritedDescriptor,
    Started,
    exit_code_of,
    interpreter_options,
    kill_group,
    search_path,
    tracker_descriptor,
)


def choose_method(asked: Literal["forkserver", "spawn"] | None) -> Literal["forkserver", "spawn"]:
    """Return the start method to use: the one asked for, else forkserver where there is one."""
    if asked is not None:
        return asked
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _pickled(process_obj: Any, popen: Any) -> bytes:
    """What the child reads first: how to set itself up, and the process object."""
    current: Any = process.current_process()
    data: dict[str, Any] = {
        "name": process_obj.name,
        "authkey": current.authkey,
        "sys_path": search_path(),
        "sys_argv": sys.argv[:1],  # our own arguments are not theirs, and there may be secrets among them
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined] # the standard library has no public name for it
        "start_method": multiprocessing.get_start_method(),
    }
    with contextlib.suppress(FileNotFoundError):  # the folder was deleted: the child is in the same one then
        data["dir"] = os.getcwd()
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump(data, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue()


class _ForkServerPopen(popen_fork.Popen):
    method = "forkserver"
    DupFd = InheritedDescriptor
    _started: Started

    def __init__(self, process_obj: Any) -> None:
        self._fds: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, number: int) -> int:
        """Send a descriptor with the request; return its index there."""
        self._fds.append(number)
        return len(self._fds) - 1

    def _launch(self, process_obj: Any) -> None:
        data = _pickled(process_obj, self)
        started = self._started = process_obj.fork_server.start(self._fds, process_obj)
        try:
            started.write(data)
        except BaseException:
            kill_group(started.pid)
            started.close()
            raise
        self.pid, self.sentinel = started.pid, started.status
        self.finalizer = util.Finalize(self, started.close)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, if it has ended; 255 if the fork server has, which alone could know."""
        if self.returncode is None:
            if flag == os.WNOHANG and not _readable(self.sentinel):
                return None
            code = self._started.exit_code()
            if code is None:  # the worker has no parent any longer that could end its group
                kill_group(self.pid)
                code = 255
            self.returncode = code
        return self.returncode


def _readable(number: int) -> bool:
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


class _SpawnPopen(popen_spawn_posix.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker = tracker_descriptor()
        self._fds.append(tracker)
        data = _pickled(process_obj, self)
        started = Started()
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=started.theirs[0])
            if not getattr(sys, "frozen", False):
                command[1 : command.index("-c")] = interpreter_options()
            self._fds.extend(started.theirs)
            self.pid = started.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, self._fds)
            started.sent()
            self.sentinel = started.open_handle()
            started.write(data)
        except BaseException:
            started.close()
            if hasattr(self, "pid"):
                os.kill(self.pid, signal.SIGKILL)
                exit_code_of(self.pid)
            raise
        self.finalizer = util.Finalize(self, started.close)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # other code has waited for it
                self.returncode = exit_code_of(self.pid, flag)
        return self.returncode


class WorkerProcess(context.ForkServerProcess):
    """A process that starts as described above."""

    fork_server: ForkServer | None
    abandoned: bool
    """Whether nobody waits any longer for it to start; see :meth:`ForkServer.abandon`."""

    def __init__(self, fork_server: ForkServer | None, **options: Any) -> None:
        super().__init__(**options)
        self.fork_server = fork_server
        self.abandoned = False
        self._start_method = "spawn" if fork_server is None else "forkserver"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _SpawnPopen(process_obj) if process_obj.fork_server is None else _ForkServerPopen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fork_server": None}

    def run(self) -> None:
        """Run the target, in the child. Its event loop must not get the number of a standard stream."""
        occupy_standard_streams()
        super().run()

    def start(self) -> None:
        """Start the process. It is ours to end: multiprocessing shall not wait for it when the interpreter exits."""
        super().start()
        multiprocessing.process._children.discard(self)  # type: ignore[attr-defined] # noqa: SLF001 - nor for this
