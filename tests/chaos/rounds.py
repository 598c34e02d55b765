"""One round of chaos: a session with random settings, random jobs, and random faults while they run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dfm_async import (
    DfmError,
    Failure,
    Job,
    JobAborted,
    JobStatus,
    LocalOptions,
    ParameterError,
    Session,
    SessionClosed,
    WorkerLost,
)
from dfm_async.errors import JobInterrupted, QueueFull, ResultsExpired, StoreError
from tests.chaos.describe import describe
from tests.chaos.jobs import Story, check_story, of_worker, random_spec
from tests.chaos.operations import fed, quits
from tests.property.waits import EventSender, sending

BOUND = 60.0
"""Seconds after which a round hangs."""


class Round:
    """One round. Everything random is drawn from the seed; only when things happen is not."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.store = f"sqlite:///{folder}/jobs.db" if rng.random() < 0.4 else None
        self.options = _random_options(rng)
        stored = self.store is not None
        self.stories = [Story(random_spec(rng, f"job-{n}", stored=stored)) for n in range(rng.randint(2, 7))]
        self.faults_left = rng.choice([0, 1, 3, 8])
        self.close_after = rng.uniform(0.1, 2.0) if rng.random() < 0.35 else None
        self.faults = False
        """Whether something has been done to a worker."""
        self.closed = False
        self.session = self._new_session()

    def _new_session(self) -> Session:
        return Session(fed, options=self.options, store=self.store)

    def __str__(self) -> str:
        statuses = ", ".join(story.status.value for story in self.stories)
        stored, closed = "stored, " if self.store else "", "closed in the middle, " if self.closed else ""
        return f"seed {self.seed}: {stored}{closed}{'faults' if self.faults else 'no faults'}: {statuses}"

    async def run(self) -> None:
        """Runs the round and checks everything.

        Raises:
            AssertionError: something is not as it must be.
        """
        await self._bounded(self._first_session())
        if self.store is not None:
            self.session = self._new_session()
            await self._bounded(self._second_session())
        for story in self.stories:
            if story.submitted:
                check_story(story, faults=self.faults, closed=self.closed)

    async def _bounded(self, work: Any) -> None:
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait([task], timeout=BOUND)
        if not done:
            text = describe(self.session)  # before anything is cancelled
            task.cancel()
            await asyncio.wait([task], timeout=BOUND)
            told = "\n".join(f"{story.status}, {len(story.events)} events read: {story.spec}" for story in self.stories)
            raise AssertionError(f"seed {self.seed} hangs:\n{text}\n{told}")
        await task

    async def _first_session(self) -> None:
        async with self.session as session:
            async with asyncio.TaskGroup() as group:
                lives = [group.create_task(self._live(story)) for story in self.stories]
                trouble = group.create_task(self._trouble())
                if self.close_after is not None:
                    await asyncio.wait(lives, timeout=self.close_after)
                    self.closed = True
                    await session.close()
                await asyncio.wait(lives)
                self.faults_left = 0
                await trouble
            stats = session.stats()
            if not self.closed:
                assert (stats.running, stats.waiting) == (0, 0), stats

    async def _second_session(self) -> None:
        """What was written down is what was read; and what was interrupted can go on."""
        async with self.session as session:
            found = {job.job_id: job for job in session.jobs()}
            for story in self.stories:
                assert story.submitted == (story.spec.job_id in found), f"{list(found)}\n{story.spec}"
            self.closed = False
            self.faults_left = self.rng.choice([0, 0, 2])
            trouble = asyncio.create_task(self._trouble())
            for story in self.stories:
                if story.submitted:
                    await self._read_again(session, story, found[story.spec.job_id])
            self.faults_left = 0
            await trouble
            self.closed = self.close_after is not None

    async def _read_again(self, session: Session, story: Story, job: Job) -> None:
        assert job.status is story.status, f"{job.status} is told to be {story.status}"
        earlier, story.events, story.cut = story.events, [], False
        if job.status is JobStatus.INTERRUPTED:
            job = await session.resume(job.job_id, input_params=[] if story.spec.feed == "stream" else None)
            if story.spec.feed != "list":  # how many were taken before the end is not known
                story.cancelled = True
                await job.cancel()
        async with sending(job) as sender:
            async for event in job.events():
                story.saw(event)
                sender.saw(event)
        assert story.events[: len(earlier)] == earlier, f"the log has changed\n{story.spec}"
        await self._ended(story, job)

    # the life of a job

    async def _live(self, story: Story) -> None:
        try:
            job = await self._submit(story)
        except SessionClosed:
            assert self.closed
            return
        except QueueFull:
            assert self.options.queue_overflow == "fail"
            return
        if job is None:
            return
        story.submitted = True
        witness = job.events()
        try:
            witness.attach()
        except ResultsExpired as error:  # it began before execute returned, and without a reader, bare events may go
            story.late = True
            witness = job.events(after=error.first - 1)
            witness.attach()
        async with sending(job) as sender, asyncio.TaskGroup() as group:
            if story.late:
                sender.catch_up()
            others = [group.create_task(work) for work in self._others(story, job)]
            await self._read(story, job, witness, sender)
            for task in others:
                task.cancel()
        await self._ended(story, job)

    async def _submit(self, story: Story) -> Job | None:
        spec = story.spec
        params: Any = {"list": spec.sets, "stream": self._stream(story), "open": None}[spec.feed]
        story.sent_all = spec.feed == "list"
        submitting = asyncio.create_task(self.session.execute(spec.pipeline, params, **spec.execute))
        if spec.impatient is not None:
            await asyncio.wait([submitting], timeout=spec.impatient)
            submitting.cancel()
        try:
            return await submitting
        except asyncio.CancelledError:
            if not submitting.cancelled():
                raise
            if not self.closed:
                with suppress(SessionClosed, StoreError):
                    assert not (await self.session.reattach(spec.job_id)).was_found, f"withdrawn, but known: {spec}"
            return None

    async def _stream(self, story: Story) -> AsyncIterator[dict[str, Any]]:
        for params in story.spec.sets:
            yield params
            await asyncio.sleep(0.01)
        story.sent_all = True

    def _others(self, story: Story, job: Job) -> list[Any]:
        work = [self._leave(job, self.rng.uniform(0, 1.0)) for _ in range(self.rng.choice([0, 0, 1, 2]))]
        if story.spec.cancel is not None:
            work.append(self._cancel(story, job, *story.spec.cancel))
        if story.spec.feed == "open":
            work.append(self._send(story, job))
        return work

    async def _read(self, story: Story, job: Job, witness: Any, sender: EventSender) -> None:
        spec, alone = story.spec, story.spec.leaves
        while True:
            try:
                event = await anext(witness)
            except StopAsyncIteration:
                return
            except StoreError:
                assert self.closed
                story.cut = True
                return
            story.saw(event)
            sender.saw(event)
            if spec.slow and len(story.events) % 5 == 0 and len(story.events) < 500:
                await asyncio.sleep(spec.slow)
            if len(story.events) == alone:
                try:
                    found = await self.session.reattach(spec.job_id, after=event.offset)
                except (SessionClosed, StoreError):
                    assert self.closed
                    continue
                again = found.events()
                again.attach()  # before the other one leaves: without a reader, events may go
                await witness.aclose()
                witness = again

    async def _leave(self, job: Job, seconds: float) -> None:
        """Reads, or waits, and loses interest in the middle of it."""
        work: Any = self.rng.choice([job.collect, job.first, job.wait_until_finished, job.__await__, self._ordered])
        if work == self._ordered:
            work = lambda: self._ordered(job)  # noqa: E731
        elif work == job.__await__:
            work = job._wait
        with suppress(TimeoutError, DfmError, LookupError):
            async with asyncio.timeout(seconds):
                await work()

    async def _ordered(self, job: Job) -> None:
        last: tuple[int, ...] = ()
        async for result in job.results(ordered=True):
            assert result.frame[0] >= (last or result.frame)[0], f"{result.frame} after {last}"
            last = result.frame

    async def _cancel(self, story: Story, job: Job, after: float, grace: float) -> None:
        await asyncio.sleep(after)
        story.cancelled = self.faults = True  # a worker that does not stop in time is killed, with all jobs on it
        await job.cancel(grace=grace)

    async def _send(self, story: Story, job: Job) -> None:
        rest = list(story.spec.sets)
        try:
            while rest:
                count = self.rng.randint(1, 3)
                now, rest = rest[:count], rest[count:]
                story.sent_all = not rest
                await job.send_input_params(now)
                await asyncio.sleep(self.rng.choice([0, 0.05]))
            story.sent_all = True
            await job.send_stop_frame()
        except (ParameterError, JobInterrupted, StoreError):
            story.sent_all = False
            await job.completed.wait()
        except SessionClosed:
            assert self.closed
            story.sent_all = False

    async def _ended(self, story: Story, job: Job) -> None:
        await job.completed.wait()
        story.status, story.reason = job.status, job._known().reason
        try:
            await job
        except JobAborted as error:
            story.cause = error.__cause__
        except DfmError as error:
            story.cause = error

    # faults

    async def _trouble(self) -> None:
        while self.faults_left:
            self.faults_left -= 1
            await asyncio.sleep(self.rng.uniform(0.0, 0.6))
            await self.rng.choice([self._kill, self._kill, self._pause, self._quit])()

    def _victim(self) -> int | None:
        pids = [worker.pid for site in self.session.stats().sites.values() for worker in site.workers]
        return self.rng.choice(pids) if pids else None

    async def _kill(self) -> None:
        pid = self._victim()
        if pid is not None:
            self.faults = True
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _pause(self) -> None:
        pid = self._victim()
        if pid is not None:
            self.faults = True  # it may be killed because it does not answer
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self.rng.choice([0.01, 0.1, 0.7]))
                finally:
                    os.kill(pid, signal.SIGCONT)

    async def _quit(self) -> None:
        self.faults = True
        with suppress(SessionClosed, QueueFull):
            job = await self.session.execute(quits[self.rng.choice(list(quits))], priority=5)
            await job.completed.wait()
            if job.status is JobStatus.INTERRUPTED:
                assert self.closed
                return
            if job.status is JobStatus.FAILED:  # another worker than that of the net has run the call
                (failure,) = [event async for event in job.events() if isinstance(event, Failure) and not event.place]
                assert of_worker(failure), failure
                return
            assert job.status is JobStatus.ABORTED, job
            assert self.closed or isinstance(job._known().cause, WorkerLost), job._known().reason


def _random_options(rng: random.Random) -> LocalOptions:
    return LocalOptions(
        lanes=rng.choice([None, None, 1, 3]),
        jobs_per_lane=rng.choice([256, 256, 1, 2]),
        max_concurrent_jobs=rng.choice([None, None, 1, 2]),
        queue_limit=rng.choice([10_000, 10_000, 1, 2]),
        queue_overflow=rng.choice(["block", "block", "fail"]),
        cancel_grace=rng.choice([0.2, 2.0]),
        shutdown_grace=rng.choice([0.2, 2.0]),
        unresponsive_after=rng.choice([10.0, 0.3, None]),
        uvloop=rng.random() < 0.2,
    )
