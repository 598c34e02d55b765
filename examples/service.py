r"""A FastAPI service over three sites, with a live page: ``python examples/service.py``.

``python3 noxfile.py serve`` installs what it needs in an environment of its own, and starts it. In yours: ``pip install
'.[web,sqlite]' fastapi uvicorn`` in a checkout.
Open the printed address in a browser, and submit a job in another terminal, with the token in the address::

    curl http://127.0.0.1:8000/dfm/pipelines/report/jobs -H 'authorization: Bearer TOKEN' \
        -H 'content-type: application/json' -d '{"params": [{"day": "mon"}, {"day": "tue"}]}'

Then kill a worker whose pid the page shows, reload the page, and restart the service: nothing is lost. Jobs are stored
in ``example-jobs.db`` in the current folder; ``--store`` sets another file.
"""

import argparse
import asyncio
from pathlib import Path

import uvicorn
from fastapi import Depends, FastAPI

from dfm_async import (
    Federation,
    ForEach,
    Pipeline,
    PlaceParam,
    RetryPolicy,
    Session,
    Yield,
    collect,
    current_context,
)
from dfm_async.web import Service

DAYS = {"mon": [14.0, 19.5, 16.0, 12.5], "tue": [9.5, 12.0, 21.5], "wed": [15.5, 17.0, 13.0, 18.5, 11.0]}
AGAIN = RetryPolicy(on_worker_lost=5)  # the work of a lost worker runs again

fed = Federation("weather")
archive, lab, office = fed.site("archive"), fed.site("lab"), fed.site("office")


@archive.operation(retry=AGAIN)
async def load(day: str) -> list[float]:
    """Return the temperatures of one day."""
    return DAYS[day]


@lab.operation(retry=AGAIN)
async def anomaly(value: float, base: float = 15.0) -> float:
    """Return how far a value is from the base, slowly."""
    for step in range(10):
        current_context().progress(step, 10)
        await asyncio.sleep(0.2)
    return value - base


@office.operation(retry=AGAIN)
async def summary(day: str, deltas: list[float]) -> str:
    """Return one line about a day."""
    return f"{day}: {min(deltas):+.1f} to {max(deltas):+.1f}"


with Pipeline("report") as report:
    day = PlaceParam("day")
    with ForEach(load(day), concurrency=2) as temperature:
        delta = anomaly(temperature)
        Yield(delta, place="delta")
    Yield(summary(day, collect(delta)), place="line")


def make_service(store: Path) -> Service:
    """Return the service, with a store so that its jobs survive a restart."""
    return Service(session=lambda: Session(fed, store=f"sqlite:///{store}"), pipelines={"report": report})


def make_app(service: Service) -> FastAPI:
    """Return the application."""
    app = FastAPI(lifespan=service.lifespan)
    app.mount("/dfm", service.app)

    @app.get("/lines")
    async def lines(session: Session = Depends(service.session)) -> list[str]:  # noqa: B008 - FastAPI requires it
        """Run the report for all days, as an example of a custom handler."""
        job = await session.execute(report, [{"day": name} for name in DAYS])
        return [result.value async for result in job.results("line", ordered=True)]

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A web service over three sites, with a live page.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--store", type=Path, default=Path("example-jobs.db"))
    arguments = parser.parse_args()
    service = make_service(arguments.store)
    print(f"the live page: http://127.0.0.1:{arguments.port}/dfm/?token={service.token}")
    uvicorn.run(make_app(service), port=arguments.port)
