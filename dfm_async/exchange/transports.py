"""The transports between a site and its programs: one row of a table for each.

A new transport is one module, and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Literal, Protocol, TypeAlias

from dfm_async.exchange.connection import Pipe
from dfm_async.exchange.options import ExecutorOptions

TransportName: TypeAlias = Literal["unix", "tcp", "memory", "nvflare-2.8", "nvflare-2.9"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRow:
    """What there is to know about a transport before it is imported. Functions are given as ``module:name``.

    Attributes:
        listen: for transports with our handshake: makes the listener of a site.
        connect: for these: connects a program to it.
        site: for others: makes the :class:`SiteTransport`, from settings of a program.
        agent: for these: makes the agent of a program.
        variable: for these: the environment variable by which a program finds its site.
        models: whether tasks and results are models, and have the settings of NVFLARE's clients.
        owns_folder: whether programs are started in a folder that the transport chooses.
        in_process: whether it works only within one process.
    """

    listen: str = ""
    connect: str = ""
    site: str = ""
    agent: str = ""
    variable: str = ""
    models: bool = False
    owns_folder: bool = False
    in_process: bool = False


_SOCKET: Final = "dfm_async.exchange.socket_pipe"
_MEMORY: Final = "dfm_async.exchange.memory_pipe"
_FILES: Final = "dfm_async.exchange.filepipe.transport"
_CELL: Final = "dfm_async.exchange.cell"

TRANSPORTS: Final[dict[str, TransportRow]] = {
    "unix": TransportRow(listen=f"{_SOCKET}:listen_unix", connect=f"{_SOCKET}:connect_unix"),
    "tcp": TransportRow(listen=f"{_SOCKET}:listen_tcp", connect=f"{_SOCKET}:connect_tcp"),
    "memory": TransportRow(listen=f"{_MEMORY}:listen", connect=f"{_MEMORY}:connect", in_process=True),
    "nvflare-2.9": TransportRow(
        site=f"{_CELL}.transport:CellTransport",
        agent=f"{_CELL}.client_api:agent_from_environment",
        variable="NVFLARE_CLIENT_API_BOOTSTRAP",
        models=True,
    ),
    "nvflare-2.8": TransportRow(
        site=f"{_FILES}:FilePipeTransport",
        agent=f"{_FILES}:agent_from_environment",
        variable="CLIENT_API_TYPE",
        models=True,
        owns_folder=True,
    ),
}
"""All transports, by name. Programs look for their site in this order."""


def load(function: str) -> Any:
    """Import a function or class that a row names."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a program must be given so that it finds its site.

    Attributes:
        environment: variables of its environment.
        cwd: the folder that it must be started in, if that matters.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


class SiteTransport(Protocol):
    """Accepts the connections of programs. Every launch is expected once."""

    async def open(self, options: ExecutorOptions, site: str, job: str) -> None:
        """Begin to listen. The executor passes how long it waits, and what the program may know."""
        ...

    def expect(self, on_up: Callable[[Pipe], None], *, launch_once: bool) -> Invitation:
        """Expect one program, and no other any longer; return what it must be given."""
        ...

    def forget(self) -> None:
        """Expect no program."""
        ...

    async def close(self) -> None:
        """Stop listening, and remove all files."""
        ...


def site_transport(name: str, **settings: Any) -> SiteTransport:
    """Make the site's side of a transport.

    Raises:
        ValueError: the name is unknown.
    """
    row = TRANSPORTS.get(name) if isinstance(name, str) else None
    if row is None:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {name!r}")
    made: SiteTransport = load(row.site or "dfm_async.exchange.handshake:HandshakeTransport")(
        *(() if row.site else (name,)), **(settings if row.models else {})
    )
    return made
