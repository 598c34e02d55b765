"""Decides when a result with large parts has arrived. Pure: the clock is given, and nothing waits here.

A result names *transfers*; each *receiver* pulls each of them. The tracker takes reports about these pairs and
decides whether the whole is done, has failed, or goes on, and when to check again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

GRACE: Final = 30.0
"""When all pairs are complete, how long the receiver's confirmation is waited for, in seconds."""


class TransferState(Enum):
    """What a report says about a pair."""

    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"

    @classmethod
    def of(cls, word: str) -> TransferState:
        """Read a word; one that is not known means that the transfer goes on."""
        return _WORDS.get(str(word).lower(), cls.ACTIVE)


_WORDS: Final = {
    **dict.fromkeys(("completed", "complete", "done", "success", "finished"), TransferState.COMPLETED),
    **dict.fromkeys(
        ("failed", "fail", "failure", "error", "exception", "timeout", "deleted"),
        TransferState.FAILED,
    ),
    **dict.fromkeys(("aborted", "abort", "cancelled", "canceled"), TransferState.ABORTED),
}

FINISHED: Final = "finished"
"""The status by which the receiving side confirms that everything has arrived."""


class Verdict(Enum):
    """What a decision says."""

    SUCCESS = "success"
    FAILURE = "failure"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Decision:
    """The state of the whole result.

    Attributes:
        verdict: whether it has arrived, never will, or is in flight.
        reason: why.
        until: when to check again if no report comes before; None if there is nothing to wait for.
    """

    verdict: Verdict
    reason: str = ""
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """One transfer to one receiver, within one transaction."""

    tx: str
    transfer: str
    receiver: str | None


@dataclass(slots=True)
class _Record:
    """What is known of a pair that has begun."""

    task: str
    """As the first accepted report named it."""
    sequence: int
    bytes_done: int
    items_done: int
    state: TransferState
    progressed: float


