"""Launchers: how a program outside the federation is started and stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from dfm_async.exchange.task import Task

__all__ = ["Invitation", "Launcher", "ProgramState", "ProgramStatus"]


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


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a program must be given so that it finds its site.

    Attributes:
        environment: variables of its environment.
        cwd: the folder that it must be started in, if that matters.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


class Launcher(Protocol):
    """Starts and stops a program. One task at a time calls it, except :meth:`stop`, which any number may call."""

    @property
    def launch_once(self) -> bool:
        """Whether one process serves many tasks."""
        ...

    @property
    def needs_deferred_stop(self) -> bool:
        """Whether the program may still be serving its result when its task is done, and ends by itself."""
        ...

    async def initialize(self) -> None:
        """Called once, before anything else."""
        ...

    async def launch(self, task: Task, invitation: Invitation) -> None:
        """Starts the program. Raises if that fails."""
        ...

    async def stop(self, *, asked: bool = True) -> None:
        """Stops the program, and everything that it started; returns when it is gone.

        Args:
            asked: whether it was asked to end, and so gets time to do it by itself.
        """
        ...

    async def finalize(self) -> None:
        """Called once, at the end: stops what runs, and frees what is held."""
        ...

    def status(self) -> ProgramStatus:
        """Tells what the program does."""
        ...

    async def ended(self) -> ProgramStatus:
        """Waits until the program that was launched last has ended."""
        ...
