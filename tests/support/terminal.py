"""A program on a terminal, and the person in front of it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LAUNCH = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_TIMEOUT = 30.0


class Terminal:
    """The other side of a terminal: the keyboard and the screen."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self.process = process
        self._text = ""

    def type(self, text: str) -> None:
        """Type text."""
        os.write(self._descriptor, text.encode())

    def until(self, text: str) -> str:
        """Wait until the screen shows a text; return what it has shown before, since the last time."""
        deadline = time.monotonic() + _TIMEOUT
        while text not in self._text:
            left = deadline - time.monotonic()
            if not select.select([self._descriptor], [], [], max(0.0, left))[0]:
                raise AssertionError(f"{text!r} was not shown within {_TIMEOUT:g} s, but: {self._text}")
            try:
                data = os.read(self._descriptor, 64 * 1024)
            except OSError as error:
                raise AssertionError(f"the program ended without showing {text!r}: {self._text}") from error
            self._text += data.decode().replace("\r\n", "\n")
        before, _, self._text = self._text.partition(text)
        return before

    def answer(self, text: str, prompt: str = "(Pdb) ") -> str:
        """Wait for a prompt, and type a line; return what was shown before the prompt."""
        shown = self.until(prompt)
        self.type(text + "\n")
        return shown


@contextmanager
def on_terminal(*arguments: str | Path) -> Iterator[Terminal]:
    """Run Python with these arguments on a terminal of its own, and kill it in the end."""
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", _LAUNCH, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    finally:
        os.close(theirs)
    with process:
        try:
            yield Terminal(ours, process)
        finally:
            process.kill()
            os.close(ours)