class ProgressTracker:
    """Takes reports about (transfer, receiver) pairs, and decides.

    Args:
        idle_timeout: how long a pair may take to begin, and how long it may make no progress, in seconds.
        clock: gives the time, in seconds; must never go back.
        grace: how long the receiver's confirmation is waited for when all pairs are complete, in seconds.
    """

    def __init__(self, *, idle_timeout: float, clock: Callable[[], float], grace: float = GRACE) -> None:
        if not 0 < idle_timeout < float("inf"):
            raise ValueError(f"idle_timeout must be a positive number of seconds, not {idle_timeout!r}")
        self._idle = idle_timeout
        self._clock = clock
        self._grace = grace
        self._expected: dict[Pair, float] = {}
        self._records: dict[Pair, _Record] = {}
        self._completed = 0
        self._lost: Pair | None = None
        self._complete_since: float | None = None

    def expect(self, tx: str, pairs: Iterable[tuple[str, str | None]], created: float | None = None) -> None:
        """Announce pairs, before the result is sent."""
        now = self._clock() if created is None else created
        for transfer, receiver in pairs:
            self._expected.setdefault(Pair(tx, transfer, receiver), now)
        if not self.complete:
            self._complete_since = None

    @property
    def expected(self) -> list[Pair]:
        """All pairs, in the order in which they were announced."""
        return list(self._expected)

    def state(self, pair: Pair) -> TransferState | None:
        """Return the state of a pair; None if it has not begun."""
        record = self._records.get(pair)
        return record.state if record is not None else None

    def task(self, pair: Pair) -> str | None:
        """Return the task of a pair, as its first report named it; None if it has not begun."""
        record = self._records.get(pair)
        return record.task if record is not None else None

    def update(
        self,
        tx: str | None,
        transfer: str,
        receiver: str | None,
        sequence: int,
        bytes_done: int,
        items_done: int | None = None,
        state: str = "active",
        *,
        task: str = "",
    ) -> str:
        """Take a report.

        Returns:
            "" if it counts, else why not.
        """
        pair = self._find(tx, transfer, receiver)
        if pair is None:
            return "unexpected pair"
        now = self._clock()
        meaning = TransferState.of(state)
        record = self._records.get(pair)
        if record is None:
            self._records[pair] = _Record(task, sequence, bytes_done, items_done or 0, meaning, now)
            self._note(pair, meaning)
            return ""
        items = record.items_done if items_done is None else items_done
        if record.state is not TransferState.ACTIVE:
            return "the pair has ended"
        if sequence <= record.sequence:
            return "old sequence number"
        if bytes_done < record.bytes_done or items < record.items_done:
            return "progress fell"
        grew = bytes_done > record.bytes_done or items > record.items_done
        record.sequence = sequence
        record.bytes_done = bytes_done
        record.items_done = items
        record.state = meaning
        if grew or meaning is not TransferState.ACTIVE:
            record.progressed = now
        self._note(pair, meaning)
        return ""

    def decide(self, callback_fired: bool = False, callback_status: str | None = None) -> Decision:
        """Return what to do now, by the first rule that applies."""
        if callback_fired:
            if str(callback_status).lower() == FINISHED:
                return Decision(Verdict.SUCCESS, "the receiver confirms that it has everything")
            if self.complete:
                return Decision(Verdict.SUCCESS, "all transfers are complete")
            return Decision(Verdict.FAILURE, f"the receiver ended it: {callback_status}")
        if self._lost is not None:
            return Decision(Verdict.FAILURE, f"{_name(self._lost)} {self._records[self._lost].state.value}")
        now = self._clock()
        if self._complete_since is not None:
            until = self._complete_since + self._grace
            if now >= until:
                return Decision(Verdict.SUCCESS, "all transfers are complete")
            return Decision(Verdict.WAIT, "all transfers are complete: waiting for the receiver's confirmation", until)
        return self._decide_by_time(now)

    def _decide_by_time(self, now: float) -> Decision:
        until: float | None = None
        late: Pair | None = None
        for pair, created in self._expected.items():
            record = self._records.get(pair)
            if record is not None and record.state is not TransferState.ACTIVE:
                continue
            due = (created if record is None else record.progressed) + self._idle
            if now < due:
                until = due if until is None else min(until, due)
            elif record is not None:
                return Decision(Verdict.FAILURE, f"{_name(pair)} stalled: no progress for {self._idle:g} s")
            elif late is None:
                late = pair  # one that has stalled, further on, says more
        if late is not None:
            return Decision(Verdict.FAILURE, f"{_name(late)} did not start within {self._idle:g} s")
        return Decision(Verdict.WAIT, "transfers are in flight", until)

    @property
    def complete(self) -> bool:
        """Whether there are pairs, and all of them are complete."""
        return 0 < len(self._expected) == self._completed

    @property
    def grace_running(self) -> bool:
        """Whether everything is complete and only the receiver's confirmation is waited for."""
        return self._complete_since is not None

    def abandon(self) -> bool:
        """Mark all pairs that are open as aborted.

        Returns:
            Whether there was none, because everything had arrived after all.
        """
        if self.complete:
            return True
        now = self._clock()
        for pair in self._expected:
            record = self._records.get(pair)
            if record is None:
                self._records[pair] = _Record("", 0, 0, 0, TransferState.ABORTED, now)
            elif record.state is TransferState.ACTIVE:
                record.state = TransferState.ABORTED
                record.progressed = now
            else:
                continue
            self._note(pair, TransferState.ABORTED)
        return False

    def _find(self, tx: str | None, transfer: str, receiver: str | None) -> Pair | None:
        if tx is not None:
            pair = Pair(tx, transfer, receiver)
            if pair in self._expected:
                return pair
        found = [pair for pair in self._expected if pair.transfer == transfer and pair.receiver == receiver]
        return found[0] if len(found) == 1 else None

    def _note(self, pair: Pair, state: TransferState) -> None:
        """Keep count, so that a report costs the same however many pairs there are."""
        if state is TransferState.COMPLETED:
            self._completed += 1
            if self.complete:
                self._complete_since = self._clock()
        elif state is not TransferState.ACTIVE and self._lost is None:
            self._lost = pair


def _name(pair: Pair) -> str:
    return f"transfer {pair.transfer} to {pair.receiver or 'its receiver'}"
