"""The example service, as it is started from a shell."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def example() -> AsyncIterator[str]:
    """Runs the example service; gives where its page is."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "examples/service.py", "--port", "0", "--store", f"{directory}/jobs.db"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            address = None
            while address is None:
                line = await process.stderr.readline()
                assert line, "it has ended"
                address = re.search(r"http://127\.0\.0\.1:\d+", line.decode())
            yield f"{address[0]}/dfm/"
        finally:
            process.terminate()
            await process.communicate()
