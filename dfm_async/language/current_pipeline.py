"""Which pipeline is being built in this context. Apart from the builder, so that a site need not load the language."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dfm_async.language.builder import Builder

building: ContextVar[Builder | None] = ContextVar("dfm_async_builder", default=None)


def current_builder() -> Builder | None:
    """Find the pipeline that is being built in this context, if any."""
    return building.get()
