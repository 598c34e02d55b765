"""The first pipeline: two sites, a loop, a branch."""

import asyncio

from dfm_async import Federation, ForEach, If, Pipeline, PlaceParam, Session, Yield

fed = Federation("weather", api_version="1.0.0")
archive = fed.site("archive")
lab = fed.site("lab", workers=2)


@archive.operation
async def load(day: str) -> list[float]:
    """Reads the temperatures of one day."""
    return {"mon": [14.0, 19.5, 16.0], "tue": [9.5, 12.0]}[day]


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    """Returns how far a value lies from the base."""
    return value - base


with Pipeline("anomalies") as pipeline:
    temperatures = load(day=PlaceParam("day"))
    with ForEach(temperatures) as temperature:
        delta = anomaly(temperature)
        with If(delta > 0):
            Yield(delta, place="warm")
    Yield(temperatures, place="raw")


async def main() -> None:
    async with Session(fed) as session:
        job = await session.execute(pipeline, [{"day": "mon"}, {"day": "tue"}])
        async for result in job:
            print(result.frame, result.place, result.value, result.site)
        print(await job)  # JobStatus.FINISHED


if __name__ == "__main__":
    asyncio.run(main())
