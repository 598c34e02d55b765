r"""A federation from a file: ``python examples/federation_file/main.py``.

To run the pipeline in ``warn.json``, which is in DFM's format, from a shell::

    cd examples/federation_file
    RIVERS_TOKEN=demo dfm-async run rivers/federation.dfm.yaml rivers/warn.json --param river=Elbe
"""

import asyncio
import os
from pathlib import Path

from dfm_async import Advise, Federation, Pipeline, PlaceParam, Session, TryFromCache, Yield
from dfm_async.discovery import SingleFieldAdvice

FOLDER = Path(__file__).parent / "rivers"
fed = Federation.from_yaml(FOLDER / "federation.dfm.yaml", packages=("rivers", "dfm_async.site.vaults"))
ops = fed.operations

with Pipeline("which rivers", mode="discovery") as question:
    ops.water.Levels(river=Advise())

with Pipeline("highest") as highest:
    river = PlaceParam("river")
    with TryFromCache(key=("highest", river), site="model") as level:
        level.store(ops.water.Highest(ops.water.Levels(river)))
    Yield(fed.sites["office"].operations.office.Report(river, level, words="keep your feet dry"))


async def main() -> None:
    """Discover the rivers, and run two pipelines for all of them."""
    async with Session(fed) as session:
        discovery = await session.discover(question)
        print(discovery)
        advice = discovery.sites["gauges"]["water.Levels#0"]
        if not isinstance(advice, SingleFieldAdvice):
            raise SystemExit("the site 'gauges' returned no advice for 'river'")
        params = [{"river": river} for river in advice]

        print((await session.prepare(highest)).explain())
        warn = fed.load_pipeline(FOLDER / "warn.json")
        for pipeline in (highest, warn):
            job = await session.execute(pipeline, params)
            async for result in job.results(ordered=True):
                print(f"{pipeline.name}: {result.value}")
            print(await job)


if __name__ == "__main__":
    os.environ.setdefault("RIVERS_TOKEN", "demo-token")  # usually set where the site runs
    asyncio.run(main())
