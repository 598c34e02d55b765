"""Runs the server or the client of one startup kit, as the main process of a service or a container."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from dfm_async.deploy.guard import guarded
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.local import kept, shielded_end
from dfm_async.deploy.node import Node
from dfm_async.deploy.provisioning import require_nvflare
from dfm_async.errors import DeploymentError

__all__ = ["greet", "is_connected", "run_site"]


async def run_site(kit: Kit, on_line: Callable[[str], None], on_ready: Callable[[], None]) -> int:
    """Runs what the kit is for, until it ends by itself or this is cancelled. Then nothing of it is left.

    FLARE's own processes know no orderly end by a signal, and leave their jobs behind: here they end together, also
    when this process is killed.

    Args:
        kit: the kit of a server or a client; it is also the workspace.
        on_line: is called for each line that FLARE writes.
        on_ready: is called when the server takes clients, or the client is registered.

    Returns:
        The exit code.

    Raises:
        DeploymentError: it is no such kit, or has ended before it was ready.
    """
    kind = kit.kind
    if kind == "user":
        raise DeploymentError(str(kit.folder), ["it is the kit of a user, who uses the federation and runs nothing"])
    require_nvflare(str(kit.folder))
    mark = secrets.token_hex(8)
    org = kit.certificate().org
    node = Node(kit, kind, org=org, mark=mark, environment={}, on_line=on_line)
    async with kept(), guarded(mark, ()):
        try:
            await node.start()
            on_ready()
            return await node.ended()
        finally:
            await shielded_end(mark, {kit.name: node})


async def greet(kit: Kit, host: str, port: int, *, timeout: float) -> str:  # noqa: ASYNC109 - a probe has one limit
    """Shakes hands with the server as the participant would: both show certificates of this federation.

    Returns:
        The version of TLS.

    Raises:
        OSError: nobody answers, or somebody else does.
        TimeoutError: it takes too long.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # FLARE knows servers by their certificate, whatever address leads to them
    context.load_verify_locations(kit.authority_file)
    context.load_cert_chain(kit.certificate_file, kit.key_file)
    context.set_alpn_protocols(["h2"])  # gRPC wants to hear it
    async with asyncio.timeout(timeout):
        _, writer = await asyncio.open_connection(host, port, ssl=context, family=socket.AF_UNSPEC)
        try:
            return str(writer.get_extra_info("ssl_object").version())
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def is_connected(kit: Kit) -> bool:
    """Whether the client of a kit runs on this machine, and has a connection to the server.

    Only connections of its own processes count: those that others have say nothing about it.
    """
    import psutil  # comes with nvflare

    _, port = kit.server_address()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if not any(word.endswith("client_train") for word in command) or "-m" not in command:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if any(Path(word).resolve() == kit.folder.resolve() for word in command if word.startswith("/")) and any(
                found.status == psutil.CONN_ESTABLISHED and found.raddr and found.raddr.port == port
                for found in process.net_connections("tcp")
            ):
                return True
    return False
