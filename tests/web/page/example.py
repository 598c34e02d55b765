"""The example service, as it is started from a shell."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a-token-for-the-example"
KNOWN = {"authorization": f"Bearer {TOKEN}"}
"""What programs send."""


@asynccontextmanager
async def example(store: Path) -> AsyncIterator[str]:
    """Runs the example service and gives its address; in the end asks it to end, which must leave nothing behind."""
    command = [sys.executable, "-u", "examples/service.py", "--port", "0", "--store", str(store)]
    environment = {**os.environ, "DFM_TOKEN": TOKEN}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE, env=environment)
    assert process.stderr is not None
    said: list[str] = []
    try:
        address = None
        while address is None:
            line = (await process.stderr.readline()).decode()
            assert line, "".join(said)
            said.append(line)
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
        yield address[0]
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        said.append((await process.stderr.read()).decode())
        assert await process.wait() in (0, -signal.SIGINT)  # the server passes the signal on when it has ended
        assert "Application shutdown complete" in said[-1]
        assert "Traceback" not in said[-1]
        assert psutil.wait_procs(family, timeout=10)[1] == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
