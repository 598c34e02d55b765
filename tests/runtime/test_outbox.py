"""How reports of calls are collected and sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dfm_async.model.events import Metrics
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.options import ResultLimits
from dfm_async.runtime.outbox import Outbox
from dfm_async.testing import virtual_time
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec


class Site:
    """A job at a location, and the messages that it sends."""

    def __init__(self, window: int = 256) -> None:
        self.messages: list[Any] = []
        resources: Any = SimpleNamespace(report=self.messages.append, codec=Codec.for_processes())
        start = msg.StartJob(
            job=1,
            at=0,
            spec=JobSpec(limits=ResultLimits(window=window)),
            plan="plan",
            routes=(),
            first=0,
            count=0,
            payload=b"",
            last=False,
        )
        self.outbox = Outbox(resources, start)

    def report(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            self.outbox.add_event(Metrics(0, (0,), "lab", "train#0", {"i": i}, i))

    @property
    def batches(self) -> list[int]:
        return [len(message.events) for message in self.messages if isinstance(message, msg.EventsMade)]

    @property
    def steps(self) -> list[Any]:
        made = [message for message in self.messages if isinstance(message, msg.EventsMade)]
        return [event.step for message in made for event in message.events if isinstance(event, Metrics)]


async def test_first_metrics_are_sent_at_once_and_the_next_after_the_interval() -> None:
    async with virtual_time() as clock:
        site = Site()
        site.report(0, 3)
        assert site.batches == [], "those of one turn of the loop are sent together"
        await clock.advance(0)
        assert site.batches == [3]
        site.report(3, 2)
        await clock.advance(0.04)
        assert site.batches == [3]
        await clock.advance(0.02)
        assert site.batches == [3, 2]
        assert site.steps == list(range(5))


async def test_full_batch_of_metrics_does_not_wait() -> None:
    site = Site()
    site.report(0, 2500)
    assert site.batches == [1000, 1000]
    site.outbox.send_reports()
    assert site.batches == [1000, 1000, 500]
    assert site.steps == list(range(2500))


async def test_metrics_use_credit_and_stall_a_job_with_too_many() -> None:
    site = Site(window=100)

    def state() -> tuple[bool, bool]:
        return site.outbox.open, site.outbox.stalled

    site.report(0, 100)
    assert state() == (True, False), "metrics use credit when they are sent"
    site.outbox.send_reports()
    assert state() == (False, False)
    site.report(100, 100)
    site.outbox.send_reports()
    assert state() == (False, True)
    site.outbox.grant(200, 0)
    assert state() == (True, False)


async def test_metrics_are_sent_before_the_results_of_their_calls() -> None:
    site = Site()
    site.report(0, 1)
    site.outbox.add_result(0, (0,), 1)
    site.outbox.flush()
    site.report(1, 1)
    site.outbox.frame_done(0)
    site.outbox.flush()
    site.report(2, 1)
    site.outbox.report(msg.CancelSeen(1, 0))
    assert [type(message) for message in site.messages] == [
        msg.EventsMade,
        msg.ResultBatch,
        msg.EventsMade,
        msg.FramesDone,
        msg.EventsMade,
        msg.CancelSeen,
    ]


async def test_cancelled_job_sends_its_metrics_but_no_progress() -> None:
    site = Site()
    site.outbox.add_progress("train#0", (0,), 1.0, None, "")
    site.report(0, 1)
    site.outbox.drop_progress()
    assert [type(message) for message in site.messages] == [msg.EventsMade]
