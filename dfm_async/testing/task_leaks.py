"""The check for tasks that a test leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest


@asynccontextmanager
async def no_task_left(name: str) -> AsyncIterator[None]:
    """Fail if tasks of the running loop are left at the end of the block that were not there before."""
    from dfm_async.testing.leaks import all_tasks, leak_report, tasks

    before = all_tasks()
    yield
    left = tasks(before)
    if left:
        pytest.fail(leak_report(name, left), pytrace=False)
