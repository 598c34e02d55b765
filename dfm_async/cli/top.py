"""``dfm-async top``: what runs and what waits in a service, per site and worker, and why jobs wait."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dfm_async.base.text import size_text, time_text
from dfm_async.cli.command_options import ServiceOptions
from dfm_async.cli.command_runner import Exit, safe, safe_json
from dfm_async.cli.jobs import open_client
from dfm_async.cli.terminal import StandardOutput, terminal
from dfm_async.cli.view import counted
from dfm_async.model.info import JobInfo
from dfm_async.model.stats import SessionStats, SiteStats, WorkerStats
from dfm_async.model.status import JobStatus

if TYPE_CHECKING:
    from dfm_async.client import Client

_INTERVAL: Final = 0.5
"""The smallest number of seconds between two views."""
_LONGEST_INTERVAL: Final = 2.0
"""The largest number of seconds: not everything that is shown causes an event."""
_MOST: Final = 200
"""The largest number of jobs of one status."""


class ServiceSnapshot(msgspec.Struct, kw_only=True):
    """The state of a service: the statistics of its session, and the jobs that have not ended, the newest first."""

    stats: SessionStats
    jobs: list[JobInfo]


async def show_top(options: ServiceOptions, *, once: bool, as_json: bool) -> int:
    """Show the state of a service: once, or whenever it has changed, until Ctrl-C or until the service ends."""
    output = StandardOutput()
    async with open_client(options) as client:
        if once or not (as_json or sys.stdout.isatty()):
            await _write(await _snapshot(client), output, as_json=as_json)
        elif as_json:
            await _follow(client, output, None)
        else:
            with Live(console=terminal(), auto_refresh=False, screen=True) as live:
                await _follow(client, output, live)
    return Exit.SUCCESS


async def _snapshot(client: Client) -> ServiceSnapshot:
    stats = await client.stats()
    jobs = [info for status in (JobStatus.RUNNING, JobStatus.SUBMITTED) for info in await client.jobs(_MOST, status)]
    return ServiceSnapshot(stats=stats, jobs=jobs)


async def _write(found: ServiceSnapshot, output: StandardOutput, *, as_json: bool) -> None:
    if as_json:
        await output.line(safe_json(msgspec.json.encode(found)))
    else:
        terminal(width=160).print(view_of_snapshot(found))


async def _follow(client: Client, output: StandardOutput, live: Live | None) -> None:
    """Show the state after each change; changes that come faster than views are coalesced."""
    changed = asyncio.Event()

    async def listen() -> None:
        async with aclosing(client.changes()) as changes:
            async for _ in changes:
                changed.set()

    listening = asyncio.create_task(listen())
    listening.add_done_callback(lambda _: changed.set())
    try:
        while not listening.done():
            found = await _snapshot(client)
            if live is None:
                await _write(found, output, as_json=True)
            else:
                live.update(view_of_snapshot(found), refresh=True)
            await asyncio.sleep(_INTERVAL)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_INTERVAL - _INTERVAL):
                    await changed.wait()
            changed.clear()
        await listening  # raises if the connection has broken
    finally:
        listening.cancel()
        await asyncio.wait([listening])


# views


def view_of_snapshot(found: ServiceSnapshot) -> Group:
    """Return the tables of sites and jobs."""
    stats = found.stats
    memory = "" if stats.memory is None else f", the service uses {size_text(stats.memory)}"
    head = Text(f"{stats.running:,} running, {stats.waiting:,} waiting for a slot{memory}", "bold")
    return Group(head, "", _sites(stats), "", _jobs(found.jobs))


def _table(*heads: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", no_wrap=head in numbers)
    return table


def _sites(stats: SessionStats) -> Table:
    heads = ("site", "worker", "jobs", "running", "waiting", "memory", "lag", "state")
    table = _table(*heads, numbers=heads[1:-1])
    for name, site in sorted(stats.sites.items()):
        calls = [str(sum(numbers)) for numbers in zip(*((w.running, w.waiting) for w in site.workers), strict=True)]
        head = (safe(name), "", str(site.jobs), *(calls or ("", "")), size_text(site.memory), "")
        table.add_row(*head, _site_state(name, site, stats))
        for worker in site.workers:
            lag = "" if worker.lag is None else time_text(worker.lag)
            memory = "" if worker.memory is None else size_text(worker.memory)
            calls = [str(worker.running), str(worker.waiting)]
            table.add_row("", str(worker.pid or ""), str(worker.jobs), *calls, memory, lag, _worker_state(worker))
    return table


def _site_state(name: str, site: SiteStats, stats: SessionStats) -> Text:
    if name in stats.unready:
        return Text("does not respond", "bold red")
    waiting = (f"{counted(count, 'call')} waiting for {what}" for what, count in site.waiting.items())
    return Text(", ".join(waiting), "yellow")


def _worker_state(worker: WorkerStats) -> Text:
    parts = ["starts"] * (worker.pid is None) + ["does not respond"] * worker.unresponsive
    parts += ["ends with its last job"] * worker.retired
    parts += [f"{counted(worker.abandoned, 'call')} not returning"] * bool(worker.abandoned)
    return Text(safe("; ".join([*parts, *worker.bound])), "yellow")


def _jobs(jobs: list[JobInfo]) -> Table:
    table = _table("job", "status", "pipeline", "age", "sets", "errors", "waits for", numbers=("age", "sets", "errors"))
    for info in jobs:
        sets = "" if info.sets is None else f"{info.done or 0:,}/{info.sets:,}"
        table.add_row(
            safe(info.job_id),
            info.status.value,
            safe(info.pipeline or ""),
            time_text(max(0.0, time.time() - info.created)),
            sets,
            f"{info.errors:,}" if info.errors else "",
            Text(safe(info.waits_for or ""), "yellow"),
        )
    return table
