"""The smallest federation there is, by which ``dfm-async doctor`` finds out whether pipelines run here."""

from __future__ import annotations

import os

from dfm_async.federation.federation import Federation
from dfm_async.pipeline.builder import Yield
from dfm_async.pipeline.pipeline import Pipeline

__all__ = ["fed", "pipeline"]

fed = Federation("doctor")
_site = fed.site("probe")


@_site.operation
async def answer() -> int:
    """Tells which process it runs in."""
    return os.getpid()


with Pipeline("probe") as pipeline:
    Yield(answer())
