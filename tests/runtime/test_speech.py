"""How reports of calls are gathered and sent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from dfm_async.runtime.outbox import Outbox
from dfm_async.runtime.speech import Speech
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec


class Site:
    """A job at a location, and what it sends; ``sent`` is set with every message."""

    def __init__(self, window: int = 256) -> None:
        self.messages: list[Any] = []
        self.sent = asyncio.Event()
        runtime: Any = SimpleNamespace(report=self.report, codec=Codec(trusted=True))
        start = msg.StartJob(1, 0, "job", "plan", (), window, 1 << 20, 0, 0, b"", False)
        self.outbox = Outbox(runtime, start)
        job: Any = SimpleNamespace(number=1, at=0, stopping=False, runtime=runtime, outbox=self.outbox)
        self.job = job
        self.speech = Speech(job)

    def report(self, message: Any) -> None:
        self.messages.append(message)
        self.sent.set()

    def say(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            self.speech.metrics("train#0", (0,), {"i": i}, i)

    @property
    def batches(self) -> list[int]:
        return [len(message.reports) for message in self.messages if isinstance(message, msg.MetricsMade)]

    @property
    def steps(self) -> list[Any]:
        made = [message for message in self.messages if isinstance(message, msg.MetricsMade)]
        return [step for message in made for _, _, _, step in message.reports]


async def test_the_first_metrics_are_sent_at_once_and_the_next_when_the_pause_is_over() -> None:
    site = Site()
    loop = asyncio.get_running_loop()
    site.say(0, 3)
    assert site.batches == [], "those of one turn of the loop go together"
    await site.sent.wait()
    began = loop.time()
    site.sent.clear()
    site.say(3, 2)
    await site.sent.wait()
    assert site.batches == [3, 2]
    assert loop.time() - began > 0.03
    assert site.steps == list(range(5))


async def test_a_full_batch_of_metrics_does_not_wait() -> None:
    site = Site()
    site.say(0, 2500)
    assert site.batches == [1000, 1000]
    site.speech.flush()
    assert site.batches == [1000, 1000, 500]
    assert site.steps == list(range(2500))


async def test_metrics_use_up_credit_and_a_job_with_too_many_is_held_up() -> None:
    site = Site(window=100)

    def state() -> tuple[bool, bool]:
        return site.outbox.open, site.outbox.stalled

    site.say(0, 100)
    assert state() == (True, False), "what waits has cost nothing yet"
    site.speech.flush()
    assert state() == (False, False)
    site.say(100, 100)
    site.speech.flush()
    assert state() == (False, True)
    site.outbox.grant(200, 0)
    assert state() == (True, False)


async def test_metrics_are_sent_before_what_comes_of_their_calls() -> None:
    site = Site()
    site.say(0, 1)
    site.outbox.add_result(0, (0,), 1)
    site.outbox.flush()
    site.say(1, 1)
    site.outbox.frame_done(0)
    site.outbox.flush()
    site.say(2, 1)
    site.outbox.report(msg.CancelSeen(1, 0))
    assert [type(message) for message in site.messages] == [
        msg.MetricsMade,
        msg.Results,
        msg.MetricsMade,
        msg.FramesDone,
        msg.MetricsMade,
        msg.CancelSeen,
    ]


async def test_when_a_job_stops_its_metrics_are_sent_and_its_progress_is_not() -> None:
    site = Site()
    site.speech.progress("train#0", (0,), 1.0, None, "")
    site.say(0, 1)
    site.job.stopping = True
    site.speech.flush()
    assert [type(message) for message in site.messages] == [msg.MetricsMade]
