"""Call an operation in worker processes: once, and with many inputs."""

import asyncio

from dfm_async import Federation, Session

fed = Federation("weather", api_version="1.0.0")
lab = fed.site("lab")


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    """Return how far a value is from the base."""
    return value - base


async def main() -> None:
    async with Session(fed) as session:
        print(await session.call(anomaly, 17.0))  # 2.0, from a worker process of the site
        async for delta in session.map(anomaly, range(1000)):  # on all cores, in the order of the inputs
            print(delta)


if __name__ == "__main__":
    asyncio.run(main())
