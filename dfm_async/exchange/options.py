"""Options of both sides, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = ["AgentOptions", "ExecutorOptions"]


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an agent behaves. All times are in seconds."""

    heartbeat_interval: float = 5.0
    """How long the agent says nothing before it gives a sign of life."""
    heartbeat_timeout: float = 60.0
    """How long the site may say nothing before it counts as gone; 0 means for ever. Larger than the interval."""
    resend_interval: float = 2.0
    """How long a message may be unanswered before it is sent again."""
    max_resends: int | None = 3
    """How often a message is sent again; 0 means never, None without end (refused for results with large parts)."""
    submit_result_timeout: float = 60.0
    """How long the site may take to accept a result."""
    streaming_idle_timeout: float = 600.0
    """How long the transfer of a large part may stand still, or take to begin."""
    download_complete_timeout: float = 1800.0
    """How long a result may be on its way where the transport shows no progress (files)."""
    connect_timeout: float = 60.0
    """How long the site may take to answer the agent's hello."""
    launch_once: bool | None = None
    """Whether the program serves many tasks; None means what the site says."""
    metric_queue: int = 1000
    """How many metrics may wait for the site; ``log`` waits when there are more."""

    def __post_init__(self) -> None:
        _check_times(self, ("heartbeat_interval", "resend_interval", "submit_result_timeout"), positive=True)
        _check_times(self, ("streaming_idle_timeout", "download_complete_timeout", "connect_timeout"), positive=True)
        _check_exchange(self)
        if self.launch_once is not None:
            _check_booleans(self, ("launch_once",))
        if not _is_whole(self.metric_queue) or self.metric_queue < 1:
            raise ValueError(f"metric_queue must be a positive whole number, not {self.metric_queue!r}")


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an executor behaves. All times are in seconds."""

    launch_timeout: float | None = None
    """How long a launcher may take to start the program; None means without end."""
    external_pre_init_timeout: float = 60.0
    """How long a started program may take to come up; 0 means without end."""
    peer_read_timeout: float | None = 60.0
    """How long a program that is up may take to accept a task; more while the task's large parts make progress."""
    task_wait_timeout: float | None = None
    """How long a program may take for its result; None means without end."""
    last_result_transfer_timeout: float = 300.0
    """How long a result may still be on its way after the program has ended with exit code 0."""
    heartbeat_interval: float = 5.0
    """How long the executor says nothing before it gives a sign of life."""
    heartbeat_timeout: float = 60.0
    """How long the program may say nothing before it counts as gone; 0 means for ever. Larger than the interval."""
    resend_interval: float = 2.0
    """How long a message may be unanswered before it is sent again."""
    max_resends: int | None = 3
    """How often a message is sent again; 0 means never, None without end (refused for tasks with large parts)."""
    streaming_idle_timeout: float = 600.0
    """How long the transfer of a large part may stand still."""
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
        _check_times(self, ("heartbeat_interval", "resend_interval", "streaming_idle_timeout"), positive=True)
        _check_times(
            self, ("external_pre_init_timeout", "last_result_transfer_timeout", "deferred_stop_timeout"), positive=False
        )
        for name in ("launch_timeout", "peer_read_timeout", "task_wait_timeout"):
            if getattr(self, name) is not None:
                _check_times(self, (name,), positive=True)
        _check_exchange(self)
        _check_booleans(self, ("train_with_evaluation", "end_with_metrics"))
        _check_names(self, ("train_task_name", "evaluate_task_name", "submit_model_task_name"))
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


def _check_times(options: Any, names: Iterable[str], *, positive: bool) -> None:
    for name in names:
        value = getattr(options, name)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < 0 or (positive and value == 0):
            kind = "a positive number" if positive else "zero or a positive number"
            raise ValueError(f"{name} must be {kind} of seconds, not {value!r}")


def _check_booleans(options: Any, names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} must be True or False, not {getattr(options, name)!r}")


def _check_names(options: Any, names: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a name that is not empty, not {value!r}")
        if value in seen:
            raise ValueError(f"{name} must be another name than {seen[value]}, and both are {value!r}")
        seen[value] = name


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_exchange(options: AgentOptions | ExecutorOptions) -> None:
    _check_times(options, ("heartbeat_timeout",), positive=False)
    if 0 < options.heartbeat_timeout <= options.heartbeat_interval:
        raise ValueError(
            f"heartbeat_timeout ({options.heartbeat_timeout:g} s) must be larger than heartbeat_interval "
            f"({options.heartbeat_interval:g} s), or 0 for none"
        )
    resends = options.max_resends
    if resends is not None and (not _is_whole(resends) or resends < 0):
        raise ValueError(f"max_resends must be zero, a positive whole number or None, not {resends!r}")
