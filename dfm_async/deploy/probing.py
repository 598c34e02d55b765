"""Whether a server answers, and whether a client has its connection. Loads little: probes run every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

from dfm_async.deploy.kit import Kit

__all__ = ["greet", "is_connected"]


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
