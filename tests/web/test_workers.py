"""Streams of jobs whose workers die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from dfm_async import Federation, LocalOptions, RetryPolicy, Session
from tests.support.pipelines import pipeline_of
from tests.web.rig import STREAM, new_service, serving

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


dies = pipeline_of(dies_once, "mark", retry=RetryPolicy(on_worker_lost=1))


async def test_a_stream_goes_on_while_a_worker_is_lost(tmp_path: Path) -> None:
    session = Session(fragile, options=LocalOptions(lanes=1))
    async with serving(new_service(session=session, pipelines={"dies": dies})) as server:
        body = {"params": {"mark": str(tmp_path / "mark")}}
        async with server.follow("/pipelines/dies/jobs", "POST", json=body, headers=STREAM) as stream:
            found = [event async for event in stream]
        names = [event.name for event in found]
        assert names.count("result") == 1
        assert [event.data["kind"] for event in found if event.name == "worker"] == ["lost"]
        assert found[-1].data["status"] == "finished"
        assert [event.id for event in found[:-1]] == list(range(len(found) - 1))
