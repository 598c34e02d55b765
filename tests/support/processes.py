"""Programs that tests start."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the repository."""


def run_python(*arguments: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and return what it has printed."""
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], check=check, **options)


@contextmanager
def started(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program beside the test, and kill it in the end."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(stream: IO[str] | None, text: str) -> re.Match[str]:
    """Read lines until one matches a pattern, and return the match."""
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if found := re.search(text, line):
            return found
    raise AssertionError(f"the program ended without printing {text!r}: {''.join(lines)}")


@contextmanager
def started_server(*arguments: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server with Python; give the process and the URL that the server logs when it is up."""
    with started(sys.executable, "-u", *arguments, stderr=subprocess.PIPE, **options) as process:
        yield process, read_until(process.stderr, r"http://127\.0\.0\.1:\d+")[0]


def free_socket() -> socket.socket:
    """Return a socket that is bound to a free port of this machine."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return found


def printed_with_hash_seeds(code: str, *arguments: str, **options: Any) -> set[str]:
    """Run code in new processes, and return what it prints there: one text, if it does not depend on hashes."""
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2", "3")]
    return {run_python("-c", code, *arguments, env=env, encoding="utf-8", **options).stdout for env in environments}
