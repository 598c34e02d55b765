"""Runs a command: on a loop of its own, with Ctrl-C heard, and its errors told in plain words."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import typer

from dfm_async.cli.exits import BadInput, Exit, Unreachable, Unwritable, exit_of
from dfm_async.errors import DfmError

__all__ = ["complain", "plain_errors", "run_async", "safe", "safe_json"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What is raised where nothing more can be written."""
_SHOW_CURSOR: Final = "\x1b[?25h"
_CONTROLS: Final = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
"""What a terminal may act on, or show in another order; the encoder escapes those below U+0020."""


def safe(text: str) -> str:
    """Makes a text harmless on a terminal: what comes from elsewhere must not steer it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def safe_json(data: bytes) -> str:
    """Makes JSON harmless on a terminal: control and direction characters, which only texts have, are escaped."""
    text = data.decode()
    return text if text.isprintable() else _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def complain(message: str) -> None:
    """Says what is wrong, on standard error."""
    typer.echo(f"dfm-async: {safe(message)}", err=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the program with the right exit code and a plain message if the block raises what is expected."""
    try:
        yield
    except (DfmError, BadInput, Unreachable, Unwritable) as error:
        complain(str(error))
        raise typer.Exit(exit_of(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except BrokenPipeError:
        # Else the interpreter would try to write what is left when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(Exit.OUTPUT_CLOSED) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        complain(f"{error.filename or 'standard output'}: {error.strerror}")
        raise typer.Exit(Exit.FAILED) from None


def run_async(work: Callable[[], Coroutine[Any, Any, int]], *, hears_signals: bool = False) -> NoReturn:
    """Runs a command to its end, and ends the program with the exit code that it gives.

    The first Ctrl-C cancels it, and what it does about that is waited for. The second one ends the program at once.

    Args:
        work: the command.
        hears_signals: whether it does something about signals itself.
    """
    with plain_errors():
        code = asyncio.run(work() if hears_signals else _interruptible(work))
    raise typer.Exit(code)


async def _interruptible(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 - we run in one
    heard: list[int] = []

    def hear(number: int) -> None:
        if heard:
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            os._exit(128 + number)  # worker processes see that we are gone, and end
        heard.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, hear, number)
    try:
        return await work()
    except asyncio.CancelledError:
        if not heard:
            raise
        return 128 + heard[0]
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
