"""Results in a list."""

from __future__ import annotations

from typing import SupportsIndex, overload

from dfm_async.model.events import Result
from dfm_async.rendering import Shown

__all__ = ["Results"]


class Results(Shown, list[Result]):
    """A list of results. It is a list in every way; notebooks show it as a table."""

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> Result: ...
    @overload
    def __getitem__(self, at: slice, /) -> Results: ...
    def __getitem__(self, at: SupportsIndex | slice, /) -> Result | Results:
        return Results(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)
