"""Which worker runs calls for which other one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dfm_async.workers.leases import Lend, Recall, StartWorker, WorkerLeases


def ready(*workers: str) -> WorkerLeases[str]:
    leases: WorkerLeases[str] = WorkerLeases()
    for worker in workers:
        assert leases.ready(worker) == []
    return leases


def test_idle_workers_are_lent_and_others_are_started() -> None:
    leases = ready("home", "a")
    assert leases.wants("home", 3) == [Lend("a", "home"), StartWorker()]
    assert leases.ready("b") == [Lend("b", "home"), StartWorker()]
    assert leases.ready("c") == [Lend("c", "home")]


def test_a_worker_that_wants_others_is_not_lent() -> None:
    leases = ready("x", "y")
    assert leases.wants("x", 2) == [Lend("y", "x"), StartWorker()]
    assert leases.wants("y", 1) == [Recall("y", "x"), StartWorker()]
    assert leases.returned("y", "x") == []
    assert leases.ready("z") == [Lend("z", "x")]


def test_workers_are_shared() -> None:
    leases = ready("x", "y", "a", "b", "c")
    lent = leases.wants("x", 4)
    assert [effect.worker for effect in lent if isinstance(effect, Lend)] == ["y", "a", "b", "c"]
    assert leases.wants("y", 2) == [Recall("y", "x"), StartWorker()]
    (recall, *_) = leases.returned("y", "x")
    assert recall == Recall("a", "x")
    assert Lend("a", "y") in leases.returned("a", "x")


def test_a_lost_worker_is_forgotten_and_gives_back_what_it_had() -> None:
    leases = ready("x", "y", "a")
    leases.wants("x", 1)
    assert leases.held_by("x") == ["y"]
    leases.gone("x")
    assert leases.holder("y") is None
    assert set(leases.idle) == {"y", "a"}


def test_a_retired_worker_is_recalled_and_not_lent_again() -> None:
    leases = ready("x", "a")
    leases.wants("x", 1)
    assert leases.retired("a") == [Recall("a", "x")]
    assert leases.retired("a") == []
    assert leases.returned("a", "x") == []
    assert "a" not in leases.idle


def test_what_another_worker_returns_is_not_taken() -> None:
    leases = ready("x", "y", "a")
    leases.wants("x", 2)
    leases.returned("a", "y")
    assert leases.holder("a") == "x"


class AnyOrder(RuleBasedStateMachine):
    """Workers come, go and want others: nobody is lent twice, nobody runs calls of itself, and wants are met."""

    @initialize()
    def begin(self) -> None:
        self.leases: WorkerLeases[str] = WorkerLeases()
        self.alive: list[str] = []
        self.lent: dict[str, str] = {}
        self.recalled: set[str] = set()
        self.wanted: dict[str, int] = {}
        self.made = 0

    def carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Lend):
                assert effect.worker != effect.to
                assert effect.worker not in self.lent
                assert not self.wanted.get(effect.worker)
                self.lent[effect.worker] = effect.to
                self.wanted[effect.to] -= 1
            elif isinstance(effect, Recall):
                assert self.lent[effect.worker] == effect.lent_to
                self.recalled.add(effect.worker)

    @rule()
    def start(self) -> None:
        self.made += 1
        self.alive.append(f"w{self.made}")
        self.wanted[f"w{self.made}"] = 0
        self.carry_out(self.leases.ready(f"w{self.made}"))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), count=st.integers(0, 4))
    def want(self, data: Any, count: int) -> None:
        worker = data.draw(st.sampled_from(self.alive))
        self.wanted[worker] = count
        self.carry_out(self.leases.wants(worker, count))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.recalled) or sorted(self.lent)))
        self.recalled.discard(worker)
        by = self.lent.pop(worker, "")
        self.carry_out(self.leases.returned(worker, by))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.alive))
        self.alive.remove(worker)
        self.wanted.pop(worker)
        for lent in [lent for lent, to in self.lent.items() if worker in (lent, to)]:
            del self.lent[lent]
            self.recalled.discard(lent)
        self.carry_out(self.leases.gone(worker))

    @invariant()
    def both_agree(self) -> None:
        if hasattr(self, "leases"):
            assert {worker: self.leases.holder(worker) for worker in self.lent} == self.lent

    @invariant()
    def idle_workers_are_wanted_by_nobody_else(self) -> None:
        if hasattr(self, "leases"):
            idle = set(self.leases.idle)
            wanting = {worker for worker, count in self.wanted.items() if count}
            assert not (idle and wanting)


TestAnyOrder = AnyOrder.TestCase
