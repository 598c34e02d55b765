"""A real Jupyter kernel, and what its cells put out."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

__all__ = ["Cell", "Kernel"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What one cell put out."""

    printed: str = ""
    result: dict[str, str] = field(default_factory=dict)
    """What its last expression shows, by type."""
    shown: list[dict[str, str]] = field(default_factory=list)
    """What it displayed."""
    updates: list[dict[str, str]] = field(default_factory=list)
    """What replaced something that was displayed."""
    error: str = ""

    def take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self.printed += content["text"]
            case "execute_result":
                self.result = content["data"]
            case "display_data":
                self.shown.append(content["data"])
            case "update_display_data":
                self.updates.append(content["data"])
            case "error":
                self.error = _COLOURS.sub("", "\n".join(content["traceback"]))


class Kernel:
    """Runs cells."""

    def __init__(self, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
        self.manager = manager
        self.client = client

    @classmethod
    async def start(cls, folder: Path, mark: str) -> Kernel:
        """Starts a kernel that keeps its files in a folder; processes have a mark in ``DFM_TEST_MARK``."""
        manager = AsyncKernelManager(connection_file=str(folder / "kernel.json"))
        await manager.start_kernel(
            cwd=str(folder), env={**os.environ, "DFM_TEST_MARK": mark, "IPYTHONDIR": str(folder)}
        )
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        return cls(manager, client)

    async def run(self, code: str, seen: Callable[[], None] = lambda: None) -> Cell:
        """Runs a cell to its end; an error is a part of what it put out. ``seen``: called when it shows something."""
        cell = Cell()

        def take(message: dict[str, Any]) -> None:
            cell.take(message)
            if message["msg_type"] == "display_data":
                seen()

        async with asyncio.timeout(60):
            await self.client.execute_interactive(code, allow_stdin=False, stop_on_error=False, output_hook=take)
        return cell

    async def does(self, code: str) -> Cell:
        """Runs a cell that must not fail."""
        cell = await self.run(code)
        assert not cell.error, cell.error
        return cell

    async def completions(self, code: str) -> list[str]:
        """What the kernel proposes behind a piece of code."""
        reply: Any = await self.client.complete(code, reply=True, timeout=60)
        return list(reply["content"]["matches"])

    async def interrupt(self) -> None:
        """Interrupts the cell that runs. A loop that waits notices it when something wakes it (ipykernel issue 881)."""
        await self.manager.interrupt_kernel()
        self.client.kernel_info()

    async def stop(self) -> None:
        """Ends the kernel as a user does."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            await self.manager.shutdown_kernel()
        self.manager.context.destroy(linger=0)
