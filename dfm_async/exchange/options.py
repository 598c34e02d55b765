"""Options of both sides, checked when they are made."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

from dfm_async.model.checks import Options

_MAY_BE_ZERO: Final = frozenset(
    {
        "heartbeat_timeout",
        "max_resends",
        "external_pre_init_timeout",
        "last_result_transfer_timeout",
        "deferred_stop_timeout",
    }
)
"""All other numbers must be positive."""


class ExchangeOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be set at both sides. All times are in seconds."""

    heartbeat_interval: float = 5.0
    """How long this side sends nothing before it sends a heartbeat."""
    heartbeat_timeout: float = 60.0
    """How long the other side may send nothing before it counts as gone; 0 means for ever. Larger than the interval."""
    resend_interval: float = 2.0
    """How long a message may be unanswered before it is sent again, on transports that can lose messages."""
    max_resends: int | None = 3
    """The number of times it is sent again; 0 for never, None for no limit (refused if there are large parts)."""
    streaming_idle_timeout: float = 600.0
    """How long the transfer of a large part may make no progress, or take to begin."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            _check(name, getattr(self, name), get_args(hint) or (hint,))
        if 0 < self.heartbeat_timeout <= self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout ({self.heartbeat_timeout:g} s) must be larger than heartbeat_interval "
                f"({self.heartbeat_interval:g} s), or 0 for none"
            )


def _check(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    """Raise if a number or a boolean is not one of the allowed ones."""
    if value is None and NoneType in kinds:
        return
    if bool in kinds and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    for kind, what in ((float, "number of seconds"), (int, "whole number")):
        if kind in kinds:
            good = isinstance(value, (int, kind)) and not isinstance(value, bool) and math.isfinite(value)
            zero = name in _MAY_BE_ZERO
            if not good or value < 0 or (value == 0 and not zero):
                allowed = f"{'zero or ' if zero else ''}a positive {what}{' or None' if NoneType in kinds else ''}"
                raise ValueError(f"{name} must be {allowed}, not {value!r}")


class AgentOptions(ExchangeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an agent. All times are in seconds."""

    submit_result_timeout: float = 60.0
    """How long the site may take to accept a result."""
    download_complete_timeout: float = 1800.0
    """How long a result may be in flight where the transport shows no progress (files)."""
    connect_timeout: float = 60.0
    """How long the site may take to answer the agent's hello."""
    launch_once: bool | None = None
    """Whether the program serves many tasks; None means what the site sets."""
    metric_queue: int = 1000
    """How many metrics may wait for the site; ``log`` waits when there are more."""


class ExecutorOptions(ExchangeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an executor. All times are in seconds."""

    launch_timeout: float | None = None
    """How long a launcher may take to start the program; None means without end."""
    external_pre_init_timeout: float = 60.0
    """How long a started program may take to come up; 0 means without end."""
    peer_read_timeout: float | None = 60.0
    """How long a program that is up may take to accept a task; more while the task's large parts make progress."""
    task_wait_timeout: float | None = None
    """How long a program may take for its result; None means without end."""
    last_result_transfer_timeout: float = 300.0
    """How long a result may still be in flight after the program has ended with exit code 0."""
    deferred_stop_timeout: float = 30.0
    """How long a program that has answered its only task may take to end by itself before it is stopped."""
    train_with_evaluation: bool = False
    """Whether the result of a train task must have metrics."""
    train_task_name: str = "train"
    """The name of train tasks."""
    evaluate_task_name: str = "validate"
    """The name of tasks that evaluate; their results must have metrics."""
    submit_model_task_name: str = "submit_model"
    """The name of tasks that ask for a model; their results must have one."""
    other_tasks: tuple[str, ...] = ()
    """Further names that are allowed; ``*`` allows all."""
    end_with_metrics: bool = False
    """Whether the loss of the metric channel ends the task channel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seen: dict[str, str] = {}
        for name in ("train_task_name", "evaluate_task_name", "submit_model_task_name"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a name that is not empty, not {value!r}")
            if value in seen:
                raise ValueError(f"{name} must be another name than {seen[value]}, and both are {value!r}")
            seen[value] = name
        others: object = self.other_tasks
        if not isinstance(others, tuple) or not all(isinstance(name, str) and name for name in others):
            raise TypeError(f"other_tasks must be a tuple of names, not {self.other_tasks!r}")

    def allows(self, name: str) -> bool:
        """Whether tasks of this name are taken."""
        return "*" in self.other_tasks or name in self.task_names

    @property
    def task_names(self) -> tuple[str, ...]:
        """All names that are taken."""
        return (self.train_task_name, self.evaluate_task_name, self.submit_model_task_name, *self.other_tasks)
