"""Tasks with an owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["OwnedTasks"]

_log = logging.getLogger(__name__)


class OwnedTasks:
    """Tasks of one object. Its owner must :meth:`close` it, which ends all of them."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task. What it raises is logged: it should have been dealt with."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

    async def wait(self) -> None:
        """Waits until all tasks have ended by themselves."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Cancels all tasks."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancels all tasks, and waits for their end."""
        self.cancel()
        await self.wait()
