"""Launchers: how a program outside the federation is started and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from dfm_async.base.signals import Outcome
from dfm_async.base.tasks import OwnedTasks
from dfm_async.exchange.process import Process, orphan_reaper
from dfm_async.exchange.task import ProgramState, ProgramStatus, Task
from dfm_async.exchange.transports import Invitation
from dfm_async.wire.worker_output import LogRecord, Output

_log = logging.getLogger("dfm_async.program")

_LEVELS: Final = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "WARN": 30, "ERROR": 40, "CRITICAL": 50, "FATAL": 50}
_RECORD: Final = re.compile(r"^[\[(]?\d{4}-\d\d-\d\d[ T]\d\d:\d\d.{0,80}?\b(" + "|".join(_LEVELS) + r")\b")
"""A line that logging has written: it begins with a date and a time, and names its level soon after."""
_KILL_WAIT: Final = 10.0
"""How long the kernel may take to end a process that was killed, in seconds."""


class Launcher(Protocol):
    """Starts and stops a program. One task at a time calls it, except :meth:`stop`, which any number may call."""

    @property
    def launch_once(self) -> bool:
        """Whether one process serves many tasks."""
        ...

    @property
    def needs_deferred_stop(self) -> bool:
        """Whether the program may still be serving its result when its task is done, and ends by itself."""
        ...

    async def initialize(self) -> None:
        """Called once, before anything else."""
        ...

    async def launch(self, task: Task, invitation: Invitation) -> None:
        """Start the program. Raises if that fails."""
        ...

    async def stop(self, *, asked: bool = True) -> None:
        """Stop the program, and everything that it started; returns when it is gone.

        Args:
            asked: whether it was asked to end, and so gets time to do it by itself.
        """
        ...

    async def finalize(self) -> None:
        """Called once, at the end: stops what runs, and frees what is held."""
        ...

    def status(self) -> ProgramStatus:
        """Return what the program does."""
        ...

    async def ended(self) -> ProgramStatus:
        """Wait until the program that was launched last has ended."""
        ...


# subprocesses


def log_output(record: LogRecord) -> None:
    """Pass a record of a program to the logger ``dfm_async.program``."""
    if _log.isEnabledFor(record.level):
        _log.log(record.level, "%s", record.message, extra={"origin": record.origin})


def command_line(argv: Sequence[str | os.PathLike[str]] | str) -> list[str]:
    """Return the program and its arguments.

    Raises:
        TypeError: it is something else.
        ValueError: it names no program, or cannot be split.
    """
    if isinstance(argv, str):
        try:
            found = shlex.split(argv)
        except ValueError as error:
            raise ValueError(
                f"cannot parse argv {argv!r}: {error}. Pass a list to avoid shell-style parsing"
            ) from error
    elif isinstance(argv, Sequence):
        found = []
        for part in argv:
            path = os.fspath(part) if isinstance(part, (str, os.PathLike)) else None
            if not isinstance(path, str):
                raise TypeError(f"argv must consist of strings and paths, unlike {part!r}")
            found.append(path)
    else:
        raise TypeError(f"argv must be a list of strings and paths, or a string, not {argv!r}")
    if not found or not found[0]:
        raise ValueError("argv is empty: name the program to run")
    return found


def check_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy variables for a program.

    Raises:
        TypeError: their names or values are no strings.
        ValueError: a variable cannot have this name.
    """
    if not isinstance(environment, Mapping):
        raise TypeError(f"environment must be names and strings, not {environment!r}")
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"environment must be names and strings: {name!r} is {value!r}")
        if not name or "=" in name:
            raise ValueError(f"no variable of an environment can have the name {name!r}")
    return dict(environment)


def check_grace(seconds: float) -> None:
    """Raise ValueError if it is not a time that a program can get to end."""
    good = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not good or not 0 <= seconds < float("inf"):
        raise ValueError(f"shutdown_timeout must be zero or a positive number of seconds, not {seconds!r}")


