"""Operations that say something, in every way there is, or that fall silent."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from dfm_async import Federation, OperationContext, current_context

fed = Federation("talkers")
talk = fed.site("talk")
other = fed.site("other")
library = logging.getLogger("some.library")


@talk.operation
async def pid() -> int:
    return os.getpid()


@talk.operation
async def awaits(text: str) -> str:
    print("out", text)
    await asyncio.sleep(0)
    print("err", text, file=sys.stderr)
    library.info("log %s", text)
    return current_context().job_id


@talk.operation
def blocks(text: str) -> str:
    print("out", text)
    print("err", text, file=sys.stderr)
    library.info("log %s", text)
    return current_context().job_id


@talk.operation
async def generates(text: str) -> AsyncIterator[str]:
    print("out", text)
    yield current_context().job_id
    print("err", text, file=sys.stderr)
    library.info("log %s", text)


@talk.operation
def iterates(text: str) -> Iterator[str]:
    print("out", text)
    yield current_context().job_id
    print("err", text, file=sys.stderr)
    library.info("log %s", text)


@talk.operation
def logs(context: OperationContext) -> None:
    """The context's own logger knows the call also in a thread that does not."""
    thread = threading.Thread(target=lambda: context.logger.warning("from %s", "afar"))
    thread.start()
    thread.join()
    try:
        int("broken inside")
    except ValueError:
        library.exception("it went wrong")
    library.debug("too quiet")
    library.warning("with the stack", stack_info=True)


@talk.operation
def in_c() -> None:
    print("before")
    os.write(1, b"from descriptor 1\n")
    os.write(2, b"from descriptor 2, unfinished")
    print("after")
    os.system("echo from a program; echo and its errors >&2")
    sys.stdout.buffer.write(b"from the buffer\n")


class _Text(str):
    __slots__ = ()


@talk.operation
def odd() -> dict[str, Any]:
    library.warning("half \ud800 a character")
    print("half \udc80 too")
    print(_Text("a text of its own"))
    library.warning("not %d", "a number")
    library.warning("no frame", extra={"job": object(), "frame": object()})
    library.warning("x" * 100_000)
    print("y" * 100_000)
    os.write(1, b"z" * 100_000 + b"\n")
    os.write(1, b"\x1enot json\n")
    print("one\ntwo\r\n\nfour")
    print("unfinished", end="")
    sys.stdout.flush()
    print("with\x1eseparator")
    if os.fork() == 0:
        print("from a fork")
        os._exit(0)
    os.wait()
    return {
        "fileno": (sys.stdout.fileno(), sys.stderr.fileno()),
        "isatty": sys.stdout.isatty(),
        "encoding": sys.stdout.encoding,
        "writable": sys.stdout.writable(),
    }


@talk.operation
async def interleaves(text: str) -> None:
    for part in text:
        print(part, end="")
        await asyncio.sleep(0)
    print()


@talk.operation
async def never_ends_its_lines(n: int) -> None:
    print(f"({n})", end="")


@talk.operation
def floods(lines: int) -> None:
    for number in range(lines):
        print(number)


@talk.operation
def leaves_a_program() -> None:
    """It keeps the pipe open, and is not in the group of processes that end with the worker."""
    program = subprocess.Popen(["sleep", "60"], close_fds=False, start_new_session=True)
    print(program.pid)
    os._exit(3)


@talk.operation
def says_and_ends(how: str) -> None:
    print("last printed")
    library.warning("last logged")
    os.write(2, b"last written")
    if how == "exit":
        os._exit(3)
    elif how == "crash":
        ctypes.string_at(0)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@talk.operation
def says_much_and_ends() -> None:
    os.write(1, b"first\n" + b"x\n" * 400_000 + b"last\n")
    os._exit(3)


# falling silent


@talk.operation
async def blocks_the_loop(seconds: float) -> None:
    print("blocked")
    time.sleep(seconds)  # noqa: ASYNC251 - this is what is tested
    await asyncio.Event().wait()


@talk.operation
async def keeps_the_interpreter(letters: int) -> None:
    """No other Python code of the process runs meanwhile."""
    re.match(r"(a+)+$", "a" * letters + "b")
    await asyncio.Event().wait()


@talk.operation
def sleeps(seconds: float) -> None:
    time.sleep(seconds)


@talk.operation
async def waits() -> None:
    await asyncio.Event().wait()


@other.operation
async def waits_a_moment(value: int, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return value
