"""Servers and clients of FLARE on this machine: their processes, from the start to the end.

Each process of a federation has a mark in its environment, and passes it on to its children: FLARE starts its jobs in
sessions of their own, so that neither process groups nor parents identify them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from dfm_async.base.exits import all_ended, open_handle
from dfm_async.base.tasks import OwnedTasks, completed
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.project import require_nvflare
from dfm_async.errors import DeploymentError
from dfm_async.errors.root import exit_text
from dfm_async.exchange.process import Process, end_watchdog, orphan_reaper, start_watchdog
from dfm_async.wire.worker_output import Output

if TYPE_CHECKING:
    import psutil

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINES: Final = 20
"""The number of output lines that an error shows."""

_MARK: Final = "DFM_FLARE_MARK"
"""The environment variable with the mark."""

# Only the standard library: it must start fast, and run anywhere. The jobs of a client do not end with it, and are in
# groups of their own: the mark identifies them. A killed process may just have started another one, so the search is
# repeated until it finds none.
_SCRIPT: Final = f"""
import glob, os, shutil, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
mark = b"{_MARK}=" + sys.argv[1].encode() + b"/"
sys.stdin.read()
found = True
while found:
    found = False
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                variables = file.read().split(b"\\0")
            if any(variable.startswith(mark) for variable in variables):
                os.kill(int(path.split("/")[2]), signal.SIGKILL)
                found = True
        except OSError:
            pass
for folder in sys.argv[2:]:
    shutil.rmtree(folder, ignore_errors=True)
"""


class FlareProcess:
    """A server or a client of FLARE.

    Args:
        kit: its startup kit, which is also its workspace.
        role: whether it is a server or a client.
        org: its organisation.
        mark: the mark of everything that it starts.
        environment: further variables.
        on_line: is called for each line that it writes.
        prefix: the beginning of its command.
    """

    def __init__(
        self,
        kit: Kit,
        role: Literal["server", "client"],
        *,
        org: str,
        mark: str,
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._kit = kit
        self._role = role
        self._org = org
        self._mark = f"{mark}/{kit.name}"
        self._environment = environment
        self._on_line = on_line
        self._prefix = prefix
        self._process: Process | None = None
        # What FLARE logs when it is ready: there is no other notification.
        self._ready_line = "Server started" if role == "server" else f"Successfully registered client:{kit.name} "
        self._ready: asyncio.Future[None] | None = None
        self._has_output = asyncio.Event()

    @property
    def name(self) -> str:
        """What it is called."""
        return self._kit.name

    @property
    def pid(self) -> int | None:
        """The number of its process; None while it does not run."""
        process = self._process
        return None if process is None or process.exit_code is not None else process.pid

    async def first_output(self) -> None:
        """Wait for its first output: most of its modules are loaded then."""
        await self._has_output.wait()

    async def start(self) -> None:
        """Start it, and wait until it is ready: the server takes clients, the client is registered.

        Raises:
            DeploymentError: it runs already, or has ended instead; shows what it wrote.
        """
        if self.pid is not None:
            raise DeploymentError(self.name, [f"the {self._role} runs already, as process {self.pid}"])
        await self.kill()  # what is left of an earlier one
        ready = self._ready = asyncio.get_running_loop().create_future()
        process = self._process = Process(
            self._command(), cwd=str(self._kit.folder), environment=self._variables(), on_output=self._take
        )
        ended = asyncio.ensure_future(process.ended())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ended
        if not ready.done():
            output = "\n".join(process.lines[-_LAST_LINES:]) or "it wrote nothing"
            raise DeploymentError(
                self.name,
                [f"the {self._role} ended with {exit_text(process.exit_code)} before it was ready:\n{output}"],
            )

    def _command(self) -> list[str]:
        name = "uid=" + self.name
        return [
            *self._prefix,
            *(sys.executable, "-u", "-m", f"nvflare.private.fed.app.{self._role}.{self._role}_train"),
            *("-m", str(self._kit.folder), "-s", f"fed_{self._role}.json"),
            *("--set", "secure_train=true", f"org={self._org}", "config_folder=config"),
            *([name] if self._role == "client" else []),
        ]

    def _variables(self) -> dict[str, str]:
        # Sites find what this process finds, as with worker processes.
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._environment}
        return {**found, _MARK: self._mark}

    def _take(self, item: Output, origin: str) -> None:
        del origin
        self._has_output.set()
        if self._on_line is not None and isinstance(item, str):
            self._on_line(item)
        ready = self._ready
        if ready is None or ready.done() or not isinstance(item, str):
            return
        if self._ready_line in _COLOUR.sub("", item) + " ":
            ready.set_result(None)

    async def ended(self) -> int:
        """Wait until its process has ended; return the exit code."""
        process = self._process
        if process is None:
            raise DeploymentError(self.name, [f"the {self._role} does not run"])
        await process.ended()
        return process.exit_code or 0

    async def kill(self) -> None:
        """Kill it and everything that it has started, jobs and workers, and wait until all are gone."""
        await kill_marked(self._mark)
        process, self._process = self._process, None
        if process is not None:
            await process.release()


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes with a mark, and those with one below it, such as ``f7a1/home`` below ``f7a1``."""
    import psutil  # comes with nvflare

    found = []
    for process in psutil.process_iter(["environ"]):
        theirs = (process.info["environ"] or {}).get(_MARK)  # None if it has ended, or belongs to another user
        if theirs is not None and (theirs == mark or theirs.startswith(f"{mark}/")) and process.pid != os.getpid():
            found.append(process)
    return found


