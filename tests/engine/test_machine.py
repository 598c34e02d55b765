"""The decisions about a job: event by event, and in random orders against a simulated federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async.engine import machine as do
from dfm_async.engine.frames import FrameLedger
from dfm_async.engine.machine import JobMachine, Phase, StopOutcome
from dfm_async.model.job_spec import JobSpec
from dfm_async.model.options import ResultLimits
from dfm_async.model.status import JobStatus

LIMITS = ResultLimits(window=4, window_bytes=1000)


class FakeLog:
    full = False
    readers = 1


def machine(
    locations: int = 2, log: FakeLog | None = None, callers: dict[int, int] | None = None, **spec: Any
) -> JobMachine:
    found = JobSpec(**{"limits": LIMITS, **spec})
    callers = callers or {}
    ledger = FrameLedger({}, locations, found.window, found.reruns > 0 or bool(callers), lambda _row: 0, callers)
    job = JobMachine(found, [f"site{at}" for at in range(locations)], ledger, log or FakeLog())
    job.callers = callers
    return job


def rows(count: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(count)]


def running(sets: int = 1, locations: int = 2, log: FakeLog | None = None, **spec: Any) -> JobMachine:
    """Make a job that runs, with all its parameter sets. ``callers``: locations whose loss it survives."""
    job = machine(locations, log, **spec)
    job.add(rows(sets))
    job.stop_input()
    job.launch()
    return job


def kinds(effects: Sequence[do.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


ERROR = RuntimeError("worker 7 was killed")


# parameter sets


def test_launch_opens_the_sets_that_the_window_allows() -> None:
    job = machine(window=3)
    assert job.add(rows(5)) == ()
    (start,) = job.launch()
    assert isinstance(start, do.Start)
    assert [(batch.first, len(batch.rows), batch.last) for batch in start.batches] == [(0, 3, False)]
    assert not job.has_room or job.frames.waiting == 2


def test_a_set_is_done_when_all_locations_are() -> None:
    job = running(sets=2)
    assert job.frames_done([0]) == ()
    assert job.frames_done([0]) == [do.CompleteFrames([0])]
    job.frames_done([1])
    assert job.frames_done([1]) == [do.CompleteFrames([1]), do.End()]
    assert job.phase is Phase.ENDED


def test_a_job_without_sets_ends_when_its_input_stops() -> None:
    job = machine()
    job.launch()
    assert kinds(job.stop_input()) == ["Open", "End"]


def test_the_end_waits_for_objects_that_have_to_be_closed() -> None:
    job = running(locations=1)
    job.objects_built(0)
    assert job.frames_done([0]) == [do.CompleteFrames([0])]
    assert job.objects_closed(0) == [do.End()]


def test_objects_of_a_lost_worker_are_gone_with_it() -> None:
    job = running(locations=1)
    job.objects_built(0)
    job.frames_done([0])
    assert job.lost(0, ERROR) == [do.End()]


# credit


def test_credit_comes_back_in_batches() -> None:
    job = running()
    assert job.used_credit(0, 1, 10) == ()
    assert job.used_credit(0, 1, 10) == [do.Grant(0, 2, 20)]
    assert job.used_credit(1, 1, 600) == [do.Grant(1, 1, 600)]


def test_a_full_log_holds_credit_and_new_sets_back() -> None:
    log = FakeLog()
    job = running(sets=0, log=log)
    job = machine(log=log)
    job.launch()
    log.full = True
    assert job.used_credit(0, 3, 0) == ()
    assert job.add(rows(1)) == ()
    log.full = False
    assert kinds(job.log_has_room()) == ["Open", "Grant"]


@pytest.mark.parametrize(
    ("readers", "overflow", "stalls"), [(0, "block", True), (1, "block", False), (0, "spill", False)]
)
def test_a_job_stalls_if_nobody_reads_its_full_log(readers: int, overflow: Any, stalls: bool) -> None:
    log = FakeLog()
    job = running(log=log, limits=ResultLimits(window=4, overflow=overflow))
    log.full, log.readers = True, readers
    assert (do.Stalled() in job.used_credit(0, 4, 0)) is stalls
    assert job.waiting_for_reader is stalls


# stopping


def test_a_job_that_waits_ends_at_once() -> None:
    job = machine()
    assert job.halt(JobStatus.ABORTED, "enough", 5) == [do.End(JobStatus.ABORTED, "enough")]
    assert job.launch() == ()


def test_a_job_ends_when_all_locations_have_stopped() -> None:
    job = running()
    assert job.halt(JobStatus.ABORTED, "enough", 5) == [do.CancelLocation(0), do.CancelLocation(1), do.SetGrace(5)]
    assert job.stopped(0, 0.0) == ()
    assert job.stopped(1, 3.0) == [do.End(JobStatus.ABORTED, "enough")]
    assert job.outcomes == {0: StopOutcome.STOPPED, 1: StopOutcome.AFTER_GRACE}


def test_what_does_not_stop_is_killed_after_the_grace_period() -> None:
    job = running()
    job.halt(JobStatus.ABORTED, "enough", 5)
    job.stopped(1, 0.0)
    assert job.grace_over() == [do.Kill(0, seen=False)]
    job.cancel_seen(0, 0)
    assert job.grace_over() == [do.Kill(0, seen=True)]
    assert kinds(job.lost(0, ERROR)) == ["End"]
    assert job.outcomes[0] is StopOutcome.KILLED


def test_what_cannot_be_killed_is_abandoned() -> None:
    job = running(locations=1)
    job.halt(JobStatus.FAILED, "broken", 0)
    assert job.abandon(0, StopOutcome.RETIRED)[-1] == do.End(JobStatus.FAILED, "broken")


def test_the_first_reason_to_stop_counts() -> None:
    job = running(locations=1)
    job.halt(JobStatus.FAILED, "first", 5)
    assert job.halt(JobStatus.ABORTED, "second", 5) == ()
    assert job.stopped(0, 0.0)[-1] == do.End(JobStatus.FAILED, "first")


def test_a_late_job_names_the_calls_that_waited_for_a_thread() -> None:
    job = running(locations=1)
    job.halt(JobStatus.ABORTED, "the deadline was exceeded", 5, late=True)
    job.cancel_seen(0, 2)
    end = job.stopped(0, 0.0)[-1]
    assert isinstance(end, do.End)
    assert "2 calls were waiting for a thread at 'site0'" in str(end.reason)


def test_the_first_error_stops_the_job_if_it_is_to() -> None:
    assert "CancelLocation" in kinds(running(on_error="stop").operation_failed("node", "ValueError"))
    assert running().operation_failed("node", "ValueError") == ()


# lost workers


def test_a_lost_worker_aborts_a_job_that_may_not_run_again() -> None:
    job = running()
    assert job.lost(0, ERROR) == [do.CancelLocation(1), do.SetGrace(5.0)]
    end = job.stopped(1, 0.0)[-1]
    assert end == do.End(JobStatus.ABORTED, str(ERROR), ERROR)


def test_a_lost_worker_reruns_the_sets_in_flight() -> None:
    job = running(sets=2, reruns=1)
    job.frames_done([0])
    job.frames_done([0])
    assert job.lost(0, ERROR) == [do.Rerun(ERROR), do.CancelLocation(1), do.SetGrace(5.0)]
    assert job.frames_done([1]) == ()  # of the run that is over
    assert job.stopped(1, 0.0) == [do.Requeue(restarted=True)]
    (start,) = job.launch()
    assert isinstance(start, do.Start)
    assert [(batch.first, len(batch.rows)) for batch in start.batches] == [(1, 1)]
    assert job.outcomes == {}


def test_a_set_that_was_lost_too_often_aborts_the_job() -> None:
    job = running(locations=1, reruns=1)
    assert kinds(job.lost(0, ERROR)) == ["Rerun", "SetGrace", "Requeue"]
    job.launch()
    assert kinds(job.lost(0, ERROR))[-1] == "End"


def test_three_losses_in_a_row_abort_the_job() -> None:
    job = machine(locations=1, reruns=9)
    assert kinds(job.lost(0, ERROR)) == ["Rerun", "Requeue"]
    assert kinds(job.lost(0, ERROR)) == ["Rerun", "Requeue"]
    (end,) = job.lost(0, ERROR)
    assert isinstance(end, do.End)
    assert "3 workers in a row" in str(end.reason)


def test_cancelling_a_job_that_restarts_ends_it() -> None:
    job = running(reruns=1)
    job.lost(0, ERROR)
    assert job.halt(JobStatus.ABORTED, "enough", 1) == [do.SetGrace(1)]
    assert job.stopped(1, 0.0)[-1] == do.End(JobStatus.ABORTED, "enough")


# losses that a job survives


def test_a_contained_loss_is_reported_to_the_caller_and_the_location_begins_again() -> None:
    job = running(sets=2, callers={1: 0})
    job.frames_done([0], 1)  # its caller may not have got everything that it has made
    assert job.lost(1, ERROR) == [do.Contain(1, 0, 1, ERROR), do.Replace(1)]
    assert job.is_absent(1)
    (restart,) = job.replaced(1)
    assert isinstance(restart, do.Restart)
    assert [(batch.first, len(batch.rows), batch.last) for batch in restart.batches] == [(0, 2, True)]
    assert not job.is_absent(1)
    assert job.restarted(1) == [do.Restore(1, 0, 1, [0, 1])]
    job.frames_done([0, 1], 0)
    assert job.frames_done([0, 1], 1)[-1] == do.End()


def test_what_its_caller_is_done_with_needs_nothing_of_a_lost_location() -> None:
    job = running(sets=3, callers={1: 0})
    job.frames_done([0], 0)
    assert job.lost(1, ERROR) == [do.CompleteFrames([0]), do.Contain(1, 0, 1, ERROR), do.Replace(1)]
    assert job.frames_done([1], 0) == [do.CompleteFrames([1])]
    (restart,) = job.replaced(1)
    assert isinstance(restart, do.Restart)
    assert [(batch.first, len(batch.rows)) for batch in restart.batches] == [(2, 1)]
    assert job.frames_done([2], 0) == [do.CompleteFrames([2]), do.CancelLocation(1), do.End()]


def test_a_location_with_nothing_left_to_do_is_not_replaced() -> None:
    job = running(locations=3, callers={1: 0})
    job.frames_done([0], 0)
    assert job.lost(1, ERROR) == ()
    assert job.frames_done([0], 2)[-1] == do.End()
    job = running(locations=3, callers={1: 0})
    job.lost(1, ERROR)
    job.frames_done([0], 0)
    assert job.replaced(1) == ()


def test_sets_that_are_opened_while_a_location_begins_again_are_restored_too() -> None:
    job = machine(callers={1: 0})
    job.launch()
    job.add(rows(1))
    job.lost(1, ERROR)
    job.replaced(1)
    job.add(rows(1))
    job.frames_done([0], 0)
    assert job.restarted(1) == [do.Restore(1, 0, 1, [0, 1])]


def test_a_set_is_not_done_twice_if_the_location_reports_it_again() -> None:
    job = running(sets=2, callers={1: 0})
    job.lost(1, ERROR)
    job.replaced(1)
    assert job.frames_done([0], 0) == [do.CompleteFrames([0])]
    assert job.restarted(1) == [do.Restore(1, 0, 1, [0, 1])]
    assert job.frames_done([0], 1) == ()
    assert job.frames_done([1], 0) == ()
    assert job.frames_done([1], 1)[-1] == do.End()


def test_only_the_caller_reports_that_a_loss_cannot_be_contained() -> None:
    job = running(locations=3, callers={1: 0})
    job.lost(1, ERROR)
    assert job.not_contained(2, 1) == ()


def test_a_loss_that_the_caller_cannot_contain_costs_the_job() -> None:
    job = running(callers={1: 0})
    job.lost(1, ERROR)
    assert kinds(job.not_contained(0, 1)) == ["CancelLocation", "SetGrace"]
    assert job.stopped(0, 0.0)[-1] == do.End(JobStatus.ABORTED, str(ERROR), ERROR)


def test_the_loss_of_a_caller_costs_the_job() -> None:
    job = running(callers={1: 0})
    job.lost(1, ERROR)
    assert kinds(job.lost(0, ERROR))[-1] == "End"


def test_three_workers_that_do_not_begin_cost_the_job() -> None:
    job = running(callers={1: 0})
    job.lost(1, ERROR)
    assert job.lost(1, ERROR) == [do.Replace(1)]
    job.replaced(1)
    assert job.lost(1, ERROR) == [do.Replace(1)]
    assert kinds(job.lost(1, ERROR)) == ["CancelLocation", "SetGrace"]


def test_a_contained_worker_that_does_not_start_costs_the_job_at_the_third_loss() -> None:
    job = machine(callers={1: 0})
    job.add(rows(1), last=True)
    assert job.lost(1, ERROR) == [do.Rerun(ERROR), do.Requeue(restarted=False)]
    assert job.lost(1, ERROR) == [do.Rerun(ERROR), do.Requeue(restarted=False)]
    (end,) = job.lost(1, ERROR)
    assert isinstance(end, do.End)
    assert "3 workers in a row" in str(end.reason)


def test_a_contained_worker_that_does_not_start_loses_no_parameter_sets() -> None:
    job = machine(callers={1: 0}, reruns=1)
    job.frames.resume({2: {"n": 2}}, 3)
    job.stop_input()
    job.lost(1, ERROR)
    (start,) = job.launch()
    assert isinstance(start, do.Start)
    assert [(batch.first, len(batch.rows), batch.last) for batch in start.batches] == [(2, 1, True)]
    assert kinds(job.lost(0, ERROR)) == ["Rerun", "CancelLocation", "SetGrace"], "the set is lost for the first time"


def test_a_location_that_begins_again_is_cancelled_with_the_job() -> None:
    job = running(callers={1: 0})
    job.lost(1, ERROR)
    assert do.CancelLocation(1) not in job.halt(JobStatus.ABORTED, "enough", 5)
    job = running(callers={1: 0})
    job.lost(1, ERROR)
    job.replaced(1)
    assert do.CancelLocation(1) in job.halt(JobStatus.ABORTED, "enough", 5)


# random orders


class Simulation:
    """Locations that answer in any order, lose their workers and hang: the environment of one job."""

    def __init__(self, random: Random, locations: int, reruns: int, sets: int, contained: int = 0) -> None:
        self.random = random
        self.locations = locations
        self.log = FakeLog()
        callers = dict.fromkeys(range(locations - contained, locations), 0)
        self.job = machine(locations, self.log, callers, reruns=reruns, window=3)
        self.absent: dict[int, str] = {}
        """Contained locations that were lost, and what they wait for."""
        self.sets = sets
        self.left = sets
        self.open: list[set[int]] = [set() for _ in range(locations)]
        """The parameter sets in flight at each location."""
        self.cancelled: set[int] = set()
        self.gone: set[int] = set()
        self.used = [0] * locations
        self.granted = [0] * locations
        self.done: Counter[int] = Counter()
        self.ends: list[do.End] = []
        self.queued = True
        self.losses = 0

    def carry_out(self, effects: Sequence[do.Effect]) -> None:
        for effect in effects:
            assert not self.ends, "nothing follows the end"
            match effect:
                case do.Start() | do.Open():
                    for batch in effect.batches:
                        for index in range(batch.first, batch.first + len(batch.rows)):
                            for at in range(self.locations):
                                if at in self.absent:
                                    self.open[at].add(index)
                                    continue
                                assert index not in self.open[at], "a set is opened once per run"
                                self.open[at].add(index)
                    assert len({index for found in self.open for index in found}) <= 3, "the window is kept"
                case do.CompleteFrames(indexes=indexes):
                    self.done.update(indexes)
                    assert all(index not in found for index in indexes for found in self.open)
                case do.Grant(at=at, items=items):
                    assert not self.log.full
                    self.granted[at] += items
                    assert self.granted[at] <= self.used[at], "credit is what was used"
                case do.CancelLocation(at=at):
                    starting = self.absent.get(at) == "its state"
                    assert at not in self.gone or starting, "nobody is asked that is gone"
                    assert at not in self.cancelled, "each location is asked once"
                    self.cancelled.add(at)
                case do.Kill(at=at):
                    assert at in self.cancelled
                case do.Requeue():
                    assert not self.cancelled, "everything has stopped before the job runs again"
                    self.queued = True
                    self.open = [set() for _ in range(self.locations)]
                    self.used, self.granted = [0] * self.locations, [0] * self.locations
                    self.gone = set()
                    self.absent.clear()
                case do.Contain(at=at):
                    self.open[at] = set(self.open[0])  # what its caller is not done with
                    self.used[at] = self.granted[at] = 0
                case do.Replace(at=at):
                    self.absent[at] = "a worker"
                case do.Restart(at=at, batches=batches):
                    started = {n for batch in batches for n in range(batch.first, batch.first + len(batch.rows))}
                    assert started == self.open[at], "it begins with what it is not done with"
                    self.absent[at] = "its state"
                case do.Restore(at=at, frames=frames):
                    assert set(frames) >= self.open[at]
                    del self.absent[at]
                    self.gone.discard(at)
                case do.End():
                    self.ends.append(effect)

    def alive(self) -> list[int]:
        return [at for at in range(self.locations) if at not in self.gone and not self.queued]

    def step(self) -> None:
        """Let one thing happen that can happen now."""
        choices = [self.add, self.fill_log, self.use_credit, *[self.finish] * 3, self.stop_one, self.launch]
        choices += [self.replace]
        if self.random.random() < 0.08:
            choices = [self.lose]
        elif self.random.random() < 0.03:
            choices = [self.halt, self.grace_over]
        self.random.choice(choices)()

    def add(self) -> None:
        if self.left and self.job.accepts:
            count = self.random.randint(1, self.left)
            self.left -= count
            self.carry_out(self.job.add(rows(count)))
            if not self.left:
                self.carry_out(self.job.stop_input())

    def launch(self) -> None:
        if self.queued and self.job.phase is Phase.WAITING:
            self.queued = False
            self.carry_out(self.job.launch())

    def fill_log(self) -> None:
        self.log.full = not self.log.full
        self.carry_out(self.job.log_is_full() if self.log.full else self.job.log_has_room())

    def use_credit(self) -> None:
        running = self.job.phase is Phase.RUNNING
        for at in self.alive() if running else []:
            self.used[at] += 1
            self.carry_out(self.job.used_credit(at, 1, 0))

    def finish(self) -> None:
        for at in self.random.sample(self.alive(), len(self.alive())):
            if self.open[at] and at not in self.cancelled and self.job.phase is Phase.RUNNING:
                index = self.random.choice(sorted(self.open[at]))
                self.open[at].discard(index)
                for other in self.absent if at == 0 else ():
                    self.open[other].discard(index)  # it needs nothing of it any longer
                self.carry_out(self.job.frames_done([index], at))
                return

    def replace(self) -> None:
        """A contained location gets a worker, or begins again."""
        if self.absent and self.job.phase is Phase.RUNNING:
            at = self.random.choice(sorted(self.absent))
            waits = self.absent[at] == "a worker"
            self.carry_out(self.job.replaced(at) if waits else self.job.restarted(at))

    def stop_one(self) -> None:
        if self.cancelled:
            at = self.random.choice(sorted(self.cancelled))
            self.cancelled.discard(at)
            if self.random.random() < 0.5:
                self.carry_out(self.job.cancel_seen(at, 0))
            how = self.random.choice(["stopped", "abandoned"])
            self.carry_out(self.job.stopped(at, 0.0) if how == "stopped" else self.job.abandon(at))

    def lose(self) -> None:
        if self.queued:
            at = self.random.randrange(self.locations)
            effects = self.job.lost(at, ERROR)
            for end in effects if at in self.job.callers else ():
                assert not isinstance(end, do.End) or "in a row" in str(end.reason), "no set is lost by it"
            self.carry_out(effects)
            return
        alive = self.alive()
        if alive and not self.ends:
            at = self.random.choice([*alive, *self.absent])
            self.gone.add(at)
            self.cancelled.discard(at)
            if at not in self.absent:
                self.open[at].clear()
            self.carry_out(self.job.lost(at, ERROR))

    def halt(self) -> None:
        self.carry_out(self.job.halt(JobStatus.ABORTED, "enough", 1.0))

    def grace_over(self) -> None:
        self.carry_out(self.job.grace_over())

    def finish_everything(self) -> None:
        """From now on nothing goes wrong: the job must end."""
        self.log.full = False
        self.carry_out(self.job.log_has_room())
        for _ in range(40 * (self.sets + 1) * self.locations):
            if self.ends:
                return
            self.add()
            self.launch()
            self.replace()
            self.finish()
            self.stop_one()


@settings(max_examples=400, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.integers(0, 120),
    st.booleans(),
)
def test_jobs_end_once_in_any_order_of_events(
    random: Random, locations: int, reruns: int, sets: int, steps: int, contained: bool
) -> None:
    found = Simulation(random, locations, reruns, sets, locations - 1 if contained else 0)
    for _ in range(steps):
        if not found.ends:
            found.step()
    found.finish_everything()
    assert len(found.ends) == 1
    assert found.job.phase is Phase.ENDED
    assert all(count == 1 for count in found.done.values()), "a set is done once"
    if found.ends[0].status is None:
        assert sorted(found.done) == list(range(sets)), "a job that has finished has done everything"
    assert found.job.halt(JobStatus.ABORTED, "late", 0) == ()
    assert found.job.grace_over() == []
