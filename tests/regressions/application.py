"""An application that tells which processes it has started, and then does nothing until it is killed."""

from __future__ import annotations

import asyncio
import sys

import psutil
from aiomultiprocess import Pool

from dfm_async import Federation, Pipeline, Session, Yield
from tests.regressions.calls import nothing


async def tell() -> None:
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    await asyncio.get_running_loop().create_future()


async def ours() -> None:
    fed = Federation("application")
    with Pipeline("nothing") as pipeline:
        Yield(fed.site("site").operation(nothing)())
    async with Session(fed) as session:
        await (await session.execute(pipeline))
        await tell()


async def stock() -> None:
    async with Pool(1) as pool:
        await pool.apply(nothing)
        await tell()


if __name__ == "__main__":
    asyncio.run({"ours": ours, "stock": stock}[sys.argv[1]]())