class SubprocessLauncher:
    """Starts a program as a process, the leader of a group of its own.

    Args:
        argv: the program and its arguments; a string is split as a shell would, but no shell runs it.
        cwd: the folder to start it in.
        environment: variables in addition to those of this process.
        launch_once: whether one process serves many tasks; else every task gets a new one.
        shutdown_timeout: how long it gets to end by itself when it was asked to, and then once more after SIGTERM,
            before it is killed, in seconds.
        on_output: gets every line that it writes, as a log record; by default they go to the logger
            ``dfm_async.program``. Lines that are log records already keep their level.

    When this process dies, in whatever way, the program and everything in its group dies too.
    """

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]] | str,
        *,
        cwd: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        launch_once: bool = True,
        shutdown_timeout: float = 5.0,
        on_output: Callable[[LogRecord], None] = log_output,
    ) -> None:
        self._argv = command_line(argv)
        check_grace(shutdown_timeout)
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._environment = check_environment({} if environment is None else environment)
        self._launch_once = launch_once
        self._grace = shutdown_timeout
        self._on_output = on_output
        self._process: Process | None = None
        self._last = ProgramStatus(ProgramState.NOT_RUNNING)
        self._stopping: asyncio.Task[None] | None = None
        self._hurry: Outcome[None] | None = None
        self._ready = False
        self._tasks = OwnedTasks()

    @property
    def launch_once(self) -> bool:
        """Whether one process serves many tasks."""
        return self._launch_once

    @property
    def needs_deferred_stop(self) -> bool:
        """Whether the program ends by itself after its task."""
        return not self._launch_once

    async def initialize(self) -> None:
        """Make ready to launch."""
        if not self._ready:
            orphan_reaper.acquire()
            self._ready = True
            self._tasks.spawn(orphan_reaper.guard(), "replacing the reaper of orphans")

    async def launch(self, task: Task, invitation: Invitation) -> None:
        """Start the program.

        Raises:
            OSError: it cannot be started.
            RuntimeError: it still runs.
            ValueError: the transport needs another folder than ``cwd``.
        """
        if self._process is not None:
            if self._process.exit_code is None:
                raise RuntimeError(f"{self._argv[0]} still runs (process {self._process.pid})")
            await self.stop()
        if invitation.cwd is not None and self._cwd not in (None, invitation.cwd):
            raise ValueError(
                f"the program must be started in {invitation.cwd}, where it finds its configuration, but cwd is "
                f"{self._cwd}: give that folder to the transport, as FilePipeTransport(folder=...)"
            )
        environment = {**os.environ, **self._environment, **invitation.environment}
        _log.debug("launching %s for task %s", self._argv[0], task)
        self._process = Process(
            self._argv, cwd=invitation.cwd or self._cwd, environment=environment, on_output=self._output
        )

    def _output(self, item: Output, origin: str) -> None:
        if isinstance(item, LogRecord):
            self._on_output(item)
        elif isinstance(item, str):
            found = _RECORD.match(item)
            level = _LEVELS[found.group(1)] if found else logging.INFO
            self._on_output(LogRecord(level=level, message=item, origin=origin, created=time.time()))

    def status(self) -> ProgramStatus:
        """Return what the program does; when it was stopped, how it ended."""
        return self._last if self._process is None else _status_of(self._process)

    async def ended(self) -> ProgramStatus:
        """Wait until the program that was launched last has ended."""
        process = self._process
        if process is None:
            return self._last
        await process.ended()
        return _status_of(process)

    async def stop(self, *, asked: bool = True) -> None:
        """Stop the program and its group. Any number of callers may wait for it; the shortest grace period counts.

        Args:
            asked: whether it was asked to end, and so gets the grace period to do it by itself.
        """
        if self._process is None:
            return
        if self._stopping is None:
            self._hurry = Outcome()
            name = f"stop of process {self._process.pid}"
            self._stopping = asyncio.get_running_loop().create_task(self._stop(self._process, self._hurry), name=name)
        if not asked and self._hurry is not None:
            self._hurry.settle(None)
        await asyncio.shield(self._stopping)

    async def _stop(self, process: Process, hurry: Outcome[None]) -> None:
        try:
            if not await self._ends(process, hurry):
                process.signal(signal.SIGTERM)
                process.signal(signal.SIGCONT)  # a program that is suspended could not take the other one
                if not await self._ends(process):
                    process.signal(signal.SIGKILL)
                    if not await self._ends(process, limit=_KILL_WAIT):
                        _log.warning("process %d does not end although it was killed; it is left alone", process.pid)
                        return
            await process.release()
        finally:
            self._last = _status_of(process)
            self._process = None
            self._stopping = None

    async def _ends(self, process: Process, *hurry: asyncio.Future[None], limit: float | None = None) -> bool:
        """Wait for the end, for the grace period, or until a caller allows none."""
        limit = self._grace if limit is None else limit
        await asyncio.wait({process.exited, *hurry}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        return process.exit_code is not None

    async def finalize(self) -> None:
        """Stop what runs, and free what is held."""
        await self.stop()
        if self._ready:
            self._ready = False
            await self._tasks.close()
            await orphan_reaper.release()

    def __repr__(self) -> str:
        return f"<SubprocessLauncher {shlex.join(self._argv)!r}: {self.status().state.value}>"


def _status_of(process: Process) -> ProgramStatus:
    code = process.exit_code
    if code is None:
        return ProgramStatus(ProgramState.RUNNING, None, process.lines)
    return ProgramStatus(ProgramState.FAILED if code else ProgramState.SUCCESS, code, process.lines)
