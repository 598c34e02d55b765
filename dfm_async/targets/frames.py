"""The parameter sets of one job: those that wait, those under way, and those that have to run again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dfm_async.wire.messages import BATCH_BYTES

__all__ = ["FRAME_WINDOW", "Batch", "FrameLedger", "Row"]

FRAME_WINDOW: Final = 256
"""How many parameter sets are under way at the same time, unless the job says otherwise."""
_WINDOW_BYTES: Final = 64 * 1024 * 1024
"""The same in bytes of their parameters; a single larger set still passes."""

Row = Mapping[str, Any]
"""One parameter set, packed by the codec."""


_NONE: Final[dict[int, Any]] = {}
"""Most jobs keep nothing: one dict that stays empty is enough for all of them."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Parameter sets ``first, first + 1, ...`` to open; ``last``: no more will come."""

    first: int
    rows: list[Row]
    last: bool


class FrameLedger:
    """Counts parameter sets from their arrival to their completion at all locations.

    Args:
        open_frames: the sets that are under way, and how many locations are not done with each; kept up to date.
        locations: how many locations there are.
        window: how many sets may be under way.
        keep_rows: whether the parameters are kept until a set is done, because it may have to run again.
        weigh: tells about how many bytes a set has; 0 if that does not matter.
    """

    __slots__ = (
        "_again",
        "_keep_rows",
        "_locations",
        "_rows",
        "_told_last",
        "_tries",
        "_waiting",
        "_weigh",
        "_weights",
        "_window",
        "added",
        "open",
        "opened",
        "stopped",
    )

    def __init__(
        self,
        open_frames: dict[int, int],
        locations: int,
        window: int,
        keep_rows: bool,
        weigh: Callable[[Row], int],
    ) -> None:
        self.open = open_frames
        self.stopped = False
        """Whether all parameter sets have come."""
        self.added = 0
        """How many parameter sets have come."""
        self.opened = 0
        """How many parameter sets were opened; the next gets this number."""
        self._locations = locations
        self._window = window
        self._keep_rows = keep_rows
        self._weigh = weigh
        self._weights: dict[int, int] = _NONE
        self._waiting: deque[Row] = deque()
        self._again: deque[tuple[int, Row]] | None = None
        self._rows: dict[int, Row] = {} if keep_rows else _NONE
        self._tries: dict[int, int] = {} if keep_rows else _NONE
        self._told_last = False

    @property
    def waiting(self) -> int:
        """How many parameter sets are not opened yet."""
        return len(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether every parameter set is done, and no more will come."""
        return self.stopped and not self._waiting and not self.open

    def add(self, rows: Sequence[Row]) -> None:
        """Takes further parameter sets."""
        self._waiting.extend(rows)
        self.added += len(rows)

    def resume(self, rows: Mapping[int, Row], added: int) -> None:
        """Begins with what an earlier run left over: some sets to run again, of all that had come."""
        self.added = self.opened = added
        self._again = deque((index, rows[index]) for index in sorted(rows))
        for index, row in self._again:
            self.open[index] = self._locations
            self._keep(index, row)

    def take(self, *, allow_new: bool) -> list[Batch]:
        """Opens what can be opened now: sets that run again at once, new ones as far as the window allows."""
        if not self._waiting and not self._again and (self._told_last or not self.stopped):
            return []  # the usual case, when a set is done
        batches: list[Batch] = []
        held_back = len(self._again) if self._again else 0
        room = max(self._window - len(self.open) + held_back, 0) if allow_new else 0
        if self._again:
            for index, row in self._take_again(room):
                room -= 1
                if batches and index == batches[-1].first + len(batches[-1].rows):
                    batches[-1].rows.append(row)
                else:
                    batches.append(Batch(index, [row], False))
        rows = self._take_new(min(room, len(self._waiting))) if not self._again else []
        if rows:
            batches.append(Batch(self.opened, rows, False))
            for index, row in enumerate(rows, self.opened):
                self.open[index] = self._locations
                self._keep(index, row)
            self.opened += len(rows)
        if self._weights:
            batches = [part for batch in batches for part in self._split(batch)]
        if self.stopped and not self._waiting and not self._again and not self._told_last:
            self._told_last = True
            end = batches.pop() if batches else Batch(self.opened, [], True)
            batches.append(Batch(end.first, end.rows, True))
        return batches

    def _split(self, batch: Batch) -> list[Batch]:
        """Split heavy sets into several batches: each is one message to a location."""
        parts: list[Batch] = []
        size = 0
        for index, row in enumerate(batch.rows, batch.first):
            added = self._weights.get(index, 0)
            if not parts or size + added > BATCH_BYTES:
                parts.append(Batch(index, [], False))
                size = 0
            parts[-1].rows.append(row)
            size += added
        return parts

    def _take_new(self, count: int) -> list[Row]:
        """Takes up to so many of those that wait: fewer if they are heavy."""
        rows: list[Row] = []
        for _ in range(count):
            if not self._has_room(self.opened + len(rows), self._waiting[0]):
                break
            rows.append(self._waiting.popleft())
        return rows

    def _take_again(self, count: int) -> list[tuple[int, Row]]:
        """The same of those that run again."""
        found: list[tuple[int, Row]] = []
        again = self._again
        while again and len(found) < count and self._has_room(*again[0]):
            index, row = again.popleft()
            self.open[index] = self._locations
            found.append((index, row))
        return found

    def _has_room(self, index: int, row: Row) -> bool:
        """Whether a set may be opened beside what is under way; one that is too heavy may if nothing else is."""
        size = self._weigh(row)
        if not size:
            return True
        if self._weights and sum(self._weights.values()) + size > _WINDOW_BYTES:
            return False
        if self._weights is _NONE:
            self._weights = {}
        self._weights[index] = size
        return True

    def _keep(self, index: int, row: Row) -> None:
        if self._keep_rows:
            self._rows[index] = row

    def done(self, index: int) -> bool:
        """One more location is done with a set; tells whether all are."""
        left = self.open[index] - 1
        if left:
            self.open[index] = left
            return False
        del self.open[index]
        if self._weights:
            self._weights.pop(index, None)
        if self._keep_rows:
            self._rows.pop(index, None)
            self._tries.pop(index, None)
        return True

    def again(self) -> int:
        """What is under way was lost and has to run again; tells how often the unluckiest set has been lost."""
        self._again = deque((index, self._rows[index]) for index in sorted(self._rows))
        self._weights = _NONE
        self._told_last = False
        for index in self._rows:
            self._tries[index] = self._tries.get(index, 0) + 1
        return max(self._tries.values(), default=1)

    def clear(self) -> None:
        """The job has ended: nothing will be opened any more."""
        self._waiting.clear()
        self._again = None
        if self._keep_rows:
            self._rows.clear()
