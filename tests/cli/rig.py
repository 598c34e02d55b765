"""Runs the command line as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from dfm_async.cli.app import app

__all__ = ["STATIONS", "Done", "command", "dfm", "invoked", "lines", "started", "until"]

STATIONS = str(Path(__file__).parent / "programs" / "stations.py")
SCRIPT = str(Path(sys.executable).parent / "dfm-async")

Done = subprocess.CompletedProcess[str]


def command(*arguments: str) -> list[str]:
    return [SCRIPT, *arguments]


def _environment(env: dict[str, str] | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DFM_")}
    return {**clean, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **(env or {})}


def dfm(
    *arguments: str,
    cwd: Path | None = None,
    given: str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 60,
) -> Done:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=_environment(env),
    )


def invoked(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """Runs it in this process, which is quicker: for what needs no process of its own."""
    none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("DFM_")}
    return CliRunner().invoke(app, list(arguments), env={**none, **(env or {})})


@contextmanager
def started(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs it beside the test, and ends it at last."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(env),
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def until(stream: Any, text: str) -> str:
    """Reads lines until one has this text, and gives it."""
    for line in stream:
        if text in line:
            return str(line)
    raise AssertionError(f"it ended without saying {text!r}")


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]
