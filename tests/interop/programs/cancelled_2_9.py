"""A site with NVFLARE 2.9 that changes its mind while its cell starts, at several moments: nothing may be left."""

import asyncio
import threading

from dfm_async.exchange import LauncherExecutor
from dfm_async.exchange.cell.transport import CellTransport


async def main() -> None:
    """Tells which threads are left that would keep the interpreter."""
    for delay in (0, 0.005, 0.05):
        executor = LauncherExecutor(None, transport=CellTransport())
        opening = asyncio.ensure_future(executor.initialize())
        await asyncio.sleep(delay)
        opening.cancel()
        await asyncio.wait({opening})
        await executor.finalize()
    left = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    print("LEFT", left, flush=True)


asyncio.run(main())
