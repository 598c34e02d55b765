r"""A web service over three sites: ``python examples/service.py``, then open http://127.0.0.1:8000/dfm/openapi.json.

Needs ``pip install 'dfm-async[web]' uvicorn``, and FastAPI if it is to be used. In another terminal::

    curl -N http://127.0.0.1:8000/dfm/pipelines/report/jobs \
        -H 'content-type: application/json' -H 'accept: text/event-stream' \
        -d '{"params": [{"day": "mon"}, {"day": "tue"}]}'
"""

import argparse
import asyncio

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Session, Yield, collect, current_context
from dfm_async.web import Service

try:
    from fastapi import Depends, FastAPI
except ImportError:
    FastAPI = None  # type: ignore[assignment,misc] # Starlette is enough

fed = Federation("weather")
archive = fed.site("archive")
lab = fed.site("lab")
office = fed.site("office")

DAYS = {"mon": [14.0, 19.5, 16.0, 12.5], "tue": [9.5, 12.0, 21.5]}


@archive.operation
async def load(day: str) -> list[float]:
    """Reads the temperatures of one day."""
    return DAYS[day]


@lab.operation
async def anomaly(value: float, base: float = 15.0) -> float:
    """Takes a while to tell how far a value lies from the base."""
    context = current_context()
    for step in range(5):
        context.progress(step, 5)
        await asyncio.sleep(0.1)
    return value - base


@office.operation
async def summary(day: str, deltas: list[float]) -> str:
    """Writes one line about a day."""
    return f"{day}: {min(deltas):+.1f} to {max(deltas):+.1f}"


with Pipeline("report") as report:
    day = PlaceParam("day", multiuse=True)
    with ForEach(load(day)) as temperature:
        delta = anomaly(temperature)
        Yield(delta, place="delta")
    Yield(summary(day, collect(delta)), place="line")

service = Service(fed, pipelines={"report": report})


async def lines(session: Session) -> list[str]:
    """Runs the report for all days, as a handler of one's own does."""
    job = await session.execute(report, [{"day": name} for name in DAYS])
    return sorted([result.value async for result in job.results("line")])


if FastAPI is not None:
    app: Starlette = FastAPI(lifespan=service.lifespan)
    app.mount("/dfm", service.app)

    @app.get("/lines")  # type: ignore[attr-defined,untyped-decorator] # it is a FastAPI
    async def fastapi_lines(session: Session = Depends(service.session)) -> list[str]:  # noqa: B008 - as FastAPI wants it
        return await lines(session)
else:

    async def starlette_lines(request: Request) -> JSONResponse:
        return JSONResponse(await lines(service.session(request)))

    app = Starlette(lifespan=service.lifespan, routes=[Route("/lines", starlette_lines), Mount("/dfm", service.app)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(app, port=parser.parse_args().port)
