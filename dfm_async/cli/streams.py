"""Standard input and output without blocking the loop: a reader that is slow must not keep Ctrl-C from being heard."""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from dfm_async.cli.exits import BadInput, Unwritable

__all__ = ["StandardOutput", "input_lines"]

_ATOMIC: Final = select.PIPE_BUF
"""A pipe that can be written to takes so many bytes without blocking."""
_PIECE: Final = 64 * 1024
_LONGEST: Final = 16 * 1024 * 1024
"""How many bytes one line of the input may have."""


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):  # not a real one: somebody captures it
        return None


def _waits(descriptor: int) -> bool:
    """Whether reading or writing may have to wait for somebody else; files never do."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


class StandardOutput:
    """Writes lines to standard output. Waits without blocking while nobody takes them.

    The descriptor stays as it is: making it non-blocking would change it for everybody who shares it, such as the
    shell.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._stream.flush()
        self._descriptor = _descriptor(self._stream)
        self._waits = self._descriptor is not None and _waits(self._descriptor)
        self.terminal = self._descriptor is not None and os.isatty(self._descriptor)
        """Whether it is a terminal."""
        self.divert: Callable[[str], None] | None = None
        """Takes the lines instead, while a live view has the terminal."""

    async def line(self, text: str) -> None:
        """Writes a line.

        Raises:
            BrokenPipeError: nobody reads any more.
            Unwritable: it cannot be written to.
        """
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
        rest = memoryview(data)
        while rest:
            if self._waits:
                await _writable(descriptor)
                rest = rest[os.write(descriptor, rest[:_ATOMIC]) :]
            else:
                rest = rest[os.write(descriptor, rest) :]


async def _writable(descriptor: int) -> None:
    if select.select([], [descriptor], [], 0)[1]:
        return
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(descriptor, _once, ready)
    try:
        await ready
    finally:
        loop.remove_writer(descriptor)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(descriptor, _once, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _once(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def input_lines() -> AsyncGenerator[bytes, None]:
    """Gives the lines of standard input as they come.

    Raises:
        BadInput: one of them is too long.
    """
    descriptor = _descriptor(sys.stdin)
    if descriptor is None:
        for line in sys.stdin:
            yield line.encode()
        return
    waits = _waits(descriptor)
    rest = b""
    while True:
        if waits:
            await _readable(descriptor)
        data = os.read(descriptor, _PIECE)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST:
            raise BadInput(f"a line of the standard input has more than {_LONGEST:,} bytes")
        for line in lines:
            yield line
    if rest:
        yield rest
