"""What is special about a federation on FLARE, and what nv_dfm_core's own FLARE target gets wrong."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from dfm_async import (
    DecodingError,
    Federation,
    JobStatus,
    Pipeline,
    PipelineError,
    PlaceParam,
    Session,
    Yield,
)
from dfm_async.model.flare import FlareOptions
from tests.conformance.conftest import WAY
from tests.flare.shared import Shared

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


with Pipeline("measuring") as measuring:
    Yield(measure(PlaceParam("level")))

with Pipeline("anything") as anything:
    Yield(whatever(PlaceParam("text")))

with Pipeline("server only") as server_only:
    Yield(increase(PlaceParam("n")))

with Pipeline("home and server") as at_home:
    Yield(show(increase(PlaceParam("n"))))


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(flare: Shared) -> AsyncIterator[Session]:
    options = FlareOptions(startup_kit=flare.startup_kit, user=flare.user, code="travels", gateway=WAY, linger=600)
    async with Session(fed, target="flare", options=options) as session:
        yield session


async def test_the_server_and_the_homesite_are_sites(session: Session) -> None:
    job = await session.execute(server_only, [{"n": n} for n in range(3)])
    assert sorted([result.value async for result in job]) == [1, 2, 3]
    job = await session.execute(at_home, {"n": 1})
    assert (await job.first()).value == "<2>"


async def test_a_wait_of_the_application_ends_by_its_own_timeout_and_the_job_goes_on(session: Session) -> None:
    with Pipeline("never") as pipeline:
        Yield(never())
    job = await session.execute(pipeline)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await job
    assert not job.status.ended
    await job.cancel(grace=1)
    assert job.status is JobStatus.ABORTED


async def test_what_the_federation_cannot_give_is_refused_when_a_pipeline_is_prepared(session: Session) -> None:
    with Pipeline("nowhere") as nowhere:
        Yield(unreachable())
    with pytest.raises(PipelineError, match="no client of this name"):
        await session.prepare(nowhere)
    with Pipeline("opaque") as opaque:
        Yield(look(Opaque()))
    with pytest.raises(PipelineError, match="cannot be sent to other organisations"):
        await session.prepare(opaque)


async def test_stats_tell_which_way_is_taken(session: Session) -> None:
    assert session.stats().way == ("gateway" if WAY == "auto" else "commands")


async def test_values_of_sites_are_of_classes_that_operations_name(session: Session, flare: Shared) -> None:
    job = await session.execute(measuring, {"level": 7.5})
    assert (await job.first()).value == [Reading(7.5, Scale.CELSIUS)]
    job = await session.execute(anything, {"text": "x"})
    with pytest.raises(DecodingError, match=r"Secret.* is not taken from others: .*FlareOptions\.classes"):
        await job.collect()
    options = FlareOptions(
        startup_kit=flare.startup_kit, user=flare.user, code="travels", gateway=WAY, linger=600, classes=(Secret,)
    )
    async with Session(fed, target="flare", options=options) as knowing:
        job = await knowing.execute(anything, {"text": "x"})
        assert (await job.first()).value == Secret("x")
