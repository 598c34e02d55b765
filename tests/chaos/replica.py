"""One of several services on a PostgreSQL database."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn

from dfm_async import Federation, Session
from dfm_async.store.postgres import PostgresStore
from dfm_async.web import AllowAnyone, Service
from tests.chaos.histories import RESULTS
from tests.support.pipelines import pipeline_of
from tests.support.processes import free_socket

fed = Federation("replicas")


@fed.site("lab").operation
async def steps(x: int, pause: float) -> AsyncIterator[list[int]]:
    for index in range(RESULTS):
        await asyncio.sleep(pause)
        yield [x, index]


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print("ready", self.config.port, flush=True)


def main(url: str, lease: str) -> None:
    service = Service(
        session=lambda: Session(fed, target="inline", store=PostgresStore(url, lease=float(lease))),
        pipelines={"steps": pipeline_of(steps, "x", "pause", name="steps")},
        authorizer=AllowAnyone(),
        resume=True,
        page=False,
    )
    with free_socket() as listening:
        port = listening.getsockname()[1]
        Server(uvicorn.Config(service.app, port=port, log_level="warning", ws="none")).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
