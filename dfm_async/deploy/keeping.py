"""Keeps a local federation up in a process of its own, and speaks to the one that does: state, and end.

The process that keeps the federation of a folder listens on a socket with a name of that folder. So there is only
one, and nothing is written that could be left or be wrong.
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
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from dfm_async.deploy.local import LocalFlare
from dfm_async.deploy.processes import marked
from dfm_async.deploy.project import SERVER_SITE
from dfm_async.errors import DeploymentError
from dfm_async.exchange.exits import process_exit
from dfm_async.federation.federation import Federation
from dfm_async.wire.local_sockets import connected, same_user, user_of

__all__ = ["Carrier", "Keeper", "KeeperStatus", "NodeStatus", "ask_status", "tell_to_end"]

_HOST: Final = "localhost"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A server or a client that runs, with its jobs and their workers."""

    site: str
    pid: int
    since: float
    memory: int
    """In bytes, of all its processes; what they share counts once for each."""
    processes: int


class Carrier(msgspec.Struct, frozen=True, kw_only=True):
    """A FLARE job that carries the jobs of one user."""

    job_id: str
    name: str
    user: str


class KeeperStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper of a folder tells."""

    state: Literal["starting", "up", "ending"]
    federation: str
    folder: str
    keeper: int
    """The process that keeps it."""
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
    carriers: tuple[Carrier, ...] = ()


class Keeper:
    """Keeps a federation up until somebody ends it.

    Args:
        federation: what runs.
        folder: where.
        homesite: the site of the applications.
        allow_code: whether applications may bring code.
        kits: where startup kits are kept for the next time; in ``folder`` by default.
        on_progress: is called with the name of each site when it is ready.
    """

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        *,
        homesite: str = "home",
        allow_code: bool = False,
        kits: Path | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._federation = federation
        self._folder = folder
        self._homesite = homesite
        self._allow_code = allow_code
        self._kits = kits
        self._on_progress = on_progress
        self._since = time.time()
        self._flare: LocalFlare | None = None
        self._ending = asyncio.Event()
        self._waiting: list[asyncio.StreamWriter] = []

    async def keep(self, on_up: Callable[[KeeperStatus], None]) -> None:
        """Starts the federation, and keeps it up until somebody asks for its end, or this is cancelled.

        Args:
            on_up: is called when all clients are registered.

        Raises:
            DeploymentError: one runs in this folder already, or does not start.
            FederationError: the federation cannot be written to a file, and code may not travel.
            TimeoutError: it has not started in time.
        """
        server = await asyncio.start_unix_server(self._serve, sock=_listen(self._folder))
        try:
            running = asyncio.ensure_future(self._run(on_up))
            asked = asyncio.ensure_future(self._ending.wait())
            try:
                await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._ending.set()
                asked.cancel()
                ended = running.done()
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(asked, return_exceptions=True)
                    await asyncio.wait([running])
                for writer in self._waiting:
                    writer.close()
            if ended or not running.cancelled():
                running.result()
        finally:
            server.close()  # not wait_closed(): that may wait for somebody who is connected and asks nothing

    async def _run(self, on_up: Callable[[KeeperStatus], None]) -> None:
        async with LocalFlare.up(
            self._federation,
            self._folder,
            homesite=self._homesite,
            allow_code=self._allow_code,
            kits=self._kits,
            on_progress=self._on_progress,
        ) as flare:
            self._flare = flare
            on_up(await asyncio.to_thread(self.status))
            await asyncio.Event().wait()  # until it is cancelled

    def status(self) -> KeeperStatus:
        """Tells how it is. Looks at all processes of the machine."""
        flare = self._flare
        told = KeeperStatus(
            state="ending" if self._ending.is_set() else "starting" if flare is None else "up",
            federation=self._federation.name,
            folder=str(self._folder),
            keeper=os.getpid(),
            since=self._since,
        )
        if flare is None:
            return told
        pids = flare.pids
        nodes, carriers = _look(flare, pids)
        expected = [SERVER_SITE, *dict.fromkeys([self._homesite, *self._federation.sites])]
        return msgspec.structs.replace(
            told,
            startup_kit=str(flare.startup_kit),
            user=flare.user,
            allow_code=self._allow_code,
            port=flare.port,
            admin_port=flare.admin_port,
            mark=flare.mark,
            run=str(flare.folder),
            nodes=nodes,
            missing=tuple(name for name in dict.fromkeys(expected) if name not in pids),
            carriers=carriers,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one who asks. Whoever asks for the end hears the answer, and the end of the connection at the end."""
        if not same_user(writer.get_extra_info("socket")):
            writer.close()
            return
        with contextlib.suppress(OSError):
            asked = await reader.readline()
            told = await asyncio.to_thread(self.status)
            writer.write(msgspec.json.encode(told) + b"\n")
            await writer.drain()
            if asked.strip() == b"end":
                self._waiting.append(writer)
                self._ending.set()
                return
        writer.close()


