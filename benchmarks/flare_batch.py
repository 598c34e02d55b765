"""A batch of files at a site on FLARE keeps all its cores busy, and loses none when workers are killed.

The job of :mod:`benchmarks.batch`, at a site of a federation on this machine. The processes of the federation, with the
server, count as processes of the batch, as its application does; the pool runs without them.
"""

from __future__ import annotations

from benchmarks import batch, flare
from benchmarks.common import Figure, Options, main
from dfm_async import Session
from dfm_async.model.flare import FlareOptions


async def run(options: Options) -> list[Figure]:
    async with flare.up(("lab",)) as up:
        kit = FlareOptions(startup_kit=up.startup_kit, user=up.user, code="travels")
        async with Session(batch.fed, target="flare", options=kit) as session:
            return await batch.figures(session, options)


if __name__ == "__main__":
    main("flare_batch", __doc__, run)
