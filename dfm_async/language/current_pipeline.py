"""Which pipeline is being built in this context. Apart from the builder, so that a site need not load the language."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class CallRecorder(Protocol):
    """Records the calls of operations in the pipeline that is being built."""

    @property
    def mode(self) -> str:
        """``execute`` or ``discovery``."""

    @property
    def call(self) -> Callable[..., Any]:
        """Record a call: its operation, its arguments by name, and its options. Returns its value."""


building: ContextVar[CallRecorder | None] = ContextVar("dfm_async_builder", default=None)


def current_builder() -> CallRecorder | None:
    """Find the pipeline that is being built in this context, if any."""
    return building.get()
