"""What can be known about a session that hangs."""

from __future__ import annotations

import asyncio
import io

from dfm_async import Session


def describe(session: Session) -> str:
    """Its numbers, its jobs, and where all tasks are."""
    text = io.StringIO()
    print(repr(session), session.stats(), sep="\n", file=text)
    for coordinator in session._jobs.coordinators:
        record, frames, machine = coordinator.record, coordinator.frames, coordinator.machine
        what = f"{coordinator.phase}, waits for {machine.waiting_for}, stopping {set(machine._stopping)}"
        what += f", frames {frames.open} of {frames.added}, {frames.waiting} waiting, stopped: {frames.stopped}"
        what += f", log {record.log.held} held, full: {record.log.full}, {record.log.readers} readers"
        print(f"{record.job_id}: {record.status} ({record.decided}), {what}, owed {machine._credit._owed}", file=text)
    for task in asyncio.all_tasks():
        task.print_stack(limit=5, file=text)
    return text.getvalue()
