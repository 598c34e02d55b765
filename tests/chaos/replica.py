"""One of several services on a PostgreSQL database."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn

from dfm_async import Federation, LocalOptions, Pipeline, PlaceParam, Session, Wait, Yield
from dfm_async.store.postgres import PostgresStore
from dfm_async.web import AllowAnyone, Service
from tests.chaos.histories import RESULTS
from tests.support.processes import free_socket

fed = Federation("replicas")
lab = fed.site("lab")


@lab.operation
async def token(x: int) -> str:
    return f"{x} {os.urandom(8).hex()}"


@lab.operation
async def steps(x: int, pause: float, drawn: str, event: int) -> AsyncIterator[list[int | str]]:
    for index in range(RESULTS):
        await asyncio.sleep(pause)
        yield [x, index, drawn, event]


def pipeline(name: str, *, waits: bool) -> Pipeline:
    """Return a pipeline that yields what was drawn once, and an event."""
    with Pipeline(name) as made:
        x = PlaceParam("x", multiuse=True)
        Yield(steps(x, PlaceParam("pause"), token(x), Wait("go", type=int) if waits else 0))
    return made


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print("ready", self.config.port, flush=True)


def main(url: str, lease: str, checkpoints: str) -> None:
    def connect() -> Session:
        options = LocalOptions(checkpoints=checkpoints)
        return Session(fed, target="inline", store=PostgresStore(url, lease=float(lease)), options=options)

    service = Service(
        session=connect,
        pipelines={name: pipeline(name, waits=name == "waits") for name in ("steps", "waits")},
        authorizer=AllowAnyone(),
        resume=True,
        page=False,
    )
    with free_socket() as listening:
        port = listening.getsockname()[1]
        Server(uvicorn.Config(service.app, port=port, log_level="warning", ws="none")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
