"""One server or client of FLARE on this machine: a process, until it is ready, and until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from dfm_async.deploy.kit import Kit
from dfm_async.deploy.processes import MARK, end_marked
from dfm_async.errors import DeploymentError
from dfm_async.exchange.process import Process
from dfm_async.wire.output import Output

__all__ = ["Node"]

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_TOLD: Final = 20
"""How many of its last lines an error shows."""


class Node:
    """A server or a client of FLARE.

    Args:
        kit: its startup kit, which is also its workspace.
        role: which of both it is.
        org: its organisation.
        mark: what marks everything that it starts.
        environment: further variables.
        on_line: is called for each line that it writes.
        prefix: what its command begins with.
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
        # What FLARE logs when others can use it: there is no other sign that needs no asking.
        self._sign = "Server started" if role == "server" else f"Successfully registered client:{kit.name} "
        self._ready: asyncio.Future[None] | None = None
        self._spoken = asyncio.Event()

    @property
    def name(self) -> str:
        """What it is called."""
        return self._kit.name

    @property
    def pid(self) -> int | None:
        """The number of its process; None while it does not run."""
        process = self._process
        return None if process is None or process.exit_code is not None else process.pid

    async def spoken(self) -> None:
        """Waits until it has written something: the most of what it has to load is loaded."""
        await self._spoken.wait()

    async def start(self) -> None:
        """Starts it, and waits until it is ready: the server takes clients, the client is registered.

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
            told = "\n".join(process.lines[-_TOLD:]) or "it wrote nothing"
            raise DeploymentError(
                self.name, [f"the {self._role} ended with exit code {process.exit_code} before it was ready:\n{told}"]
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
        return {**found, MARK: self._mark}

    def _take(self, item: Output, origin: str) -> None:
        del origin
        self._spoken.set()
        if self._on_line is not None and isinstance(item, str):
            self._on_line(item)
        ready = self._ready
        if ready is None or ready.done() or not isinstance(item, str):
            return
        if self._sign in _COLOUR.sub("", item) + " ":
            ready.set_result(None)

    async def ended(self) -> int:
        """Waits until its process has ended; gives the exit code."""
        process = self._process
        if process is None:
            raise DeploymentError(self.name, [f"the {self._role} does not run"])
        await process.ended()
        return process.exit_code or 0

    async def kill(self) -> None:
        """Kills it and everything that it has started, jobs and workers, and waits until all are gone."""
        await end_marked(self._mark)
        process, self._process = self._process, None
        if process is not None:
            await process.release()
