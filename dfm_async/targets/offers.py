"""Values that other jobs send to the parameters of one job, until they make whole parameter sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from dfm_async.errors import ParameterError
from dfm_async.targets.frames import Row

__all__ = ["Answer", "Offers"]

Answer: TypeAlias = Callable[[str], None]
"""Is told "" when a value was taken, or why it was not."""

_PARTIAL: Final = 10_000
"""How many parameter sets that come in parts may be incomplete."""


class Offers:
    """Puts values with the same key together, and keeps whole sets until the job has room for them.

    Args:
        job_id: the job that they are for.
        params: the names of its parameters.
        pack_rows: checks and packs parameter sets.
    """

    def __init__(self, job_id: str, params: Sequence[str], pack_rows: Callable[[Any], list[Row]]) -> None:
        self._job_id = job_id
        self._params = params
        self._pack_rows = pack_rows
        self._partial: dict[str, dict[str, Any]] = {}
        self._whole: deque[tuple[Row, Answer]] = deque()

    def __bool__(self) -> bool:
        return bool(self._whole)

    def add(self, place: str, key: str, value: Any, answer: Answer) -> None:
        """Takes a value. The last one of a set is answered when the job takes the set."""
        if place not in self._params:
            known = ", ".join(map(repr, self._params)) or "none"
            answer(f"job {self._job_id} has no parameter {place!r} (it has: {known})")
        elif key not in self._partial and len(self._partial) >= _PARTIAL:
            answer(f"job {self._job_id} has {_PARTIAL:,} incomplete parameter sets already")
        else:
            params = self._partial.setdefault(key, {})
            params[place] = value
            if len(params) < len(self._params):
                answer("")
                return
            del self._partial[key]
            try:
                (row,) = self._pack_rows(params)
            except ParameterError as error:
                answer(str(error))
            else:
                self._whole.append((row, answer))

    def take(self) -> Row:
        """Gives the next whole set to the job, and tells its sender."""
        row, answer = self._whole.popleft()
        answer("")
        return row

    def refuse(self) -> None:
        """The job takes no more."""
        while self._whole:
            self._whole.popleft()[1](f"job {self._job_id} was told to stop, or has ended")
