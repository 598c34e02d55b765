"""When a result with large parts has arrived: the rows of the decision table in 3.4, and what a report may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dfm_async.exchange.progress import GRACE, Decision, Pair, ProgressTracker, TransferState, Verdict

IDLE = 600.0

WORDS_OF = {
    TransferState.COMPLETED: ("completed", "complete", "done", "success", "finished"),
    TransferState.FAILED: ("failed", "fail", "failure", "error", "exception", "timeout", "deleted"),
    TransferState.ABORTED: ("aborted", "abort", "cancelled", "canceled"),
    TransferState.ACTIVE: ("active", "running", "", "complete!", "pending"),
}
FINAL_WORDS = [word for state, words in WORDS_OF.items() if state is not TransferState.ACTIVE for word in words]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> ProgressTracker:
    """Expects two transfers to one receiver."""
    found = ProgressTracker(idle_timeout=IDLE, clock=clock)
    found.expect("tx", [("1", "site"), ("2", "site")])
    return found


PAIR = Pair("tx", "1", "site")


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan")])
def test_an_idle_timeout_that_never_comes_is_refused(wrong: float, clock: Clock) -> None:
    with pytest.raises(ValueError, match="idle_timeout"):
        ProgressTracker(idle_timeout=wrong, clock=clock)


@pytest.mark.parametrize(("state", "word"), [(state, word) for state, words in WORDS_OF.items() for word in words])
def test_words_of_a_report_name_its_state_in_any_case(state: TransferState, word: str) -> None:
    assert TransferState.of(word) is TransferState.of(word.upper()) is TransferState.of(word.title()) is state


# which pair a report is about


def test_a_pair_that_is_not_expected_is_rejected(tracker: ProgressTracker) -> None:
    assert tracker.update("tx", "3", "site", 1, 10) == "unexpected pair"
    assert tracker.update("tx", "1", "somebody", 1, 10) == "unexpected pair"
    assert tracker.update("tx", "1", None, 1, 10) == "unexpected pair"


@pytest.mark.parametrize("tx", [None, "", "another"])
def test_without_the_right_transaction_only_one_matching_pair_decides(tracker: ProgressTracker, tx: str) -> None:
    assert tracker.update(tx, "1", "site", 1, 10) == ""
    assert tracker.state(PAIR) is TransferState.ACTIVE
    assert tracker.state(Pair("tx", "2", "site")) is None
    tracker.expect("tx2", [("2", "site")])
    assert tracker.update(tx, "2", "site", 1, 10) == "unexpected pair"
    assert tracker.update("tx2", "2", "site", 1, 10) == ""
    assert tracker.state(Pair("tx", "2", "site")) is None
    assert tracker.state(Pair("tx2", "2", "site")) is TransferState.ACTIVE


def test_announcing_a_pair_again_keeps_the_time_of_its_creation(tracker: ProgressTracker, clock: Clock) -> None:
    clock.now += IDLE - 1
    tracker.expect("tx", [("0", "site"), ("1", "site")])
    assert [pair.transfer for pair in tracker.expected] == ["1", "2", "0"], "in the order of their announcement"
    clock.now += 1
    assert tracker.decide().verdict is Verdict.FAILURE


# what a report may say


@pytest.mark.parametrize("end", FINAL_WORDS)
def test_a_pair_that_has_ended_takes_no_report(tracker: ProgressTracker, end: str) -> None:
    assert tracker.update("tx", "1", "site", 1, 10, state=end) == ""
    before = tracker.state(PAIR)
    assert tracker.update("tx", "1", "site", 2, 20, state="active") == "the pair has ended"
    assert tracker.update("tx", "1", "site", 3, 20, state="done") == "the pair has ended"
    assert tracker.state(PAIR) is before


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ((4, 20, 3), "old sequence number"),
        ((5, 20, 3), "old sequence number"),
        ((6, 9, 3), "progress fell"),
        ((6, 20, 2), "progress fell"),
        ((6, 20, None), ""),
        ((6, 10, 3), ""),
    ],
)
def test_reports_that_are_old_or_go_back_are_rejected(
    tracker: ProgressTracker, report: tuple[int, int, int | None], problem: str
) -> None:
    assert tracker.update("tx", "1", "site", 5, 10, 3) == ""
    assert tracker.update("tx", "1", "site", *report, state="done") == problem
    assert tracker.state(PAIR) is (TransferState.ACTIVE if problem else TransferState.COMPLETED)


def test_a_report_without_items_keeps_their_number(tracker: ProgressTracker) -> None:
    tracker.update("tx", "1", "site", 1, 10, 3)
    assert tracker.update("tx", "1", "site", 2, 20, None) == ""
    assert tracker.update("tx", "1", "site", 3, 20, 2) == "progress fell"


def test_the_ids_of_the_first_accepted_report_stay(tracker: ProgressTracker) -> None:
    assert tracker.task(PAIR) is None
    tracker.update("tx", "9", "site", 1, 0, task="not of this pair")
    tracker.update(None, "1", "site", 1, 0, task="first")
    tracker.update("tx", "1", "site", 2, 10, task="second")
    tracker.update("other", "1", "site", 3, 20, state="done", task="third")
    assert tracker.task(PAIR) == "first"
    assert [pair.tx for pair in tracker.expected] == ["tx", "tx"]


@pytest.mark.parametrize(
    ("report", "moves"),
    [
        ({"bytes_done": 10, "items_done": 1}, False),
        ({"bytes_done": 11, "items_done": 1}, True),
        ({"bytes_done": 10, "items_done": 2}, True),
        ({"bytes_done": 9, "items_done": 1}, False),
        ({"bytes_done": 99, "items_done": 9, "sequence": 1}, False),
    ],
)
def test_the_time_of_progress_moves_only_when_bytes_or_items_grew(
    tracker: ProgressTracker, clock: Clock, report: dict[str, Any], moves: bool
) -> None:
    finish(tracker, "2")
    tracker.update("tx", "1", "site", 1, 10, 1)
    clock.now += IDLE - 1
    tracker.update("tx", "1", "site", **{"sequence": 2, **report})
    clock.now += 1
    assert (tracker.decide().verdict is Verdict.WAIT) is moves


# rows of the table


def finish(tracker: ProgressTracker, *transfers: str, state: str = "done") -> None:
    for transfer in transfers:
        assert tracker.update("tx", transfer, "site", 1, 10, state=state) == ""


ALL = {"1": "done", "2": "done"}
MOVING = {"1": "active", "2": "active"}


@pytest.mark.parametrize(
    ("states", "waited", "callback", "verdict", "reason"),
    [
        pytest.param({"1": "failed"}, 0, (True, "finished"), Verdict.SUCCESS, "", id="1"),
        pytest.param({"1": "failed"}, 0, (True, "FINISHED"), Verdict.SUCCESS, "", id="1 in capitals"),
        pytest.param(ALL, 0, (True, "timeout"), Verdict.SUCCESS, "", id="2"),
        pytest.param(ALL, 0, (True, None), Verdict.SUCCESS, "", id="2 without a status"),
        pytest.param({"1": "done"}, 0, (True, "timeout"), Verdict.FAILURE, "timeout", id="3"),
        pytest.param({"1": "done"}, 0, (True, None), Verdict.FAILURE, "None", id="3 without a status"),
        pytest.param({"1": "done"}, 0, (True, "done"), Verdict.FAILURE, "done", id="3 with a word of a report"),
        pytest.param({"1": "done", "2": "failed"}, 0, (), Verdict.FAILURE, "transfer 2 to site failed", id="4"),
        pytest.param({"2": "aborted"}, 0, (), Verdict.FAILURE, "transfer 2 to site aborted", id="4 aborted"),
        pytest.param(
            {"2": "failed"}, 2 * IDLE, (), Verdict.FAILURE, "transfer 2 to site failed", id="4 before 8 and 9"
        ),
        pytest.param(ALL, 0, (), Verdict.WAIT, "waiting for the receiver's confirmation", id="5"),
        pytest.param(ALL, GRACE - 1, (), Verdict.WAIT, "waiting for the receiver's confirmation", id="6"),
        pytest.param(ALL, GRACE, (), Verdict.SUCCESS, "", id="7"),
        pytest.param(ALL, 10 * IDLE, (), Verdict.SUCCESS, "", id="7 before 8 and 9"),
        pytest.param(MOVING, IDLE, (), Verdict.FAILURE, "transfer 1 to site stalled", id="8"),
        pytest.param({"2": "active"}, IDLE, (), Verdict.FAILURE, "transfer 2 to site stalled", id="8 before 9"),
        pytest.param({}, IDLE, (), Verdict.FAILURE, "transfer 1 to site did not start", id="9"),
        pytest.param(MOVING, IDLE - 0.5, (), Verdict.WAIT, "in flight", id="10 moving"),
        pytest.param({}, IDLE - 0.5, (), Verdict.WAIT, "in flight", id="10 not started"),
    ],
)
def test_the_first_row_that_fits_decides(
    tracker: ProgressTracker,
    clock: Clock,
    states: dict[str, str],
    waited: float,
    callback: tuple[Any, ...],
    verdict: Verdict,
    reason: str,
) -> None:
    reported = clock.now
    for transfer, state in states.items():
        finish(tracker, transfer, state=state)
    clock.now += waited
    decision = tracker.decide(*callback)
    assert decision.verdict is verdict
    assert reason in decision.reason
    if verdict is Verdict.WAIT:
        assert decision.until == reported + (GRACE if states is ALL else IDLE)


def test_the_grace_counts_from_the_last_completion(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "1")
    assert not tracker.grace_running
    clock.now += 5
    finish(tracker, "2")
    assert tracker.decide().until == clock.now + GRACE
    assert tracker.grace_running


def test_a_start_counts_from_the_creation_that_was_named(clock: Clock) -> None:
    tracker = ProgressTracker(idle_timeout=IDLE, clock=clock)
    tracker.expect("tx", [("1", "site")], created=clock.now - IDLE + 1)
    assert tracker.decide().until == clock.now + 1


def test_the_pair_that_is_due_first_is_waited_for(tracker: ProgressTracker, clock: Clock) -> None:
    first = clock.now + IDLE
    clock.now += 100
    tracker.update("tx", "2", "site", 1, 10)
    assert tracker.decide().until == first
    finish(tracker, "1")
    assert tracker.decide().until == clock.now + IDLE, "one that is complete is not waited for"


def test_nothing_expected_decides_nothing(clock: Clock) -> None:
    tracker = ProgressTracker(idle_timeout=IDLE, clock=clock)
    clock.now += 10 * IDLE
    assert tracker.decide() == Decision(Verdict.WAIT, "transfers are in flight", None)
    assert not tracker.complete


@pytest.mark.parametrize("again", [[], [("1", "site")], [("3", "site")]], ids=["none", "known", "new"])
def test_only_a_new_pair_ends_the_grace(
    tracker: ProgressTracker, clock: Clock, again: list[tuple[str, str | None]]
) -> None:
    """Else the decision would wait for something that never comes."""
    finish(tracker, "1", "2")
    tracker.expect("tx", again)
    new = again == [("3", "site")]
    assert tracker.grace_running is not new
    clock.now += GRACE
    assert tracker.decide().verdict is (Verdict.WAIT if new else Verdict.SUCCESS)


# abandoning


def test_abandoning_marks_the_open_pairs_and_only_them(tracker: ProgressTracker) -> None:
    tracker.expect("tx", [("3", "site")])
    finish(tracker, "1")
    tracker.update("tx", "2", "site", 1, 10)
    assert not tracker.abandon()
    states = [tracker.state(pair) for pair in tracker.expected]
    assert states == [TransferState.COMPLETED, TransferState.ABORTED, TransferState.ABORTED]
    assert tracker.update("tx", "2", "site", 2, 10, state="done") == "the pair has ended"
    assert tracker.decide() == Decision(Verdict.FAILURE, "transfer 2 to site aborted")


# against a model


@dataclass
class Known:
    """What the model knows of a pair: everything that was accepted."""

    reports: list[tuple[float, int, int, int, str]]


class Model:
    """The same rules, read from the lists of accepted reports each time; nothing is kept up to date."""

    def __init__(self) -> None:
        self.created: dict[tuple[str, str, str | None], float] = {}
        self.known: dict[tuple[str, str, str | None], Known] = {}

    @staticmethod
    def kind(word: str) -> str:
        return next((state.value for state, words in WORDS_OF.items() if word.lower() in words), "active")

    def end(self, pair: tuple[str, str, str | None]) -> str:
        known = self.known.get(pair)
        return "open" if known is None else self.kind(known.reports[-1][4])

    def accepts(self, now: float, tx: str | None, transfer: str, receiver: str | None, *report: Any) -> bool:
        sequence, done, items, word = report
        fits = [pair for pair in self.created if pair[1:] == (transfer, receiver)]
        exact = [pair for pair in fits if pair[0] == tx]
        found = exact or fits
        if len(found) != 1:
            return False
        pair = found[0]
        known = self.known.setdefault(pair, Known([]))
        if known.reports:
            _, last, last_done, last_items, last_word = known.reports[-1]
            items = last_items if items is None else items
            if self.kind(last_word) != "active" or sequence <= last or done < last_done or items < last_items:
                return False
        known.reports.append((now, sequence, done, items or 0, word))
        return True

    def progressed(self, pair: tuple[str, str, str | None]) -> float:
        found, before = 0.0, None
        for now, _, done, items, word in self.known[pair].reports:
            if before is None or (done, items) != before or self.kind(word) != "active":
                found = now
            before = (done, items)
        return found

    def complete(self) -> bool:
        return bool(self.created) and all(self.end(pair) == "completed" for pair in self.created)

    def decide(self, now: float, fired: bool, status: str | None) -> str:
        if fired:
            good = (status or "").lower() == "finished" or self.complete()
            return "success" if good else "failure"
        if any(self.end(pair) in ("failed", "aborted") for pair in self.created):
            return "failure"
        if self.complete():
            last = max(self.known[pair].reports[-1][0] for pair in self.created)
            return "success" if now - last >= GRACE else "wait"
        for pair in self.created:
            if self.end(pair) == "active" and now - self.progressed(pair) >= IDLE:
                return "failure"
        for pair, created in self.created.items():
            if self.end(pair) == "open" and now - created >= IDLE:
                return "failure"
        return "wait"


TRANSACTIONS = st.sampled_from(["a", "b"])
TRANSFERS = st.sampled_from(["1", "2"])
RECEIVERS = st.sampled_from(["site", "server", None])
WORDS = st.sampled_from(["active", "running", "active", "Done", "finished", "failed", "deleted", "canceled"])


class TrackerAgainstModel(RuleBasedStateMachine):
    """Any order of calls: the tracker says what the model says."""

    @initialize(pairs=st.lists(st.tuples(TRANSFERS, RECEIVERS), min_size=1, max_size=3))
    def begin(self, pairs: list[tuple[str, str | None]]) -> None:
        self.clock = Clock()
        self.model = Model()
        self.tracker = ProgressTracker(idle_timeout=IDLE, clock=self.clock)
        self.abandoned = False
        self.numbers = 0
        self.expect("a", pairs)

    @rule(tx=TRANSACTIONS, pairs=st.lists(st.tuples(TRANSFERS, RECEIVERS), max_size=2))
    @precondition(lambda self: not self.abandoned)
    def expect(self, tx: str, pairs: list[tuple[str, str | None]]) -> None:
        self.tracker.expect(tx, pairs)
        for transfer, receiver in pairs:
            self.model.created.setdefault((tx, transfer, receiver), self.clock.now)

    @rule(
        tx=st.one_of(TRANSACTIONS, st.none(), st.just("?")),
        transfer=TRANSFERS,
        receiver=RECEIVERS,
        step=st.sampled_from([1, 1, 1, 0, -1]),
        done=st.integers(0, 4),
        items=st.one_of(st.none(), st.integers(0, 2)),
        word=WORDS,
    )
    def update(self, step: int, **report: Any) -> None:
        self.numbers += step
        args = (report["tx"], report["transfer"], report["receiver"], self.numbers, report["done"], report["items"])
        accepted = self.tracker.update(*args, report["word"]) == ""
        assert accepted == self.model.accepts(self.clock.now, *args, report["word"])

    @rule(seconds=st.sampled_from([0.0, 1.0, GRACE - 1, GRACE, IDLE - 1, IDLE]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def wait_as_it_says(self) -> None:
        until = self.tracker.decide().until
        if until is not None:
            assert until > self.clock.now, "it would be asked again and again"
            self.clock.now = until
            assert self.tracker.decide().verdict is not Verdict.WAIT, "it was asked too early"

    @rule()
    def abandon(self) -> None:
        complete = self.model.complete()
        assert self.tracker.abandon() == complete
        if complete:
            return
        self.abandoned = True
        for pair in self.model.created:
            known = self.model.known.setdefault(pair, Known([]))
            last = known.reports[-1] if known.reports else (0.0, 0, 0, 0, "active")
            if self.model.kind(last[4]) == "active":
                known.reports.append((self.clock.now, *last[1:4], "aborted"))

    @invariant()
    def says_the_same(self) -> None:
        for fired, status in ((False, None), (True, "finished"), (True, "timeout"), (True, None)):
            decision = self.tracker.decide(fired, status)
            assert decision.verdict.value == self.model.decide(self.clock.now, fired, status)
        assert self.tracker.complete == self.model.complete()
        for pair in self.tracker.expected:
            state = self.tracker.state(pair)
            assert (state.value if state else "open") == self.model.end((pair.tx, pair.transfer, pair.receiver))


TestTrackerAgainstModel = TrackerAgainstModel.TestCase
TestTrackerAgainstModel.settings = settings(stateful_step_count=25)
