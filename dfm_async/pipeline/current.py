"""Which pipeline is being built in this context. Apart from the builder, so that a site need not load the language."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dfm_async.pipeline.builder import Builder

__all__ = ["building", "current_builder"]

building: ContextVar[Builder | None] = ContextVar("dfm_async_builder", default=None)


def current_builder() -> Builder | None:
    """Finds the pipeline that is being built in this context, if any."""
    return building.get()
