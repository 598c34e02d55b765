"""The life of one exchange: a task goes out, a result comes back. The same on both sides, and without any I/O."""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["FINAL", "Exchange", "ExchangeState"]


class ExchangeState(Enum):
    """How far an exchange is. *Accepted* never means *transferred*."""

    OFFERED = "offered"
    """The task was sent."""
    ACCEPTED = "accepted"
    """The program has the task."""
    RESULT_OFFERED = "result offered"
    """The program has sent its result, or what names the large parts of it."""
    RESULT_ACCEPTED = "result accepted"
    """The site has that message."""
    TRANSFERRING = "transferring"
    """Receivers pull the large parts."""
    SETTLED = "settled"
    """Everything has arrived everywhere."""
    REJECTED = "rejected"
    """One side refused the task or the result."""
    FAILED = "failed"
    """It cannot be completed."""
    ABORTED = "aborted"
    """One side gave up."""

    # There is one object per state. The hash of Enum is that of the name, by a function that is called for every look
    # into a table: a dozen times per task and side.
    __hash__ = object.__hash__


_S = ExchangeState

_ORDER: Final = (
    _S.OFFERED,
    _S.ACCEPTED,
    _S.RESULT_OFFERED,
    _S.RESULT_ACCEPTED,
    _S.TRANSFERRING,
    _S.SETTLED,
)
_RANK: Final = {state: rank for rank, state in enumerate(_ORDER)}

FINAL: Final = frozenset({_S.SETTLED, _S.REJECTED, _S.FAILED, _S.ABORTED})
"""The states that are not left again."""

_NEXT: Final = {
    _S.OFFERED: frozenset({_S.ACCEPTED, _S.REJECTED}),
    _S.ACCEPTED: frozenset({_S.RESULT_OFFERED}),
    _S.RESULT_OFFERED: frozenset({_S.RESULT_ACCEPTED, _S.REJECTED}),
    # A result without large parts is settled as soon as it is accepted.
    _S.RESULT_ACCEPTED: frozenset({_S.TRANSFERRING, _S.SETTLED, _S.REJECTED}),
    _S.TRANSFERRING: frozenset({_S.SETTLED, _S.REJECTED}),
}
_ALWAYS: Final = frozenset({_S.FAILED, _S.ABORTED})


class Exchange:
    """Where one exchange stands, and why.

    Args:
        task: the id of the task.

    Attributes:
        task: the id of the task.
        state: how far it is.
        reason: why it is in that state, if it ended other than settled.
    """

    __slots__ = ("reason", "state", "task")

    def __init__(self, task: str) -> None:
        self.task = task
        self.state = ExchangeState.OFFERED
        self.reason = ""

    @property
    def ended(self) -> bool:
        """Whether nothing can change any more."""
        return self.state in FINAL

    def has(self, state: ExchangeState) -> bool:
        """Whether a state has been reached: this one, or one that only comes after it."""
        if self.state is state:
            return True
        return self.state in _RANK and state in _RANK and _RANK[self.state] > _RANK[state]

    def advance(self, state: ExchangeState, reason: str = "") -> bool:
        """Goes on to another state.

        Returns:
            False if there is nothing to do: the state was reached before (a message came twice), or all is over.

        Raises:
            ValueError: the state does not follow from where the exchange is.
        """
        if self.ended or self.has(state):
            return False
        if state not in _ALWAYS and state not in _NEXT[self.state]:
            raise ValueError(f"an exchange that is {self.state.value} cannot become {state.value}")
        self.state = state
        self.reason = reason
        return True

    def __repr__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"<Exchange {self.task} {self.state.value}{why}>"
