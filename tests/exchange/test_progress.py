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

COMPLETED = ("completed", "complete", "done", "success", "finished")
FAILED = ("failed", "fail", "failure", "error", "exception", "timeout", "deleted")
ABORTED = ("aborted", "abort", "cancelled", "canceled")
ACTIVE = ("active", "running", "", "complete!", "pending")


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


def one(clock: Clock) -> ProgressTracker:
    found = ProgressTracker(idle_timeout=IDLE, clock=clock)
    found.expect("tx", [("1", "site")])
    return found


PAIR = Pair("tx", "1", "site")


# construction


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan")])
def test_an_idle_timeout_that_never_comes_is_refused(wrong: float, clock: Clock) -> None:
    with pytest.raises(ValueError, match="idle_timeout"):
        ProgressTracker(idle_timeout=wrong, clock=clock)


# state words


@pytest.mark.parametrize("word", COMPLETED)
def test_words_that_mean_completed(word: str) -> None:
    assert TransferState.of(word) is TransferState.of(word.upper()) is TransferState.COMPLETED


@pytest.mark.parametrize("word", FAILED)
def test_words_that_mean_failed(word: str) -> None:
    assert TransferState.of(word) is TransferState.of(word.title()) is TransferState.FAILED


@pytest.mark.parametrize("word", ABORTED)
def test_words_that_mean_aborted(word: str) -> None:
    assert TransferState.of(word) is TransferState.of(word.upper()) is TransferState.ABORTED


@pytest.mark.parametrize("word", ACTIVE)
def test_any_other_word_means_that_it_goes_on(word: str) -> None:
    assert TransferState.of(word) is TransferState.ACTIVE


# which pair a report is about


def test_a_pair_that_nobody_expects_is_rejected(tracker: ProgressTracker) -> None:
    assert tracker.update("tx", "3", "site", 1, 10) == "unexpected pair"
    assert tracker.update("tx", "1", "somebody", 1, 10) == "unexpected pair"
    assert tracker.update("tx", "1", None, 1, 10) == "unexpected pair"


@pytest.mark.parametrize("tx", [None, "", "another"])
def test_without_the_right_transaction_the_only_pair_that_fits_decides(tracker: ProgressTracker, tx: str) -> None:
    assert tracker.update(tx, "1", "site", 1, 10) == ""
    assert tracker.state(PAIR) is TransferState.ACTIVE
    assert tracker.state(Pair("tx", "2", "site")) is None


@pytest.mark.parametrize("tx", [None, "", "another"])
def test_without_the_right_transaction_several_pairs_that_fit_reject_it(tracker: ProgressTracker, tx: str) -> None:
    tracker.expect("tx2", [("1", "site")])
    assert tracker.update(tx, "1", "site", 1, 10) == "unexpected pair"
    assert tracker.state(PAIR) is None


def test_the_right_transaction_decides_among_several_pairs_that_fit(tracker: ProgressTracker) -> None:
    tracker.expect("tx2", [("1", "site")])
    assert tracker.update("tx2", "1", "site", 1, 10) == ""
    assert tracker.state(PAIR) is None
    assert tracker.state(Pair("tx2", "1", "site")) is TransferState.ACTIVE


def test_a_receiver_without_a_name_is_a_receiver(clock: Clock) -> None:
    found = ProgressTracker(idle_timeout=IDLE, clock=clock)
    found.expect("tx", [("1", None)])
    assert found.update("tx", "1", None, 0, 0, state="done") == ""
    assert found.complete
    assert found.update(None, "1", "site", 1, 0) == "unexpected pair"


def test_announcing_a_pair_again_keeps_the_time_of_its_creation(tracker: ProgressTracker, clock: Clock) -> None:
    clock.now += IDLE - 1
    tracker.expect("tx", [("1", "site")])
    clock.now += 1
    assert tracker.decide().verdict is Verdict.FAILURE


def test_the_order_of_pairs_is_that_of_their_announcement(tracker: ProgressTracker) -> None:
    tracker.expect("tx", [("0", "site")])
    assert [pair.transfer for pair in tracker.expected] == ["1", "2", "0"]


# what a report may say


def test_the_first_report_starts_a_pair_even_with_0_bytes(tracker: ProgressTracker) -> None:
    assert tracker.state(PAIR) is None
    assert tracker.update("tx", "1", "site", 0, 0) == ""
    assert tracker.state(PAIR) is TransferState.ACTIVE


@pytest.mark.parametrize("end", [*COMPLETED, *FAILED, *ABORTED])
def test_a_pair_that_has_ended_takes_no_report(tracker: ProgressTracker, end: str) -> None:
    assert tracker.update("tx", "1", "site", 1, 10, state=end) == ""
    before = tracker.state(PAIR)
    assert tracker.update("tx", "1", "site", 2, 20, state="active") == "the pair has ended"
    assert tracker.update("tx", "1", "site", 3, 20, state="done") == "the pair has ended"
    assert tracker.state(PAIR) is before


