"""Run the command line as a user does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from dfm_async.cli.app import app
from tests.support import processes

__all__ = ["STATIONS", "Done", "command", "dfm", "invoked", "lines", "started", "statuses", "until"]

STATIONS = str(Path(__file__).parent / "programs" / "stations.py")
SCRIPT = str(Path(sys.executable).parent / "dfm-async")

Done = subprocess.CompletedProcess[str]


def command(*arguments: str) -> list[str]:
    return [SCRIPT, *arguments]


def _environment(env: dict[str, str] | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DFM_")}
    return {**clean, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **(env or {})}


def dfm(*arguments: str, given: str | None = None, env: dict[str, str] | None = None, **options: Any) -> Done:
    """Run a command in a process of its own."""
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False, **options}
    return subprocess.run(command(*arguments), input=given, env=_environment(env), **options)


def invoked(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run a command in this process, which is quicker: for what needs no process of its own."""
    none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("DFM_")}
    return CliRunner().invoke(app, list(arguments), env={**none, **(env or {})})


def started(
    *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a command beside the test, and kill it in the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return processes.started(*command(*arguments), env=_environment(env), **pipes, **options)


def until(stream: Any, text: str) -> str:
    """Read lines until one has this text, and return it."""
    return processes.read_until(stream, re.escape(text)).string


def statuses(store: list[str]) -> list[str]:
    """Return the statuses of the jobs of a store."""
    return [job["status"] for job in lines(invoked("jobs", *store, "--json").stdout)]


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]
