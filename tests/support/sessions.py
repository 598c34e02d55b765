"""Options of sessions, and checks of their jobs."""

from __future__ import annotations

from typing import Any

from dfm_async import LocalOptions, Pipeline, Session
from dfm_async.planning import Plan

LIMIT = 15
"""The number of seconds after which a test hangs."""
SHORT = LocalOptions(cancel_grace=0.5, shutdown_grace=0.5)
"""Short grace periods, for tests that wait for their ends."""


async def first_value(session: Session, pipeline: Pipeline | Plan, params: Any = None, **options: Any) -> Any:
    """Execute a pipeline, and return the value of its first result."""
    job = await session.execute(pipeline, params or {}, **options)
    return (await job.first()).value


async def all_values(session: Session, pipeline: Pipeline | Plan, params: Any = None, **options: Any) -> list[Any]:
    """Execute a pipeline, and return the values of its results in the order of their arrival."""
    job = await session.execute(pipeline, params or {}, **options)
    return [result.value for result in await job.collect()]
