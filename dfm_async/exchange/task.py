"""What passes between a site and a program, tasks, results and models, and the states of such an exchange. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal

OK: Final = "OK"
"""The return code of a task that was done."""


def new_id() -> str:
    """Return a new unique id."""
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True)
class Task:
    """Work for a program.

    Attributes:
        name: what to do: ``train``, ``validate``, ``submit_model``, or another name that both sides know.
        data: what to do it with; a :class:`Model` for federated training.
        id: names the task; every message about it carries this.
        round: the current round of a training.
        total_rounds: how many rounds there will be.
    """

    name: str
    data: Any = None
    id: str = field(default_factory=new_id, kw_only=True)
    round: int | None = field(default=None, kw_only=True)
    total_rounds: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"a task's name must be a string that is not empty, not {self.name!r}")
        if not isinstance(self.id, str) or not self.id or "." in self.id or "/" in self.id:
            raise ValueError(f"a task's id must be a string without dots and slashes, not {self.id!r}")
        for name in ("round", "total_rounds"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"a task's {name} must be a whole number or None, not {value!r}")

    def __str__(self) -> str:
        return f"{self.name} {self.id}"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task.

    Attributes:
        data: the answer; a :class:`Model` for federated training.
        rc: the program's return code, as it gave it.
        task: the id of the task.
        reason: why the return code is not ``OK``.
    """

    data: Any = None
    rc: str = field(default=OK, kw_only=True)
    task: str = field(default="", kw_only=True)
    reason: str = field(default="", kw_only=True)

    @property
    def ok(self) -> bool:
        """Whether the program reports success."""
        return self.rc == OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters of a model, and what is known about them.

    Attributes:
        params: names and arrays; None if there are only metrics.
        metrics: names and numbers, as measured with the parameters that the task brought.
        params_type: whether ``params`` are the parameters themselves, or what has changed.
        meta: anything else that both sides know.
    """

    params: Any = None
    metrics: Mapping[str, Any] | None = None
    params_type: Literal["FULL", "DIFF"] = "FULL"
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.params_type not in ("FULL", "DIFF"):
            raise ValueError(f"params_type must be 'FULL' or 'DIFF', not {self.params_type!r}")


# the states of a program and of an exchange


class ProgramState(Enum):
    """What a program does."""

    NOT_RUNNING = "not running"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProgramStatus:
    """What a launcher knows of its program.

    Attributes:
        state: whether it runs, and how it ended.
        exit_code: its exit code, if it has ended; negative for a signal.
        lines: the last lines that it wrote.
    """

    state: ProgramState
    exit_code: int | None = None
    lines: tuple[str, ...] = ()


class ExchangeState(Enum):
    """The state of an exchange. *Accepted* never means *transferred*."""

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
    """One side aborted it."""

    # There is one object per state. The hash of Enum is that of the name, by a Python function that every lookup calls:
    # a dozen times per task and side.
    __hash__ = object.__hash__


_S = ExchangeState

FINAL: Final = frozenset({_S.SETTLED, _S.REJECTED, _S.FAILED, _S.ABORTED})
"""The states that are not left again."""

_RANK: Final = {state: rank for rank, state in enumerate(_S) if state is _S.SETTLED or state not in FINAL}
"""The order of the states of an exchange that succeeds."""
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
    """The state of one exchange, and its reason.

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
        """Whether nothing can change any longer."""
        return self.state in FINAL

    def has(self, state: ExchangeState) -> bool:
        """Whether a state has been reached: this one, or one that only comes after it."""
        if self.state is state:
            return True
        return self.state in _RANK and state in _RANK and _RANK[self.state] > _RANK[state]

    def advance(self, state: ExchangeState, reason: str = "") -> bool:
        """Advance to another state.

        Returns:
            False if there is nothing to do: the state was reached before (a message came twice), or a final one was.

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
