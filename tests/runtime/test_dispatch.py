"""Where calls run: here, or in workers that were lent to this process."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dfm_async.runtime.dispatch import Dispatcher, OperationCost


class Call:
    def __init__(self, cost: OperationCost, *, pinned: bool = False, stream: object = None) -> None:
        self.cost = cost
        self.pinned = pinned
        self.stream = stream


def cost(wall: float, used: float | None = None) -> OperationCost:
    found = OperationCost()
    found.measured(wall, wall if used is None else used)
    return found


SLOW = 0.02


def started(dispatcher: Dispatcher[Call]) -> list[tuple[Call, str | None]]:
    return list(dispatcher.pump())


def test_the_first_call_of_an_operation_runs_here_and_others_wait_for_it() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    dispatcher.lend("w")
    new = OperationCost()
    first, second = Call(new), Call(new)
    dispatcher.put("job", 0, first)
    dispatcher.put("job", 0, second)
    assert started(dispatcher) == [(first, None)]
    new.measured(SLOW, SLOW)
    assert dispatcher.left(first) is None
    assert started(dispatcher) == [(second, "w")]


def test_calls_that_compute_go_to_the_worker_with_the_fewest_and_then_here() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    slow = cost(SLOW)
    for worker in ("v", "w"):
        dispatcher.lend(worker)
    calls = [Call(slow) for _ in range(4)]
    for call in calls:
        dispatcher.put("job", 0, call)
    assert [worker for _, worker in started(dispatcher)] == ["v", "w", None]
    assert dispatcher.waiting == 1
    dispatcher.left(calls[1])
    assert started(dispatcher) == [(calls[3], "w")]


def test_short_calls_are_sent_in_advance() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    dispatcher.lend("w")
    short = cost(0.001)
    for _ in range(20):
        dispatcher.put("job", 0, Call(short))
    assert Counter(worker for _, worker in started(dispatcher)) == {"w": 9, None: 1}


def test_many_waiting_calls_keep_a_second_one_in_each_worker() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    dispatcher.lend("w")
    calls = [Call(cost(SLOW)) for _ in range(8)]
    for call in calls:
        dispatcher.put("job", 0, call)
    assert [worker for _, worker in started(dispatcher)] == ["w", None, "w"]
    dispatcher.left(calls[0])
    assert [worker for _, worker in started(dispatcher)] == ["w"]
    dispatcher.left(calls[2])
    assert started(dispatcher) == []  # few are left: whichever process is free first takes them


@pytest.mark.parametrize(
    ("wall", "used", "turn"), [(0.02, 0.02, 0.02), (0.02, 0.001, 0), (0.2, 0.2, 0), (0.04, 0.02, 0.04)]
)
def test_short_calls_that_compute_take_turns(wall: float, used: float, turn: float) -> None:
    assert cost(wall, used).turn == turn


def test_calls_of_an_operation_that_was_never_measured_take_no_turns() -> None:
    assert OperationCost().turn == 0


def test_long_calls_are_not_sent_in_advance() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    dispatcher.lend("w")
    for _ in range(8):
        dispatcher.put("job", 0, Call(cost(1.0)))
    assert [worker for _, worker in started(dispatcher)] == ["w", None]


@pytest.mark.parametrize(("wall", "used", "stays"), [(1e-5, 1e-5, True), (1.0, 0.001, True), (0.01, 0.01, False)])
def test_calls_that_hardly_compute_stay(wall: float, used: float, stays: bool) -> None:
    assert cost(wall, used).stays is stays


def test_large_values_make_it_worthwhile_to_stay() -> None:
    heavy = cost(0.001)
    assert not heavy.stays
    for _ in range(20):
        heavy.sent(100_000_000)
    assert heavy.stays


def test_an_operation_that_was_never_measured_does_not_stay() -> None:
    assert not OperationCost().stays


def test_a_call_that_waits_lets_others_run_beside_it_and_wants_no_workers() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    new = OperationCost()
    first, second = Call(new), Call(new)
    dispatcher.put("job", 0, first)
    dispatcher.put("job", 0, second)
    assert len(started(dispatcher)) == 1
    assert dispatcher.waiting == 0
    dispatcher.seen(first, SLOW, 0.0)
    assert started(dispatcher) == [(second, None)]


def test_a_call_that_computes_makes_others_want_workers() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    new = OperationCost()
    first = Call(new)
    dispatcher.put("job", 0, first)
    dispatcher.put("job", 0, Call(new))
    started(dispatcher)
    dispatcher.seen(first, SLOW, SLOW)
    assert dispatcher.waiting == 1
    dispatcher.lend("w")
    ((_, worker),) = started(dispatcher)
    assert worker == "w"  # before the first one has ended: it may take long


def test_the_first_call_of_another_operation_does_not_wait_for_one_that_computes() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    unknown = OperationCost()
    long, new = Call(cost(SLOW)), Call(unknown)
    dispatcher.put("job", 0, long)
    dispatcher.put("job", 0, new)
    dispatcher.put("job", 0, Call(unknown))
    assert started(dispatcher) == [(long, None), (new, None)]


def test_an_overdue_call_starts_beside_others() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    slow = cost(SLOW)
    long, overdue, third = Call(slow), Call(slow), Call(slow)
    for call in (long, overdue, third):
        dispatcher.put("job", 0, call)
    assert started(dispatcher) == [(long, None)]
    assert dispatcher.head is overdue
    assert list(dispatcher.pump(overdue)) == [(overdue, None)]
    assert dispatcher.head is third


def test_generators_start_although_functions_before_them_wait() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    slow, stream = cost(SLOW), cost(SLOW)
    functions = [Call(slow) for _ in range(3)]
    generators = [Call(stream, stream=object()) for _ in range(3)]
    for job, function, generator in zip(("a", "b", "b"), functions, generators, strict=True):
        dispatcher.put(job, 0, function)
        dispatcher.put(job, 0, generator)
    ((first, _),) = started(dispatcher)
    head = dispatcher.head
    assert head in functions
    assert [call for call, _ in dispatcher.pump_generators()] == generators
    assert (dispatcher.head, list(dispatcher.pump_generators())) == (head, [])
    for call in generators:
        dispatcher.left(call)
    rest = [first]
    while len(rest) < 3:
        dispatcher.left(rest[-1])
        ((call, _),) = started(dispatcher)
        rest.append(call)
    assert set(rest) == set(functions)
    assert (dispatcher.waiting, dispatcher.withdraw("a"), dispatcher.withdraw("b")) == (0, [], [])


def test_a_pinned_call_runs_here() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    dispatcher.lend("w")
    call = Call(cost(SLOW), pinned=True)
    dispatcher.put("job", 0, call)
    assert started(dispatcher) == [(call, None)]


def test_a_recalled_worker_gets_no_calls_and_is_returned_when_idle() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    slow = cost(SLOW)
    call = Call(slow)
    dispatcher.lend("w")
    dispatcher.put("job", 0, call)
    started(dispatcher)
    assert not dispatcher.recall("w")
    later = Call(slow)
    dispatcher.put("job", 0, later)
    assert started(dispatcher) == [(later, None)]
    assert dispatcher.left(call) == "w"
    assert dispatcher.gone("w") == []
    dispatcher.lend("v")
    assert dispatcher.recall("v")
    assert not dispatcher.recall("unknown")


def test_a_lost_worker_gives_back_its_calls() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    call = Call(cost(SLOW))
    dispatcher.lend("w")
    dispatcher.put("job", 0, call)
    started(dispatcher)
    assert dispatcher.gone("w") == [call]
    dispatcher.put("job", 0, call)
    assert started(dispatcher) == [(call, None)]


def test_jobs_take_turns() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    slow = cost(SLOW)
    batch, small = [Call(slow) for _ in range(5)], Call(slow)
    for call in batch:
        dispatcher.put("batch", 0, call)
    dispatcher.put("small", 0, small)
    order = []
    for _ in range(3):
        ((call, _),) = started(dispatcher)
        order.append(call)
        dispatcher.left(call)
    assert small in order


def test_calls_of_a_cancelled_job_are_withdrawn() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    slow = cost(SLOW)
    running, *waiting = [Call(slow) for _ in range(3)]
    other = Call(slow)
    for call in (running, *waiting):
        dispatcher.put("job", 0, call)
    dispatcher.put("other", 0, other)
    assert started(dispatcher) == [(running, None)]
    assert set(dispatcher.withdraw("job")) == set(waiting)
    assert dispatcher.withdraw("job") == []
    dispatcher.left(running)
    assert started(dispatcher) == [(other, None)]


def cheap() -> OperationCost:
    """Return the cost of an operation whose calls have been cheap so far."""
    found = OperationCost()
    for _ in range(100):
        found.measured(1e-5, 1e-5)
    assert found.stays
    return found


def test_a_call_that_gets_expensive_ends_the_stay_of_its_operation() -> None:
    found = cheap()
    assert not found.measured(1e-5, 1e-5)
    assert found.measured(SLOW, SLOW)
    assert not found.stays
    assert not found.measured(SLOW, SLOW)  # it is reported once


def test_running_calls_that_compute_for_longer_than_expected_end_the_stay() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    found = cheap()
    running = [Call(found) for _ in range(8)]
    assert dispatcher.overran(dict.fromkeys(running, (SLOW, SLOW / 8))) == [found]  # they share a processor
    assert not found.stays
    waits = Call(found)
    dispatcher.put("job", 0, waits)
    assert started(dispatcher) == []  # those that run here were counted
    assert dispatcher.waiting == 1
    dispatcher.lend("w")
    assert started(dispatcher) == [(waits, "w")]
    assert not any(dispatcher.left(call) for call in running)
    assert not any(map(dispatcher.is_here, running))


def test_running_calls_that_only_wait_do_not_end_the_stay() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    found = cheap()
    assert dispatcher.overran({Call(found): (1.0, 0.1), Call(found): (1.0, 0.01)}) == []
    assert dispatcher.overran({Call(found): (1e-4, 1e-4)}) == []
    assert found.stays


def test_a_generator_that_stays_counts_when_it_computes() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    found = cheap()
    generator, other = Call(found, stream="elements"), Call(cost(SLOW), stream="elements")
    dispatcher.begin_here(generator)
    dispatcher.seen(generator, SLOW, SLOW)
    assert not found.stays
    dispatcher.put("job", 0, other)
    assert started(dispatcher) == []
    assert dispatcher.waiting == 1


class AnyOrder(RuleBasedStateMachine):
    """Calls of several jobs, workers that come and go: each call starts once, wherever it runs."""

    @initialize()
    def begin(self) -> None:
        self.dispatcher: Dispatcher[Call] = Dispatcher()
        self.costs = [cost(SLOW), cost(0.001), OperationCost()]
        self.waiting: dict[Call, int] = {}
        self.running: dict[Call, str | None] = {}
        self.workers: set[str] = set()
        self.made = 0

    @rule(job=st.integers(0, 2), kind=st.integers(0, 2), pinned=st.booleans())
    def put(self, job: int, kind: int, pinned: bool) -> None:
        call = Call(self.costs[kind], pinned=pinned)
        self.waiting[call] = job
        self.dispatcher.put(job, 0, call)

    @rule()
    def pump(self) -> None:
        for call, worker in self.dispatcher.pump():
            del self.waiting[call]
            self.running[call] = worker
            assert worker is None or (worker in self.workers and not call.pinned)

    @rule()
    def lend(self) -> None:
        self.made += 1
        self.workers.add(f"w{self.made}")
        self.dispatcher.lend(f"w{self.made}")

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def recall(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        idle = worker not in self.running.values()
        assert self.dispatcher.recall(worker) is idle
        if idle:
            self.workers.discard(worker)
            assert self.dispatcher.gone(worker) == []

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers.discard(worker)
        lost = self.dispatcher.gone(worker)
        assert set(lost) == {call for call, at in self.running.items() if at == worker}
        for call in lost:
            del self.running[call]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        call = data.draw(st.sampled_from(list(self.running)))
        worker = self.running.pop(call)
        call.cost.measured(call.cost.wall or SLOW, call.cost.wall or SLOW)
        idle = self.dispatcher.left(call)
        if idle is not None:
            assert idle == worker
            self.workers.discard(idle)
            self.dispatcher.gone(idle)

    @precondition(lambda self: self.waiting)
    @rule(job=st.integers(0, 2))
    def withdraw(self, job: int) -> None:
        found = set(self.dispatcher.withdraw(job))
        assert found == {call for call, of in self.waiting.items() if of == job}
        for call in found:
            del self.waiting[call]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        call = data.draw(st.sampled_from(list(self.waiting)))
        assert self.dispatcher.take(call)
        assert not self.dispatcher.take(call)
        del self.waiting[call]

    @invariant()
    def one_call_computes_here(self) -> None:
        if hasattr(self, "running"):
            here = [call for call, worker in self.running.items() if worker is None]
            assert len(here) <= 1 + len(self.costs)  # and the first of each operation

    def teardown(self) -> None:
        while self.waiting or self.running:
            self.pump()
            assert self.running, "calls wait although nothing runs"
            call, _ = self.running.popitem()
            self.dispatcher.left(call)


TestAnyOrder = AnyOrder.TestCase


def test_one_that_takes_long_makes_the_next_wait_once_only() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    long, others = Call(cost(10.0)), [Call(cost(SLOW)) for _ in range(3)]
    for call in (long, *others):
        dispatcher.put("job", 0, call)
    assert started(dispatcher) == [(long, None)]
    assert list(dispatcher.pump(others[0])) == [(others[0], None)]
    for ended, following in itertools.pairwise(others):
        dispatcher.left(ended)
        assert started(dispatcher) == [(following, None)]  # beside the long one, as the first of them
    dispatcher.left(others[-1])
    dispatcher.left(long)
    for call in (first := Call(cost(SLOW)), Call(cost(SLOW))):
        dispatcher.put("job", 0, call)
    assert started(dispatcher) == [(first, None)]


def test_generators_and_functions_do_not_wait_for_each_other() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    generator, call = Call(cost(SLOW), stream="elements"), Call(cost(SLOW))
    dispatcher.put("job", 0, generator)
    dispatcher.put("job", 0, call)
    assert started(dispatcher) == [(generator, None), (call, None)]


def test_generators_that_have_waited_long_start_where_the_fewest_run() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher()
    dispatcher.lend("w")
    generators = [Call(cost(10.0), stream="elements") for _ in range(6)]
    for generator in generators:
        dispatcher.put("job", 0, generator)
    found = started(dispatcher)
    while dispatcher.head is not None:
        found += dispatcher.pump(dispatcher.head)
    assert Counter(worker for _, worker in found) == {None: 3, "w": 3}


def test_a_process_with_enough_workers_does_not_compute_itself() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher(enough=2)
    calls = [Call(cost(SLOW)) for _ in range(4)]
    for call in calls:
        dispatcher.put("job", 0, call)
    dispatcher.lend("v")
    assert dict(started(dispatcher)) == {calls[0]: "v", calls[1]: None}
    dispatcher.lend("w")
    assert started(dispatcher) == [(calls[2], "w")]
    dispatcher.left(calls[1])
    assert started(dispatcher) == []
    dispatcher.gone("w")
    assert started(dispatcher) == [(calls[3], None)]


def test_what_cannot_be_sent_runs_here_although_there_are_enough_workers() -> None:
    dispatcher: Dispatcher[Call] = Dispatcher(enough=1)
    dispatcher.lend("w")
    pinned = Call(cost(SLOW), pinned=True)
    dispatcher.put("job", 0, pinned)
    assert started(dispatcher) == [(pinned, None)]
