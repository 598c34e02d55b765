"""Runs the server or the client of one startup kit, as the main process of a service or a container."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from dfm_async.deploy.guard import guarded
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.local import kept, shielded_end
from dfm_async.deploy.node import Node
from dfm_async.deploy.provisioning import require_nvflare
from dfm_async.errors import DeploymentError

__all__ = ["run_site"]


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
    # Its processes end by force: what they have in a folder for temporary files goes with that.
    with tempfile.TemporaryDirectory(prefix="dfm-", ignore_cleanup_errors=True) as temporary:
        node = Node(kit, kind, org=org, mark=mark, environment={"TMPDIR": temporary}, on_line=on_line)
        async with kept(), guarded(mark, (Path(temporary),)):
            try:
                await node.start()
                on_ready()
                return await node.ended()
            finally:
                await shielded_end(mark, {kit.name: node})
