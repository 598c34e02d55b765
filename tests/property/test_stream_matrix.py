"""Every kind of source, mapper and reader of streams, between sites in all directions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dfm_async import ForEach, If, JobStatus, Operation, Pipeline, PlaceParam, ResultLimits, Session, Yield, collect
from tests.property import random_pipelines as r
from tests.property.test_random_pipelines import check, inline, local

__all__ = ["chains", "inline", "local", "matrix"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.shared_session]

ROUTES = [
    ("archive", "archive", "archive"),
    ("archive", "lab", "lab"),
    ("archive", "lab", "archive"),
    ("archive", "lab", "desk"),
    ("desk", "lab", "desk"),
]
"""Where the source, the mapper and the reader are."""


def chains(source: Operation[..., Any], mapper: Operation[..., Any] | None) -> Pipeline:
    """One pipeline with a source of its own for each route and reader: also, streams of one kind that cross."""
    with Pipeline(f"{source.name} {mapper and mapper.name}") as pipeline:
        n = PlaceParam("x", multiuse=True)

        def stream(route: tuple[str, str, str]) -> Any:
            values = source(n, site=route[0])
            return values if mapper is None else mapper(values, site=route[1])

        for number, route in enumerate(ROUTES):
            for reader in r.READERS:
                Yield(reader(stream(route), site=route[2]), place=f"{reader.name} {number}")
            Yield(stream(route), place=f"yield {number}", after=stream(route))
            with ForEach(stream(route), concurrency=2) as value:
                item = r.total([value], site=route[2])
            Yield(collect(item), place=f"loop {number}")
            outer = stream(route)
            with ForEach([1, 2]):
                Yield(r.counted(outer, site=route[2]), place=f"in a loop {number}")
            with If(r.inc(n) > 4):
                Yield(r.total(outer, site=route[2]), place=f"if {number}")
            back = r.shifted(r.tripled(outer, site=route[2]), site=route[0])
            Yield(r.total(r.merged(back, outer, site=route[1]), site=route[2]), place=f"back {number}")
    return pipeline


def matrix() -> Iterator[Pipeline]:
    """All of them."""
    for source in r.SOURCES:
        for mapper in (None, *r.MAPPERS):
            yield chains(source, mapper)


async def check_all(session: Session, pipelines: list[Pipeline]) -> None:
    for pipeline in pipelines:
        await check(session, pipeline, [{"x": x} for x in (5, 8)])


async def test_streams_of_all_kinds_in_all_directions_on_the_loop(inline: Session) -> None:
    await check_all(inline, list(matrix()))


async def test_streams_of_all_kinds_in_all_directions_between_processes(local: Session) -> None:
    await check_all(local, list(matrix())[::4])


async def test_streams_of_all_kinds_can_be_cancelled_in_the_middle() -> None:
    """After any number of events: each job ends, and the session leaves nothing behind."""
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    async with Session(r.fed, target="inline") as session, asyncio.timeout(60):
        for number, pipeline in enumerate(list(matrix())[::2]):
            job = await session.execute(pipeline, [{"x": 5}, {"x": 8}], options=ResultLimits(max_items=40, window=4))
            events = job.events()
            for _ in range(6 * number):
                await anext(events)
            await events.aclose()
            await job.cancel()
            assert job.status is JobStatus.ABORTED
    assert asyncio.all_tasks() <= tasks
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive()
