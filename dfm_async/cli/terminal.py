"""The terminal, and standard input and output without blocking the loop: a slow reader must not delay Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from rich.console import Console

from dfm_async.cli.command_runner import BadInput, Unwritable

_WIDE: Final = 10_000


def terminal(*, stderr: bool = False, width: int = _WIDE) -> Console:
    """Return the console of standard output or standard error. Files and pipes get lines of ``width`` columns."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.file.isatty():  # also if colours are forced
        console.width = width
    return console


_ATOMIC: Final = select.PIPE_BUF
"""The number of bytes that a writable pipe takes without blocking."""
_PIECE: Final = 64 * 1024
_LONGEST: Final = 16 * 1024 * 1024
"""The maximum length of an input line, in bytes."""


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):  # a stand-in, such as a capture
        return None


def _waits(descriptor: int) -> bool:
    """Return whether reading or writing may block; files never do."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


class StandardOutput:
    """Writes lines to standard output, and waits for slow readers without blocking the loop.

    The descriptor is not made non-blocking: that would affect every process that shares it, such as the shell.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._stream.flush()
        self._descriptor = _descriptor(self._stream)
        self._waits = self._descriptor is not None and _waits(self._descriptor)
        self.terminal = self._descriptor is not None and os.isatty(self._descriptor)
        """Whether standard output is a terminal."""
        self.divert: Callable[[str], None] | None = None
        """Takes the lines instead, while a live view uses the terminal."""

    async def line(self, text: str) -> None:
        """Write a line. Raises ``BrokenPipeError`` if the reader has gone, else ``Unwritable``."""
        if self.divert is not None:
            self.divert(text)
            return
        try:
            await self._write(f"{text}\n".encode("utf-8", "replace"))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Unwritable(f"standard output: {error.strerror or error}") from error

    async def _write(self, data: bytes) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            self._stream.write(data.decode())
            return
        rest, loop = memoryview(data), asyncio.get_running_loop()
        while rest:
            if self._waits:
                if not select.select([], [descriptor], [], 0)[1]:
                    await _ready(descriptor, loop.add_writer, loop.remove_writer)
                rest = rest[os.write(descriptor, rest[:_ATOMIC]) :]
            else:
                rest = rest[os.write(descriptor, rest) :]


async def _ready(descriptor: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    """Wait for a descriptor, with the methods of the loop that watch it."""
    ready = asyncio.Event()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


async def input_lines() -> AsyncGenerator[bytes, None]:
    """Yield the lines of standard input as they arrive."""
    descriptor = _descriptor(sys.stdin)
    if descriptor is None:
        for line in sys.stdin:
            yield line.encode()
        return
    waits, loop = _waits(descriptor), asyncio.get_running_loop()
    rest = b""
    while True:
        if waits:
            await _ready(descriptor, loop.add_reader, loop.remove_reader)
        data = os.read(descriptor, _PIECE)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST:
            raise BadInput(f"a line of standard input has more than {_LONGEST:,} bytes")
        for line in lines:
            yield line
    if rest:
        yield rest
