"""Call an operation in a worker process."""

import asyncio

from dfm_async import Federation, Session

fed = Federation("weather")


@fed.site("lab", workers=8).operation  # up to eight calls compute at the same time
def anomaly(value: float, base: float = 15.0) -> float:
    return value - base


async def main() -> None:
    async with Session(fed) as session:
        print(await session.call(anomaly, 17.0))  # 2.0, from a worker process of the site


asyncio.run(main())