def _look(flare: LocalFlare, pids: dict[str, int]) -> tuple[tuple[NodeStatus, ...], tuple[Carrier, ...]]:
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
    return tuple(nodes), tuple(_carrier(flare.folder / _HOST, job) for job in sorted(jobs))


def _job_of(command: list[str]) -> str:
    """The FLARE job whose process at the server has this command line; empty if it is none."""
    if not any(word.endswith(".runner_process") for word in command) or "-n" not in command[:-1]:
        return ""
    return command[command.index("-n") + 1]


def _carrier(workspace: Path, job_id: str) -> Carrier:
    try:
        meta: dict[str, Any] = msgspec.json.decode((workspace / job_id / "meta.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        meta = {}
    return Carrier(job_id=job_id, name=str(meta.get("name", "")), user=str(meta.get("submitter_name", "")))


# the socket


def _address(folder: Path) -> str:
    name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    return f"\0dfm-async-flare-{os.getuid()}-{name}"


def _listen(folder: Path) -> socket.socket:
    if sys.platform != "linux":
        raise DeploymentError(str(folder), ["keeping a federation up needs Linux"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(folder))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise DeploymentError(str(folder), [_who_listens(folder)]) from error
    return listener


def _who_listens(folder: Path) -> str:
    """Names like ours are open to all users of the machine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.connect(_address(folder))
        if not same_user(connection):
            return f"its address is in use by another user of this machine (uid {user_of(connection)})"
    return "one runs there already"


async def _ask(folder: Path, word: bytes) -> tuple[KeeperStatus, asyncio.StreamReader, asyncio.StreamWriter] | None:
    try:
        connection = await connected(_address(folder))
    except OSError:
        return None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
    writer.write(word + b"\n")
    line = await reader.readline()
    if not line:  # it has ended in this moment
        writer.close()
        return None
    return msgspec.json.decode(line, type=KeeperStatus), reader, writer


async def ask_status(folder: Path) -> KeeperStatus | None:
    """Asks the keeper of a folder how its federation is; None if none runs there."""
    found = await _ask(folder, b"status")
    if found is None:
        return None
    status, _, writer = found
    writer.close()
    return status


async def tell_to_end(folder: Path) -> tuple[KeeperStatus, list[str]] | None:
    """Ends the federation of a folder, and waits until it is gone.

    Returns:
        How it was before, and what is left of it, which should be nothing; None if none runs there.
    """
    found = await _ask(folder, b"end")
    if found is None:
        return None
    status, reader, writer = found
    await reader.read()  # until it has ended everything
    writer.close()
    await process_exit(status.keeper)
    return status, await asyncio.to_thread(_left, status)


def _left(status: KeeperStatus) -> list[str]:
    """What there still is of a federation."""
    processes = marked(status.mark) if status.mark else []
    folders = [status.run] if status.run and os.path.exists(status.run) else []
    return [*(f"process {process.pid}" for process in processes), *folders]
