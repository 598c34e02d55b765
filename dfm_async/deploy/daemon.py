"""The daemon of a local federation: a process that keeps it running, and answers requests for its status and its end.

The daemon of a folder listens on a socket whose name is derived from the folder. So there is only one, and no file
can be stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from dfm_async.base.exits import process_exit
from dfm_async.base.sockets import connected, same_user, user_of
from dfm_async.base.tasks import completed
from dfm_async.deploy.flare_process import marked
from dfm_async.deploy.local_flare import LocalFlare
from dfm_async.deploy.project import SERVER_SITE
from dfm_async.errors import DeploymentError

_HOST: Final = "localhost"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A server or a client that runs, with its jobs and their workers."""

    site: str
    pid: int
    since: float
    memory: int
    """In bytes, of all its processes; what they share counts once for each."""
    processes: int


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """A FLARE job that hosts the jobs of one user."""

    job_id: str
    name: str
    user: str


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the daemon of a folder."""

    state: Literal["starting", "up", "ending"]
    federation: str
    folder: str
    daemon: int
    """The process of the daemon."""
    since: float
    startup_kit: str = ""
    user: str = ""
    allow_code: bool = False
    port: int = 0
    admin_port: int = 0
    mark: str = ""
    run: str = ""
    nodes: tuple[NodeStatus, ...] = ()
    missing: tuple[str, ...] = ()
    """Sites whose client has ended; ``server`` if the server has."""
    host_jobs: tuple[HostJob, ...] = ()


class Daemon:
    """Keeps a federation running in a folder until it is asked to end. ``up`` starts and ends the federation."""

    def __init__(self, name: str, folder: Path, up: AbstractAsyncContextManager[LocalFlare]) -> None:
        self._name = name
        self._folder = folder
        self._up = up
        self._since = time.time()
        self._flare: LocalFlare | None = None
        self._running: asyncio.Task[None] | None = None
        self._ending = False
        self._waiting: list[asyncio.StreamWriter] = []

    async def keep(self, on_up: Callable[[DaemonStatus], None]) -> None:
        """Start the federation, and keep it running until a client requests its end, or this is cancelled.

        ``on_up`` is called when all clients are registered. Raises what starting it raises.
        """
        server = await asyncio.start_unix_server(self._serve, sock=_listen(self._folder))
        running = self._running = asyncio.ensure_future(self._run(on_up))
        try:
            await completed(asyncio.wait([running]), hurry=lambda _: self._end())
        finally:
            for writer in self._waiting:
                writer.close()
            server.close()  # not wait_closed(): that may wait for a client that sends nothing
        if not (self._ending and running.cancelled()):
            running.result()

    async def _run(self, on_up: Callable[[DaemonStatus], None]) -> None:
        async with self._up as flare:
            self._flare = flare
            on_up(await asyncio.to_thread(self.status))
            await asyncio.Event().wait()  # until it is cancelled

    def _end(self) -> None:
        if self._running is not None and not self._ending:  # once: its clean-up must not be interrupted
            self._running.cancel()
        self._ending = True

    def status(self) -> DaemonStatus:
        """Return the status. Scans all processes of the machine."""
        flare = self._flare
        status = DaemonStatus(
            state="ending" if self._ending else "starting" if flare is None else "up",
            federation=self._name,
            folder=str(self._folder),
            daemon=os.getpid(),
            since=self._since,
        )
        if flare is None:
            return status
        pids = flare.pids
        nodes, host_jobs = _scan(flare, pids)
        return msgspec.structs.replace(
            status,
            startup_kit=str(flare.startup_kit),
            user=flare.user,
            allow_code=flare.allow_code,
            port=flare.port,
            admin_port=flare.admin_port,
            mark=flare.mark,
            run=str(flare.folder),
            nodes=nodes,
            missing=tuple(name for name in flare.sites if name not in pids),
            host_jobs=host_jobs,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. A connection that requests the end is closed when the federation has ended."""
        if not same_user(writer.get_extra_info("socket")):
            writer.close()
            return
        with contextlib.suppress(OSError):
            request = await reader.readline()
            status = await asyncio.to_thread(self.status)
            writer.write(msgspec.json.encode(status) + b"\n")
            await writer.drain()
            if request.strip() == b"end":
                self._waiting.append(writer)
                self._end()
                return
        writer.close()


def _scan(flare: LocalFlare, pids: dict[str, int]) -> tuple[tuple[NodeStatus, ...], tuple[HostJob, ...]]:
    import psutil  # comes with nvflare

    nodes, jobs = [], set()
    for site, pid in pids.items():
        since, memory, count = 0.0, 0, 0
        for process in marked(f"{flare.mark}/{_HOST if site == SERVER_SITE else site}"):
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                count += 1
                if process.pid == pid:
                    since = process.create_time()
                if site == SERVER_SITE and (job := _job_of(process.cmdline())):
                    jobs.add(job)
        nodes.append(NodeStatus(site=site, pid=pid, since=since, memory=memory, processes=count))
    return tuple(nodes), tuple(_host_job(flare.folder / _HOST, job) for job in sorted(jobs))


def _job_of(command: list[str]) -> str:
    """Return the FLARE job of a process of the server with this command line; empty for other processes."""
    if not any(word.endswith(".runner_process") for word in command) or "-n" not in command[:-1]:
        return ""
    return command[command.index("-n") + 1]


def _host_job(workspace: Path, job_id: str) -> HostJob:
    try:
        meta: dict[str, Any] = msgspec.json.decode((workspace / job_id / "meta.json").read_bytes())
    except (OSError, ValueError):
        meta = {}
    return HostJob(job_id=job_id, name=str(meta.get("name", "")), user=str(meta.get("submitter_name", "")))


# the socket


def _address(folder: Path) -> str:
    name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    return f"\0dfm-async-flare-{os.getuid()}-{name}"


def _listen(folder: Path) -> socket.socket:
    if sys.platform != "linux":
        raise DeploymentError(str(folder), ["a local federation in the background needs Linux"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(folder))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise DeploymentError(str(folder), [_conflict(folder)]) from error
    return listener


def _conflict(folder: Path) -> str:
    """Return the reason why the name is taken: all users of the machine can use such names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.connect(_address(folder))
        if not same_user(connection):
            return f"its address is in use by another user of this machine (uid {user_of(connection)})"
    return "one runs there already"


async def _ask(folder: Path, request: bytes) -> DaemonStatus | None:
    """Send a request, and return the status when the daemon closes the connection: at its end, if that is requested."""
    try:
        connection = await connected(_address(folder))
    except OSError:
        return None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
    try:
        writer.write(request + b"\n")
        line = await reader.readline()
        await reader.read()
    finally:
        writer.close()
    return msgspec.json.decode(line, type=DaemonStatus) if line else None  # it has ended in this moment


async def read_status(folder: Path) -> DaemonStatus | None:
    """Return the status of the federation of a folder; None if none runs there."""
    return await _ask(folder, b"status")


async def request_end(folder: Path) -> tuple[DaemonStatus, list[str]] | None:
    """End the federation of a folder, and wait until it is gone; None if none runs there.

    Return its last status, and what is left of it, which should be nothing.
    """
    status = await _ask(folder, b"end")
    if status is None:
        return None
    await process_exit(status.daemon)
    return status, await asyncio.to_thread(_left, status)


def _left(status: DaemonStatus) -> list[str]:
    """Return the processes and folders that a federation has left."""
    processes = marked(status.mark) if status.mark else []
    folders = [status.run] if status.run and os.path.exists(status.run) else []
    return [*(f"process {process.pid}" for process in processes), *folders]
