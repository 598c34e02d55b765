"""The parameter sets of a job that have not succeeded: in flight, waiting or failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dfm_async.errors import DfmError
from dfm_async.wire.codec import weight

_LIMIT: Final = 64 * 1024 * 1024
"""The number of bytes of the parameter sets of one job that are kept."""
_ROW: Final = 512
"""The approximate size of a small parameter set, in bytes."""


class UnfinishedSets:
    """Keeps the parameter sets of one job until they succeed, so that those that fail can be run again.

    Jobs in a store do not need it: the store has their parameter sets. Sets beyond the limit are not kept; if they
    fail, they are known only by their numbers.
    """

    __slots__ = ("_errors", "_heavy", "_job_error", "_limit", "rows", "size")

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self.rows: dict[int, Mapping[str, Any] | None] = {}
        """The sets by their numbers, packed by the codec; None if a set was not kept."""
        self.size = 0
        """The approximate number of bytes of the sets."""
        self._heavy: dict[int, int] | None = None  # the sizes of those that are not small
        self._errors: dict[int, DfmError] | None = None
        self._job_error: DfmError | None = None

    def add(self, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep sets with the numbers ``first, first + 1, ...``."""
        for index, row in enumerate(rows, first):
            size = weight(*row.values())
            fits = self.size + _ROW + size <= self._limit
            self.rows[index] = row if fits else None
            if fits:
                self.size += _ROW + size
                if size:
                    self._heavy = self._heavy or {}
                    self._heavy[index] = size

    def failed(self, frame: Sequence[int], error: DfmError) -> None:
        """Note an error of a set; one without a frame is an error of all sets that have not succeeded."""
        if not frame:
            self._job_error = self._job_error or error
            return
        if self._errors is None:
            self._errors = {}
        self._errors.setdefault(frame[0], error)

    def completed(self, index: int) -> None:
        """Drop a set that all sites are done with, unless it has failed."""
        if self._job_error is not None or (self._errors is not None and index in self._errors):
            return
        if self.rows.pop(index, None) is not None:
            self.size -= _ROW + (self._heavy.pop(index, 0) if self._heavy else 0)

    def error(self, index: int) -> DfmError | None:
        """Return the first error of a set."""
        return (None if self._errors is None else self._errors.get(index)) or self._job_error

    @property
    def numbers(self) -> list[int]:
        """The numbers of the sets that have not succeeded, also of those that are not kept."""
        return sorted(self.rows.keys() | (self._errors or {}).keys())
