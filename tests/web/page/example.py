"""The example service, as it is started from a shell."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.processes import ROOT, started_server

__all__ = ["KNOWN", "ROOT", "TOKEN", "example"]

TOKEN = "a-token-for-the-example"
KNOWN = {"authorization": f"Bearer {TOKEN}"}
"""What programs send."""


@contextmanager
def example(store: Path) -> Iterator[str]:
    """Run the example service, and give its address; at the end it is asked to end, and must leave nothing behind."""
    arguments = ("examples/service.py", "--port", "0", "--store", str(store))
    with started_server(*arguments, cwd=ROOT, env={**os.environ, "DFM_TOKEN": TOKEN}) as (process, address):
        yield address
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGINT)  # the server passes the signal on when it has ended
        assert "Application shutdown complete" in said
        assert "Traceback" not in said
        assert psutil.wait_procs(family, timeout=10)[1] == []
