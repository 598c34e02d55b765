"""The command line, ``dfm-async``. Needs the extra ``cli``."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from typing import NoReturn

from dfm_async.base.text import install_hint
from dfm_async.cli.interrupted import Interrupted

__all__ = ["main"]


def _interrupt(number: int, _frame: object) -> NoReturn:
    raise Interrupted(128 + number)


def main() -> int:
    """Run the command line, or name the extra that is missing."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"the command line needs an extra ({', '.join(missing)}): {install_hint('cli')}\n")
        return 2
    signal.signal(signal.SIGINT, _interrupt)
    from dfm_async.cli.app import app

    app(prog_name="dfm-async")
    return 0
