"""Workers that were lent to a process: kept while they are used, and returned one by one."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from dfm_async.runtime.dispatch import OperationCost
from dfm_async.runtime.spread import CallSpread
from dfm_async.runtime.threads import Threads
from dfm_async.testing import virtual_time
from dfm_async.wire import messages as msg


class Remote:
    """Sends calls that compute for a second to nowhere: the test returns them."""

    operation, bound = "compute", ""

    def __init__(self) -> None:
        self.cost = OperationCost()
        self.cost.measured(1.0, 1.0)
        self.sent: list[tuple[str, int]] = []

    def send(self, worker: str, number: int) -> int:
        self.sent.append((worker, number))
        return 0

    def stop(self, worker: str) -> None:
        raise AssertionError(worker)

    def can_send(self, _result: Any) -> bool:
        return True

    def lost(self, error: BaseException) -> None:
        raise error

    def outcome(self, _message: Any) -> tuple[Any, BaseException | None]:
        return None, None


class Site:
    """One process of a site, to which workers are lent."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.threads = Threads(1, "lab")
        self.spread = CallSpread("lab", self.threads, self.reports.append, self._send, "home", enough=1)
        self.threads.spread = self.spread
        self.remote = Remote()

    def _send(self, worker: str, message: msg.Message) -> None:
        raise AssertionError((worker, message))

    def lend(self, *workers: str) -> None:
        for worker in workers:
            self.spread.receive(msg.WorkerLent(worker))

    def call(self, count: int) -> None:
        """Have calls run in other workers, and end."""
        for _ in range(count):
            self.threads.run(contextvars.Context(), lambda: None, lambda *_: None, None, self.remote)
        sent, self.remote.sent = self.remote.sent, []
        assert len(sent) == count
        for _, number in sent:
            self.spread.receive(
                msg.CallReturned(
                    job=1,
                    at=0,
                    number=number,
                    start=0.0,
                    wall=1.0,
                    used=1.0,
                    pid=1,
                    spans=b"",
                    stacks="",
                    payload=b"",
                    iterated=False,
                )
            )

    @property
    def returned(self) -> list[str]:
        return [message.address for message in self.reports if isinstance(message, msg.WorkerReturned)]


@pytest.mark.parametrize("pause", [0.5, 3.0, 4.9])
async def test_a_worker_is_kept_while_it_is_used(pause: float) -> None:
    async with virtual_time() as clock:
        site = Site()
        site.lend("v")
        for _ in range(20):
            site.call(1)
            await clock.advance(pause)
        assert site.returned == []
        await clock.advance(5.1)
        assert site.returned == ["v"]


async def test_workers_that_are_not_used_are_returned_alone() -> None:
    async with virtual_time() as clock:
        site = Site()
        site.lend("v", "w")
        for _ in range(10):
            site.call(1)
            await clock.advance(1.0)
        assert len(site.returned) == 1
        site.call(1)
        await clock.advance(5.1)
        assert sorted(site.returned) == ["v", "w"]
