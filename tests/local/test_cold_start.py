"""What is loaded on the way to a first result, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import asyncio, sys
from dfm_async import Federation, Pipeline, PlaceParam, Session, Yield

assert "dfm_async.runtime.site_runtime" not in sys.modules, "loaded while the fork server could load"

def loaded(n: int) -> list[str]:
    import sys
    return [name for name in ("aiomultiprocess", "multiprocessing.connection") if name in sys.modules]

async def main():
    federation = Federation("cold")
    operation = federation.site("lab").operation(loaded)
    with Pipeline() as pipeline:
        Yield(operation(PlaceParam("n")))
    async with Session(federation) as session:
        job = await session.execute(pipeline, {"n": 1})
        async for result in job:
            print(result.value)
    print([name for name in ("pydantic", "anyio") if name in sys.modules])

asyncio.run(main())
"""


def test_first_result_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    script = tmp_path / "cold.py"
    script.write_text(_SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
