"""Run a command: exit codes, signals, and errors in plain words."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, Final, NoReturn

import typer

from dfm_async.errors import (
    DfmError,
    FederationError,
    FlareError,
    JobNotFound,
    JobOwned,
    ParameterError,
    PipelineError,
    ResultsExpired,
    ServiceError,
    ShippingError,
    StoreError,
)
from dfm_async.model.status import JobStatus


class Exit(IntEnum):
    """The exit codes of the program."""

    SUCCESS = 0
    FAILED = 1
    """The job failed or was aborted, or a check found something bad."""
    BAD_INPUT = 2
    """The input is invalid: nothing ran."""
    UNREACHABLE = 3
    """The service, the store, the federation or the job does not exist, or cannot be reached."""
    INTERRUPTED = 130
    """Ctrl-C."""
    OUTPUT_CLOSED = 141
    """The reader of standard output has gone, as with ``| head``."""


class BadInput(Exception):
    """Invalid input. The message says what is wrong, where, and what to do."""


class Unreachable(Exception):
    """A service, store or job does not exist, or cannot be reached."""


class Unwritable(Exception):
    """Results cannot be written, as when the disk is full."""


def _exit_of(error: Exception) -> Exit:
    match error:
        case BadInput() | FederationError() | PipelineError() | ParameterError() | ShippingError():
            return Exit.BAD_INPUT
        case (
            Unreachable() | JobNotFound() | JobOwned() | ResultsExpired() | FlareError() | ServiceError() | StoreError()
        ):
            return Exit.UNREACHABLE
        case Unwritable() | DfmError():
            return Exit.FAILED
    raise error


def _advice_of(error: Exception) -> str:
    match error:
        case ServiceError(status=None):
            return "Start one with dfm-async serve, or give its address with --url"
        case ServiceError(status=401):
            return "Give --token-file, or set DFM_TOKEN"
        case JobNotFound():
            return "dfm-async jobs lists the jobs that are known"
        case ResultsExpired():
            return f"Give --after {error.first - 1}"
    return ""


def exit_of_status(status: JobStatus) -> Exit:
    """Return the exit code for the final status of a job."""
    return Exit.SUCCESS if status is JobStatus.FINISHED else Exit.FAILED


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a full disk."""
_SHOW_CURSOR: Final = "\x1b[?25h"
_CONTROLS: Final = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
"""Characters that control a terminal or reorder its text; the encoder escapes those below U+0020."""


def safe(text: str) -> str:
    """Escape what could control the terminal: untrusted text must not."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def safe_json(data: bytes) -> str:
    """Escape the characters in JSON that could control the terminal."""
    text = data.decode()
    return text if text.isprintable() else _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_message(message: str) -> None:
    """Write a message to standard error."""
    typer.echo(f"dfm-async: {safe(message)}", err=True)


def run_command(prepare: Callable[[], Coroutine[Any, Any, int] | int | None], *, handles_signals: bool) -> NoReturn:
    """Run a command, which returns its exit code or a coroutine that does, and end the program with that code.

    The first Ctrl-C cancels the command, and what it does about that is awaited. The second one ends the program at
    once. Commands that handle signals are left alone. Expected errors end the program with a plain message.
    """
    try:
        work = prepare()
        if isinstance(work, Coroutine):
            work = asyncio.run(work if handles_signals else _interruptible(work))
    except (DfmError, BadInput, Unreachable, Unwritable) as error:
        print_message(". ".join(filter(None, [str(error), _advice_of(error)])))
        raise typer.Exit(_exit_of(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except BrokenPipeError:
        _discard_output()
        raise typer.Exit(Exit.OUTPUT_CLOSED) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _discard_output()
        print_message(f"{error.filename or 'standard output'}: {error.strerror}")
        raise typer.Exit(Exit.FAILED) from None
    raise typer.Exit(work or Exit.SUCCESS)


def _discard_output() -> None:
    """Discard standard output: otherwise the interpreter would try to flush at exit, and print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 - we run in one
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            os._exit(128 + number)  # worker processes notice, and end
        received.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
