"""Why a job waits, in words. Pure: what is known goes in, a text comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from dfm_async.base.text import size_text
from dfm_async.model.call_limits import SHARED, CallLimits
from dfm_async.model.info import WaitInfo
from dfm_async.model.stats import LimitStats, SiteStats


class JobWait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the engine knows about the progress of a job.

    Attributes:
        waiting_for: what it waits for before it can start; empty if it has started.
        ahead: how many jobs get a slot before it; None if it has one.
        running: how many jobs have a slot.
        priority: its priority.
        log_full: whether its log holds as many results as it may.
        readers: how many readers its log has.
        idle: whether all its parameter sets are done, and further ones may come.
        waits: the parameter sets that wait for events or times, the first 100.
    """

    waiting_for: str = ""
    ahead: int | None = None
    running: int = 0
    priority: int = 0
    log_full: bool = False
    readers: int = 0
    idle: bool = False
    waits: tuple[WaitInfo, ...] = ()


def explain_waiting(
    job: JobWait,
    calls: Iterable[tuple[str, str, CallLimits | None]] = (),
    sites: Mapping[str, SiteStats] | None = None,
) -> str | None:
    """Return what a job waits for, to be read after "waits for"; None if nothing is known that it waits for.

    Args:
        job: the job.
        calls: what it calls: the site, the operation, and the limits of the operation there.
        sites: the state of the sites.
    """
    if job.ahead is not None:
        text = f"a free slot: {_counted(job.running, 'job')} running, {job.ahead:,} ahead of it in the queue"
        return f"{text}, priority {job.priority}" if job.priority else text
    if job.waiting_for:
        return job.waiting_for
    if job.log_full:
        who = "its reader, which is slow" if job.readers else "a reader"
        return f"{who}: its log of results is full"
    if job.idle:
        return "further parameter sets"
    return "; ".join(_events(job.waits)) or "; ".join(_at_sites(calls, sites or {})) or None


def _events(waits: Iterable[WaitInfo]) -> Iterator[str]:
    for name, count in Counter(wait.name for wait in waits).items():
        text = f"the event {name!r}" if name else "the end of a Sleep"
        yield text if count == 1 else f"{text} ({_counted(count, 'execution')})"


def _at_sites(calls: Iterable[tuple[str, str, CallLimits | None]], sites: Mapping[str, SiteStats]) -> Iterator[str]:
    needed: dict[str, dict[str, CallLimits | None]] = {}
    for site, operation, limits in calls:
        needed.setdefault(site, {})[operation] = limits
    for name, operations in needed.items():
        found = sites.get(name)
        if found is None:
            continue
        if not found.ready:
            yield f"site {name!r}: none of its workers responds"
        for limit in found.limits:
            if limit.waiting and any(_meets(limit, *call) for call in operations.items()):
                yield _limit_text(limit, name)


def _meets(limit: LimitStats, operation: str, limits: CallLimits | None) -> bool:
    """Return whether calls of an operation meet a limit."""
    if limits is None:
        return False
    return bool(getattr(limits, limit.limit)) if limit.limit in SHARED else operation == limit.operation


def _limit_text(limit: LimitStats, site: str) -> str:
    waiting = f"{_counted(limit.waiting, 'call')} waiting"
    if limit.limit == "rate":
        return f"the rate of {limit.operation!r} at site {site!r}: {limit.capacity:g} calls per second, {waiting}"
    write = size_text if limit.limit == "memory" else "{:g}".format
    used = f"{write(limit.used or 0)} of {write(limit.capacity)} in use, {waiting}"
    if limit.limit == "limit":
        each = "" if limit.key is None else f" for each {limit.key!r}"
        return f"the limit of {limit.operation!r} at site {site!r}{each}: {used}"
    return f"{limit.limit} of site {site!r}: {used}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"
