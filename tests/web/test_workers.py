"""Streams of jobs whose workers die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from dfm_async import Federation, LocalOptions, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.web import AllowAnyone, Service
from tests.web.rig import events, serving

fragile = Federation("fragile")
there = fragile.site("there")


@there.operation
async def dies_once(mark: str) -> int:
    """Kills its own worker, unless it has done so before."""
    path = Path(mark)
    if not path.exists():  # noqa: ASYNC240 - a small local file
        path.touch()  # noqa: ASYNC240 - a small local file
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
    return os.getpid()


with Pipeline("dies") as dies:
    Yield(dies_once(PlaceParam("mark"), retry=RetryPolicy(on_worker_lost=1)))


async def test_a_stream_goes_on_while_a_worker_is_lost(tmp_path: Path) -> None:
    options = LocalOptions(lanes=1)
    service = Service(session=Session(fragile, options=options), pipelines={"dies": dies}, authorizer=AllowAnyone())
    async with serving(service) as server:
        async with server.client.stream(
            "POST",
            "/pipelines/dies/jobs",
            json={"params": {"mark": str(tmp_path / "mark")}},
            headers={"accept": "text/event-stream"},
        ) as response:
            found = [event async for event in events(response)]
        names = [event.name for event in found]
        assert names.count("result") == 1
        assert [event.data["kind"] for event in found if event.name == "worker"] == ["lost"]
        assert found[-1].data["status"] == "finished"
        assert [event.id for event in found[:-1]] == list(range(len(found) - 1))
