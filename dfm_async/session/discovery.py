"""Discovery as a job: sites are asked as they are told to compute, so what can go wrong goes as it does there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dfm_async.base.completion import completed
from dfm_async.discovery.advice import ErrorFieldAdvice
from dfm_async.discovery.discovery import Discovery, Found, found_of
from dfm_async.errors import DfmError, OperationFailed
from dfm_async.model.events import Failure, Result
from dfm_async.model.status import JobStatus
from dfm_async.pipeline.pipeline import Pipeline
from dfm_async.planner.discovery import prepare_discovery

if TYPE_CHECKING:
    from dfm_async.session.session import Session

__all__ = ["discover"]


async def discover(session: Session, pipeline: Pipeline, restrict_to_sites: Iterable[str] | str | None) -> Discovery:
    """Asks the sites, and puts together what they say. What ``session.discover`` calls."""
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"expected a Pipeline, not {pipeline!r}")
    plan = prepare_discovery(pipeline, session.federation, session.homesite, restrict_to_sites)
    job = await session.execute(plan, label="discovery")
    sites: dict[str, dict[str, Found]] = {
        site: {node.label: None for node in plan.nodes if node.kind == "call" and node.site == site}
        for site in session.federation.sites
        if site in plan.sites
    }
    try:
        async for event in job.events():
            if isinstance(event, Result):
                sites[event.site][event.node] = found_of(event.value)
            elif isinstance(event, Failure) and isinstance(event.error, OperationFailed):
                sites[event.error.site][event.error.node] = _not_asked(event.error)
        told = [isinstance(error, OperationFailed) for error in job.errors]
        if job.status is not JobStatus.FAILED or not all(told):  # what has failed at a node is told in its place
            await job
    except BaseException:
        await completed(job.cancel("the discovery was cancelled"))
        raise
    finally:
        await completed(_forget(session, job.job_id))
    return Discovery(pipeline.name, sites)


def _not_asked(error: OperationFailed) -> ErrorFieldAdvice:
    return ErrorFieldAdvice(f"{error.type_name}: {error.message}", error.remote_traceback or "")


async def _forget(session: Session, job_id: str) -> None:
    """Its answers are what counts: nobody asks for the job again."""
    try:
        await session.forget(job_id)
    except DfmError:
        return  # the session was closed, or it is forgotten already
