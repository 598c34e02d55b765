"""What random pipelines wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dfm_async import Event, Job, ParameterError, SessionClosed
from dfm_async.errors import EventsFull, JobInterrupted, StoreError
from dfm_async.events import WaitBegan
from tests.reference import value_of


class EventSender:
    """Sends the events that a job waits for, beside its readers: a job whose log is full takes none."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._awaited: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def saw(self, event: Event) -> None:
        """Note an event of the job, which may begin to wait."""
        if isinstance(event, WaitBegan):
            self._note(event.name, event.frame[0])

    def catch_up(self) -> None:
        """Note what the job waits for now: its reader came after the first events were gone."""
        for wait in self._job.info().waits:
            self._note(wait.name, wait.frame[0])

    def _note(self, name: str, index: int) -> None:
        if name and not name.startswith("never"):
            self._awaited.put_nowait((name, index))

    async def run(self) -> None:
        """Send the events of all waits that are noted."""
        while True:
            name, index = await self._awaited.get()
            with contextlib.suppress(JobInterrupted, SessionClosed, StoreError):
                while not await self._sent(name, index):  # noqa: ASYNC110 - nothing reports room in the log
                    await asyncio.sleep(0.005)

    async def _sent(self, name: str, index: int) -> bool:
        try:
            await self._job.send(name, value_of(name), frame=index)
        except EventsFull:
            return False
        except ParameterError:  # nobody takes it any longer
            pass
        return True


@asynccontextmanager
async def sending(job: Job) -> AsyncIterator[EventSender]:
    """Send what a job waits for while its events are read."""
    sender = EventSender(job)
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
