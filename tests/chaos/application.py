"""An application that runs jobs which are written down, until it is killed. Started again, it goes on."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from tests.chaos.describe import describe
from tests.chaos.lasting import leases_expired, new_session, run


async def main(folder: Path, seed: int) -> None:
    await leases_expired(folder)
    async with new_session(folder) as session:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: print(describe(session), file=sys.stderr, flush=True))
        print("begun", flush=True)
        await run(session, folder, seed, heard=lambda: print("heard", flush=True))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
