"""Measured costs."""

from __future__ import annotations

from dfm_async.model.policies import Cost
from dfm_async.model.resources import SendCost

__all__ = ["Profile"]


class Profile:
    """What real runs cost."""

    def cost(self, site: str, operation: str, provider: str | None) -> Cost | None:
        """What an operation costs at a site."""

    def link(self, source: str, target: str) -> SendCost | None:
        """What sending costs."""
