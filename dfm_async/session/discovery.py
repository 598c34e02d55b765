"""Discovery as a job: it runs at the sites, and fails, as every job does."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from dfm_async.base.tasks import completed
from dfm_async.discovery.advice import Discovery, ErrorFieldAdvice, Found, found_of
from dfm_async.errors import DfmError, OperationFailed
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.events import Failure, Result
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import prepare_discovery
from dfm_async.session.job import Job
from dfm_async.session.preparation import not_a_pipeline


async def discover(
    pipeline: Pipeline,
    federation: Federation,
    homesite: str,
    restrict_to_sites: Iterable[str] | str | None,
    *,
    execute: Callable[[Plan], Awaitable[Job]],
    forget: Callable[[str], Coroutine[Any, Any, None]],
) -> Discovery:
    """Query the sites by a job, and combine their answers. See :meth:`Session.discover`."""
    if not isinstance(pipeline, Pipeline):
        raise TypeError(not_a_pipeline(pipeline))
    plan = prepare_discovery(pipeline, federation, homesite, restrict_to_sites)
    job = await execute(plan)
    sites: dict[str, dict[str, Found]] = {
        site: {node.label: None for node in plan.nodes if node.kind == "call" and node.site == site}
        for site in federation.sites
        if site in plan.sites
    }
    try:
        async for event in job.events():
            if isinstance(event, Result):
                sites[event.site][event.node] = found_of(event.value)
            elif isinstance(event, Failure) and isinstance(event.error, OperationFailed):
                sites[event.error.site][event.error.node] = _not_queried(event.error)
        of_nodes = all(isinstance(error, OperationFailed) for error in job.errors)
        if job.status is not JobStatus.FAILED or not of_nodes:  # errors of nodes are a part of the answer
            await job
    except BaseException:
        await completed(job.cancel("the discovery was cancelled"))
        raise
    finally:
        with contextlib.suppress(DfmError):  # the session was closed, or the job was dropped already
            await completed(forget(job.job_id))
    return Discovery(pipeline.name, sites)


def _not_queried(error: OperationFailed) -> ErrorFieldAdvice:
    return ErrorFieldAdvice(f"{error.type_name}: {error.message}", error.remote_traceback or "")
