"""One process with everything that it started: its group, its output, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dfm_async.exchange.exits import process_exit
from dfm_async.exchange.groups import kill_group
from dfm_async.exchange.keeper import keeper
from dfm_async.wire.output import LogRecord, Output, OutputSplitter

__all__ = ["LINES_KEPT", "Process"]

_log = logging.getLogger(__name__)

LINES_KEPT: Final = 50
"""How many of its last lines are kept."""
_KILLED: Final = 10.0
"""How long the kernel may take to end processes that were killed, in seconds."""
_DRAIN: Final = 0.25
"""How long output is read after the process has ended, if something that it started keeps the pipe open, in seconds."""


class Process:
    """A process that was started, the leader of a group of its own.

    Args:
        argv: the program and its arguments.
        cwd: the folder to start it in.
        environment: its whole environment.
        on_output: is called for every line or record that it writes, with "stdout" or "stderr".
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        environment: Mapping[str, str],
        on_output: Callable[[Output, str], None],
    ) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - what the user wants to run, without a shell
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        try:
            keeper.watch(self._popen.pid)  # in the same breath, so that nothing can orphan it
        except BaseException:
            self._popen.kill()
            self._popen.communicate()
            raise
        self._released = False
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._on_output = on_output
        self._readers: list[_Reader] = []
        self.exit_code: int | None = None
        self._exit = asyncio.get_running_loop().create_task(self._watch(), name=f"exit of process {self.pid}")

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        return tuple(self._lines)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for stream, name in ((self._popen.stdout, "stdout"), (self._popen.stderr, "stderr")):
            reader = _Reader(lambda item, origin=name: self._take(item, origin))  # type: ignore[misc]
            self._readers.append(reader)
            await loop.connect_read_pipe(lambda reader=reader: reader, stream)  # type: ignore[misc]
        code = await process_exit(self.pid)
        await asyncio.wait({reader.ended for reader in self._readers}, timeout=_DRAIN)
        for reader in self._readers:
            reader.close()
        self.exit_code = code

    def _take(self, item: Output, origin: str) -> None:
        if isinstance(item, str):
            self._lines.append(item)
        elif isinstance(item, LogRecord):
            self._lines.append(item.message)
        try:
            self._on_output(item, origin)
        except Exception:  # noqa: BLE001 - what the user's function raises must not hide the rest, or the end
            _log.exception("output of process %d was not taken", self.pid)

    async def ended(self) -> int:
        """Waits for its end, and for the rest of its output."""
        await asyncio.shield(self._exit)
        assert self.exit_code is not None  # noqa: S101 - the watch has ended
        return self.exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to everything in its group."""
        if not self._released:  # until then, the number of the group cannot be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def release(self) -> None:
        """After its end: ends what is left of its group, and lets go of it when all of it is gone."""
        await self.ended()
        if not self._released:
            self.signal(signal.SIGKILL)
            try:
                async with asyncio.timeout(_KILLED):
                    await kill_group(self.pid, signal.SIGKILL)
            except TimeoutError:
                _log.warning("what process %d started does not end although it was killed; it is left alone", self.pid)
            self._released = True
            keeper.forget(self.pid)
            self._popen.wait()


class _Reader(asyncio.Protocol):
    """Takes apart what comes out of one pipe."""

    def __init__(self, take: Callable[[Output], None]) -> None:
        self._take = take
        self._splitter = OutputSplitter()
        self._transport: asyncio.BaseTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for item in self._splitter.feed(data):
            self._take(item)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._finish()

    def close(self) -> None:
        self._finish()
        if self._transport is not None:
            self._transport.close()

    def _finish(self) -> None:
        if not self.ended.done():
            for item in self._splitter.finish():
                self._take(item)
            self.ended.set_result(None)
