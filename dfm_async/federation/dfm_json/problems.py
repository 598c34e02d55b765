"""What is wrong with a file: everything at once, each with the place in the file."""

from __future__ import annotations

from typing import Final

from dfm_async.errors import PipelineError, Problem

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_STATEMENTS", "Problems", "pointer"]

MAX_BYTES: Final = 64 * 1024 * 1024
"""How large a file may be."""
MAX_DEPTH: Final = 64
"""How deep blocks, values and conditions may be nested, together."""
MAX_STATEMENTS: Final = 100_000
"""How many statements a file may have."""
_SHOWN: Final = 100


def pointer(where: str, key: str | int) -> str:
    """The JSON pointer of a member."""
    return f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"


class Problems:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self._more = 0

    def report(self, where: str, message: str) -> None:
        """Adds a problem; of very many, the first ones are kept."""
        if len(self.found) < _SHOWN:
            self.found.append(Problem(where, message))
        else:
            self._more += 1

    def check(self, pipeline: str | None) -> None:
        """Raises if there are any.

        Raises:
            PipelineError: with all of them.
        """
        if self.found:
            more = [Problem("", f"and {self._more} more")] if self._more else []
            raise PipelineError(pipeline, [*self.found, *more])