async def kill_marked(mark: str) -> None:
    """Kill all processes with a mark, including those that they start meanwhile, and wait for their ends.

    All are stopped first: none of them sees another one end, and reports it.
    """
    import psutil

    while processes := marked(mark):
        handles = [handle for process in processes if (handle := open_handle(process.pid)) is not None]
        try:
            # Only now: the pid of a process that has ended may have been reused.
            processes = [process for process in processes if process.is_running()]
            for send in (psutil.Process.suspend, psutil.Process.kill):
                for process in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        send(process)
            if len(handles) == len(processes):
                await all_ended(handles)
            else:  # not on Linux, or one has ended just now
                await asyncio.to_thread(psutil.wait_procs, processes)
        finally:
            for handle in handles:
                os.close(handle)


@asynccontextmanager
async def guarded(mark: str, folders: tuple[Path, ...]) -> AsyncGenerator[None, None]:
    """Kill everything with a mark, and remove folders, when the block ends or this process dies."""
    orphan_reaper.acquire()  # ends the programs that we start ourselves
    tasks = OwnedTasks()
    tasks.spawn(orphan_reaper.guard(), "replacing the reaper of orphans")
    try:
        guard = start_watchdog(_SCRIPT, mark, *map(str, folders))
        try:
            yield
        finally:
            await end_watchdog(guard)
    finally:
        await tasks.close()
        await orphan_reaper.release()


async def kill_processes(mark: str, nodes: Mapping[str, FlareProcess]) -> None:
    """Kill all processes with a mark, and nodes. Cancellation does not interrupt it."""

    async def end() -> None:
        await kill_marked(mark)
        for node in nodes.values():
            await node.kill()

    await completed(end())


async def run_site(kit: Kit, on_line: Callable[[str], None], on_ready: Callable[[], None]) -> int:
    """Run the server or client of a kit, until it ends by itself or this is cancelled; return its exit code.

    FLARE's own processes do not handle signals, and leave their jobs behind: here they end together, also when this
    process is killed. Nothing of it is left then.

    Args:
        kit: the kit of a server or a client; it is also the workspace.
        on_line: is called for each line that FLARE writes.
        on_ready: is called when the server takes clients, or the client is registered.
    """
    kind = kit.kind
    if kind == "user":
        raise DeploymentError(str(kit.folder), ["it is the kit of a user, which runs nothing"])
    require_nvflare(str(kit.folder))
    mark = secrets.token_hex(8)
    org = kit.certificate().org
    # Its processes are killed, so that they leave temporary files, which are removed with the folder.
    with tempfile.TemporaryDirectory(prefix="dfm-", ignore_cleanup_errors=True) as temporary:
        node = FlareProcess(kit, kind, org=org, mark=mark, environment={"TMPDIR": temporary}, on_line=on_line)
        async with guarded(mark, (Path(temporary),)):
            try:
                await node.start()
                on_ready()
                return await node.ended()
            finally:
                await kill_processes(mark, {kit.name: node})
