"""What passes between a site and a program: tasks, results, models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = ["OK", "Model", "Task", "TaskResult", "metrics_of", "new_id", "params_of"]

OK: Final = "OK"
"""The return code of a task that was done."""


def new_id() -> str:
    """An id that nothing else has."""
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
    """What a program answered.

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
        """Whether the program says that it did the task."""
        return self.rc == OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters of a model, and what is known about them.

    Attributes:
        params: names and arrays; None if only metrics are told.
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


def metrics_of(data: Any) -> Any:
    """The metrics in a result; None if there are none."""
    return data.get("metrics") if isinstance(data, Mapping) else getattr(data, "metrics", None)


def params_of(data: Any) -> Any:
    """The model in a result; None if there is none."""
    return data.get("params") if isinstance(data, Mapping) else getattr(data, "params", None)
