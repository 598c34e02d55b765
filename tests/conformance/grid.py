"""A type of an application with a codec. All workers of this process import this module, so it imports little."""

from __future__ import annotations

from typing import Any

from dfm_async import codecs


class Grid:
    """A type of the application."""

    def __init__(self, cells: Any) -> None:
        self.cells = cells


codecs.register(Grid, name="tests.conformance.Grid", encode=lambda grid: grid.cells, decode=Grid)