@pytest.mark.parametrize("sequence", [4, 5])
def test_a_sequence_number_that_is_not_larger_is_rejected(tracker: ProgressTracker, sequence: int) -> None:
    tracker.update("tx", "1", "site", 5, 10)
    assert tracker.update("tx", "1", "site", sequence, 20, state="done") == "old sequence number"
    assert tracker.state(PAIR) is TransferState.ACTIVE


def test_bytes_that_fell_are_rejected(tracker: ProgressTracker) -> None:
    tracker.update("tx", "1", "site", 1, 10)
    assert tracker.update("tx", "1", "site", 2, 9, state="done") == "progress fell"
    assert tracker.update("tx", "1", "site", 2, 10) == "", "what was rejected has used its number"


def test_items_that_fell_are_rejected_even_if_bytes_grew(tracker: ProgressTracker) -> None:
    tracker.update("tx", "1", "site", 1, 10, 3)
    assert tracker.update("tx", "1", "site", 2, 20, 2) == "progress fell"


def test_a_report_that_tells_no_items_has_not_lost_them(tracker: ProgressTracker) -> None:
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
    clock: Clock, report: dict[str, Any], moves: bool
) -> None:
    tracker = one(clock)
    tracker.update("tx", "1", "site", 1, 10, 1)
    clock.now += IDLE - 1
    tracker.update("tx", "1", "site", **{"sequence": 2, **report})
    clock.now += 1
    assert (tracker.decide().verdict is Verdict.WAIT) is moves


# rows of the table


def finish(tracker: ProgressTracker, *transfers: str, state: str = "done") -> None:
    for transfer in transfers:
        assert tracker.update("tx", transfer, "site", 1, 10, state=state) == ""


@pytest.mark.parametrize("status", ["finished", "FINISHED", "Finished"])
def test_row_1_the_callback_says_finished(tracker: ProgressTracker, status: str) -> None:
    finish(tracker, "1", state="failed")
    assert tracker.decide(True, status).verdict is Verdict.SUCCESS


def test_row_2_another_word_does_not_matter_if_all_pairs_are_complete(tracker: ProgressTracker) -> None:
    finish(tracker, "1", "2")
    assert tracker.decide(True, "timeout").verdict is Verdict.SUCCESS
    assert tracker.decide(True, None).verdict is Verdict.SUCCESS


@pytest.mark.parametrize("status", ["timeout", None, "done", ""])
def test_row_3_another_word_is_a_failure_that_names_it(tracker: ProgressTracker, status: str | None) -> None:
    finish(tracker, "1")
    decision = tracker.decide(True, status)
    assert decision.verdict is Verdict.FAILURE
    assert str(status) in decision.reason


@pytest.mark.parametrize("state", ["failed", "aborted"])
def test_row_4_a_pair_that_failed_is_a_failure_that_names_it(tracker: ProgressTracker, state: str) -> None:
    finish(tracker, "1")
    finish(tracker, "2", state=state)
    decision = tracker.decide()
    assert decision.verdict is Verdict.FAILURE
    assert decision.reason == f"transfer 2 to site {state}"


def test_row_4_comes_before_the_rows_about_time(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "2", state="failed")
    clock.now += 2 * IDLE
    assert "transfer 2" in tracker.decide().reason


def test_row_5_all_complete_waits_for_the_callback(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "1")
    assert not tracker.grace_running
    clock.now += 5
    finish(tracker, "2")
    decision = tracker.decide()
    assert decision.verdict is Verdict.WAIT
    assert decision.until == clock.now + GRACE
    assert tracker.grace_running


def test_row_6_the_grace_counts_from_the_last_completion_and_not_from_the_question(
    tracker: ProgressTracker, clock: Clock
) -> None:
    finish(tracker, "1", "2")
    end = clock.now + GRACE
    clock.now += GRACE - 1
    assert tracker.decide() == Decision(
        Verdict.WAIT, "all transfers are complete: waiting for the receiver's word", end
    )


def test_row_7_after_the_grace_it_is_a_success(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "1", "2")
    clock.now += GRACE
    assert tracker.decide().verdict is Verdict.SUCCESS


def test_rows_5_to_7_come_before_the_rows_about_time(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "1", "2")
    clock.now += 10 * IDLE
    assert tracker.decide().verdict is Verdict.SUCCESS


