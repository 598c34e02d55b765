"""What is special about a federation on FLARE, and what nv_dfm_core's own FLARE target gets wrong."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from dfm_async import Federation, JobStatus, PipelineError, PlaceParam, Session
from dfm_async.errors import DecodingError
from tests.conformance.conftest import GATEWAY, flare_options
from tests.flare.shared import Shared
from tests.support.pipelines import pipeline_of, yielding
from tests.support.sessions import all_values, first_value

fed = Federation("corners", api_version="1.0.0")
lab, server, home = fed.site("lab"), fed.site("server"), fed.site("home")
elsewhere = fed.site("nowhere")


@server.operation
async def increase(n: int) -> int:
    return n + 1


@home.operation
async def show(n: int) -> str:
    return f"<{n}>"


@lab.operation
async def never() -> None:
    await asyncio.Event().wait()


@elsewhere.operation
async def unreachable() -> int:
    return 1


class Opaque:
    """Something that only pickle could send."""


@lab.operation
async def look(thing: Any) -> str:
    return str(thing)


class Scale(enum.Enum):
    CELSIUS = "C"


@dataclass(frozen=True)
class Reading:
    level: float
    scale: Scale


@dataclass(frozen=True)
class Secret:
    text: str


@lab.operation
async def measure(level: float) -> list[Reading]:
    return [Reading(level, Scale.CELSIUS)]


@lab.operation
async def whatever(text: str) -> Any:
    return Secret(text)


measuring = pipeline_of(measure, "level")
anything = pipeline_of(whatever, "text")
server_only = pipeline_of(increase, "n")

at_home = yielding(lambda: show(increase(PlaceParam("n"))))


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(flare: Shared) -> AsyncIterator[Session]:
    async with Session(fed, target="flare", options=flare_options(flare)) as session:
        yield session


async def test_the_server_and_the_homesite_are_sites(session: Session) -> None:
    assert sorted(await all_values(session, server_only, [{"n": n} for n in range(3)])) == [1, 2, 3]
    assert await first_value(session, at_home, {"n": 1}) == "<2>"


async def test_timeout_of_a_waiter_does_not_end_the_job(session: Session) -> None:
    pipeline = pipeline_of(never)
    job = await session.execute(pipeline)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await job
    assert not job.status.ended
    await job.cancel(grace=1)
    assert job.status is JobStatus.ABORTED


async def test_unavailable_operations_are_refused_when_prepared(session: Session) -> None:
    nowhere = pipeline_of(unreachable)
    with pytest.raises(PipelineError, match="no client of this name"):
        await session.prepare(nowhere)
    opaque = yielding(lambda: look(Opaque()))
    with pytest.raises(PipelineError, match="cannot be sent to other organisations"):
        await session.prepare(opaque)


async def test_stats_name_the_transport(session: Session) -> None:
    assert session.stats().transport == ("gateway" if GATEWAY == "auto" else "commands")


async def test_values_of_sites_are_of_classes_that_operations_name(session: Session, flare: Shared) -> None:
    assert await first_value(session, measuring, {"level": 7.5}) == [Reading(7.5, Scale.CELSIUS)]
    job = await session.execute(anything, {"text": "x"})
    with pytest.raises(DecodingError, match=r"Secret.* is not accepted from others: .*FlareOptions\.classes"):
        await job.collect()
    async with Session(fed, target="flare", options=flare_options(flare, classes=(Secret,))) as knowing:
        assert await first_value(knowing, anything, {"text": "x"}) == Secret("x")
