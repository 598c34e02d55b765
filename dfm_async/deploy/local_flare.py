"""A real federation on this machine: a FLARE server and one client per site, on loopback only."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from dfm_async.deploy.federation_file import file_of
from dfm_async.deploy.federation_kits import complete_kits, project_of
from dfm_async.deploy.flare_process import FlareProcess, guarded, kill_processes
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.project import SERVER_SITE, Project, User, cached_kits
from dfm_async.errors import DeploymentError
from dfm_async.federation.federation import Federation

_USER: Final = "user@dfm.local"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the processes of a federation run.

    Attributes:
        server: the server's name or address. FLARE listens on loopback only if that is ``localhost``, so that it
            cannot be reached from outside; else on all interfaces.
        prefixes: the beginning of the commands of single sites, such as to enter a network namespace.
    """

    server: str = "localhost"
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_LOOPBACK: Final = Places()


class LocalFlare:
    """A federation on NVIDIA FLARE that runs on this machine. Made by :meth:`up`, which also ends it.

    Attributes:
        folder: everything that it writes is in here.
        startup_kit: the folder of the (first) user's startup kit, for ``FlareOptions``.
        user: the user's name.
        users: the names of all users; each has a folder of that name beside the first one's.
        port: where the server listens for sites.
        admin_port: where it listens for users.
        mark: the mark of all its processes; those of a site have ``/`` and its name behind it.
        sites: the names of all sites, including ``server``.
        allow_code: whether applications may bring code.
    """

    def __init__(
        self, project: Project, folder: Path, nodes: Mapping[str, FlareProcess], mark: str, *, allow_code: bool
    ) -> None:
        self.folder = folder
        self.users: tuple[str, ...] = tuple(user.name for user in project.users)
        self.user: str = self.users[0]
        self.startup_kit: Path = folder / self.user
        self.port: int = project.port
        self.admin_port: int = project.admin_port
        self.mark = mark
        self.sites: tuple[str, ...] = (SERVER_SITE, *project.sites)
        self.allow_code = allow_code
        self._server = project.server
        self._nodes = nodes

    @classmethod
    @asynccontextmanager
    async def up(
        cls,
        federation: Federation | Iterable[str],
        folder: str | os.PathLike[str],
        *,
        homesite: str = "home",
        clients: Iterable[str] | None = None,
        users: Iterable[str] = (_USER,),
        allow_code: bool = False,
        environment: Mapping[str, str] | None = None,
        kits: str | os.PathLike[str] | None = None,
        start_timeout: float = 60.0,
        on_progress: Callable[[str], None] | None = None,
        places: Places = _LOOPBACK,
        journal: bool = True,
    ) -> AsyncGenerator[LocalFlare, None]:
        """Start a server and a client for each site, and yield the federation when all clients are registered.

        At the end, also of this process, all its processes and files are gone, except for the kits.

        Args:
            federation: the federation, or the names of its sites. A site called ``server`` is the server itself.
            folder: where it runs. Files of an earlier one are removed.
            homesite: the site of the application; it has a client, too.
            clients: the sites whose clients are started; all by default. Others can be started later.
            users: its users, each with jobs of their own: e-mail addresses.
            allow_code: whether applications may bring code, at every site.
            environment: further variables for the server, the clients and everything that they start.
            kits: where startup kits are kept for the next time; in ``folder`` by default.
            start_timeout: the most seconds that all of them together may take to start.
            on_progress: is called with the name of each site when it is ready, and with ``server``.
            places: where they run; on loopback by default.
            journal: whether jobs outlive the server. They end with the federation.

        Raises:
            DeploymentError: names are wrong, nvflare is missing, or a process has ended instead of being ready.
            FederationError: the federation cannot be written to a file, and code may not travel.
            TimeoutError: not all of them were ready in time.
        """
        project = project_of(federation, server=places.server, users=map(User, users), homesite=homesite)
        project = replace(project, scheme="tcp")
        started = project.sites if clients is None else tuple(dict.fromkeys(clients))
        if unknown := [site for site in started if site not in project.sites]:
            raise DeploymentError(project.name, [f"there is no client for {', '.join(map(repr, unknown))}"])
        file = file_of(federation, required=not allow_code) if isinstance(federation, Federation) else None
        home = Path.cwd() / folder
        made = await cached_kits(project, home / "kits" if kits is None else Path.cwd() / kits)
        async with AsyncExitStack() as stack:
            run = home / "run"
            stack.callback(shutil.rmtree, run, ignore_errors=True)
            port, admin_port = _free_ports()
            project = replace(project, port=port, admin_port=admin_port)
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(made, run)  # kits are kept for the next time
            for folder_of_kit in run.iterdir():
                Kit(folder_of_kit).listen(port, admin_port)
            trusting = (SERVER_SITE, *project.sites) if allow_code else ()
            store = str(run / project.server)
            complete_kits(project, run, file, homesite=homesite, trusting=trusting, store=store, journal=journal)
            # Sockets of workers have short names only: this is not below the folder, which may have a long one.
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="dfm-", ignore_cleanup_errors=True))
            mark = secrets.token_hex(8)
            nodes = _nodes(project, run, mark, {"TMPDIR": temporary, **(environment or {})}, places)
            await stack.enter_async_context(guarded(mark, (run, Path(temporary))))
            stack.push_async_callback(kill_processes, mark, nodes)
            flare = cls(project, run, nodes, mark, allow_code=allow_code)
            try:
                async with asyncio.timeout(start_timeout), asyncio.TaskGroup() as group:
                    server = nodes[project.server]
                    group.create_task(_start(server, SERVER_SITE, on_progress), name="start of the server")
                    # A client that finds no server waits for two seconds before it tries again.
                    await server.first_output()
                    for site in started:
                        group.create_task(_start(nodes[site], site, on_progress), name=f"start of {site}")
            except* DeploymentError as errors:
                problems = [problem for error in errors.exceptions for problem in getattr(error, "problems", ())]
                raise DeploymentError(project.name, problems) from errors.exceptions[0]
            yield flare

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the server (``"server"``) and of the clients that run, by site."""
        named = ((SERVER_SITE if name == self._server else name, node.pid) for name, node in self._nodes.items())
        return {name: pid for name, pid in named if pid is not None}

    async def kill_client(self, site: str) -> None:
        """Kill the client of a site with its jobs and their workers, by SIGKILL, as if its machine was lost."""
        await self._client(site).kill()

    async def start_client(self, site: str) -> None:
        """Start the client of a site, and wait until it is registered."""
        await self._client(site).start()

    async def kill_server(self) -> None:
        """Kill the server with its jobs and their workers, by SIGKILL."""
        await self._nodes[self._server].kill()

    async def start_server(self) -> None:
        """Start the server, and wait until it takes clients. Running clients reconnect by themselves."""
        await self._nodes[self._server].start()

    def _client(self, site: str) -> FlareProcess:
        if site == self._server or site not in self._nodes:
            known = ", ".join(name for name in self._nodes if name != self._server)
            raise DeploymentError(str(self.folder), [f"there is no client {site!r} (there are: {known})"])
        return self._nodes[site]


def _nodes(
    project: Project, run: Path, mark: str, environment: Mapping[str, str], places: Places
) -> dict[str, FlareProcess]:
    def node(name: str, role: Literal["server", "client"], site: str) -> FlareProcess:
        prefix = places.prefixes.get(site, ())
        return FlareProcess(Kit(run / name), role, org=project.org, mark=mark, environment=environment, prefix=prefix)

    found = {project.server: node(project.server, "server", SERVER_SITE)}
    return found | {site: node(site, "client", site) for site in project.sites}


async def _start(node: FlareProcess, site: str, on_progress: Callable[[str], None] | None) -> None:
    await node.start()
    if on_progress is not None:
        on_progress(site)


def _free_ports() -> tuple[int, int]:
    """Return two free ports of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]