def test_row_8_a_pair_that_stands_still_has_stalled(clock: Clock) -> None:
    tracker = one(clock)
    clock.now += 100
    tracker.update("tx", "1", "site", 1, 10)
    assert tracker.decide().until == clock.now + IDLE
    clock.now += IDLE - 0.5
    assert tracker.decide().verdict is Verdict.WAIT
    clock.now += 0.5
    decision = tracker.decide()
    assert decision.verdict is Verdict.FAILURE
    assert "transfer 1 to site stalled" in decision.reason


def test_row_9_a_pair_that_does_not_begin_is_a_failure(clock: Clock) -> None:
    tracker = one(clock)
    assert tracker.decide().until == clock.now + IDLE
    clock.now += IDLE - 0.5
    assert tracker.decide().verdict is Verdict.WAIT
    clock.now += 0.5
    decision = tracker.decide()
    assert decision.verdict is Verdict.FAILURE
    assert "transfer 1 to site did not start" in decision.reason


def test_row_9_counts_from_the_creation_that_was_named(clock: Clock) -> None:
    tracker = ProgressTracker(idle_timeout=IDLE, clock=clock)
    tracker.expect("tx", [("1", "site")], created=clock.now - IDLE + 1)
    assert tracker.decide().until == clock.now + 1


def test_row_8_comes_before_row_9(tracker: ProgressTracker, clock: Clock) -> None:
    """The first pair never began, the second stands still: what began says more about the fault."""
    tracker.update("tx", "2", "site", 1, 10)
    clock.now += IDLE
    assert "transfer 2 to site stalled" in tracker.decide().reason


def test_row_10_otherwise_it_goes_on_until_the_first_pair_is_due(tracker: ProgressTracker, clock: Clock) -> None:
    first = clock.now + IDLE
    clock.now += 100
    tracker.update("tx", "2", "site", 1, 10)
    decision = tracker.decide()
    assert (decision.verdict, decision.until) == (Verdict.WAIT, first)


def test_a_complete_pair_is_not_waited_for(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "1")
    clock.now += IDLE - 1
    tracker.update("tx", "2", "site", 1, 10)
    clock.now += 1
    assert tracker.decide().verdict is Verdict.WAIT


def test_nothing_expected_decides_nothing(clock: Clock) -> None:
    tracker = ProgressTracker(idle_timeout=IDLE, clock=clock)
    clock.now += 10 * IDLE
    assert tracker.decide() == Decision(Verdict.WAIT, "transfers are under way", None)
    assert not tracker.complete


def test_further_pairs_end_the_grace(tracker: ProgressTracker, clock: Clock) -> None:
    finish(tracker, "1", "2")
    tracker.expect("tx", [("3", "site")])
    assert not tracker.grace_running
    clock.now += GRACE
    assert tracker.decide().verdict is Verdict.WAIT


@pytest.mark.parametrize("again", [[], [("1", "site")]])
def test_announcing_nothing_new_leaves_the_grace_alone(
    tracker: ProgressTracker, clock: Clock, again: list[tuple[str, str | None]]
) -> None:
    """Else the decision would wait for something that never comes."""
    finish(tracker, "1", "2")
    tracker.expect("tx", again)
    assert tracker.decide().until == clock.now + GRACE
    clock.now += GRACE
    assert tracker.decide().verdict is Verdict.SUCCESS


# giving up


def test_abandoning_what_is_complete_is_a_success(tracker: ProgressTracker) -> None:
    finish(tracker, "1", "2")
    assert tracker.abandon()
    assert tracker.complete


def test_abandoning_marks_the_open_pairs_and_only_them(tracker: ProgressTracker) -> None:
    tracker.expect("tx", [("3", "site")])
    finish(tracker, "1")
    tracker.update("tx", "2", "site", 1, 10)
    assert not tracker.abandon()
    states = [tracker.state(pair) for pair in tracker.expected]
    assert states == [TransferState.COMPLETED, TransferState.ABORTED, TransferState.ABORTED]
    assert tracker.decide() == Decision(Verdict.FAILURE, "transfer 2 to site aborted")


def test_what_comes_after_abandoning_changes_nothing(tracker: ProgressTracker) -> None:
    tracker.abandon()
    assert tracker.update("tx", "1", "site", 1, 10, state="done") == "the pair has ended"
    assert tracker.decide().verdict is Verdict.FAILURE


def test_what_has_failed_is_no_success_when_it_is_abandoned(clock: Clock) -> None:
    tracker = one(clock)
    finish(tracker, "1", state="failed")
    assert not tracker.abandon()
    assert tracker.decide().reason == "transfer 1 to site failed"


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
        for words, kind in ((COMPLETED, "completed"), (FAILED, "failed"), (ABORTED, "aborted")):
            if word.lower() in words:
                return kind
        return "active"

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
