"""The parameter sets of one job: from other jobs, waiting, in flight, and those that have to run again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from dfm_async.errors import ParameterError
from dfm_async.wire.messages import BATCH_BYTES

_WINDOW_BYTES: Final = 64 * 1024 * 1024
"""The largest size of the parameters of all sets in flight; a single larger set still passes."""
_PARTIAL: Final = 10_000
"""The largest number of incomplete parameter sets that come in parts."""

Row = Mapping[str, Any]
"""One parameter set, packed by the codec."""

Answer: TypeAlias = Callable[[str], None]
"""Is called with "" when a value was taken, or with the reason why it was not."""

_NONE: Final[dict[int, Any]] = {}
"""Most jobs keep nothing: one dict that stays empty is enough for all of them."""


class FrameBatch(msgspec.Struct, frozen=True, gc=False):
    """Parameter sets ``first, first + 1, ...`` to open; ``last``: no more will come."""

    first: int
    rows: list[Row]
    last: bool


class FrameLedger:
    """Counts parameter sets from their arrival to their completion at all locations.

    Args:
        open_frames: the sets that are in flight, and how many locations are not done with each; kept up to date.
        locations: how many locations there are.
        window: how many sets may be in flight.
        keep_rows: whether the parameters are kept until a set is done, because it may have to run again.
        weigh: returns the approximate size of a set in bytes; 0 if it does not matter.
        contained: the locations that may be lost without the job, and those that call them.
    """

    __slots__ = (
        "_keep_rows",
        "_last_taken",
        "_locations",
        "_reported",
        "_reporting",
        "_requeued",
        "_rows",
        "_tries",
        "_waiting",
        "_weigh",
        "_weights",
        "_window",
        "added",
        "open",
        "opened",
        "stopped",
        "unwritten",
    )

    def __init__(
        self,
        open_frames: dict[int, int],
        locations: int,
        window: int,
        keep_rows: bool,
        weigh: Callable[[Row], int],
        contained: Mapping[int, int] = _NONE,
    ) -> None:
        self.open = open_frames
        self.stopped = False
        """Whether all parameter sets have come."""
        self.added = 0
        """How many parameter sets have come."""
        self.opened = 0
        """How many parameter sets were opened; the next gets this number."""
        self.unwritten = 0
        """How many of the newest sets are not in the store yet: they are not opened."""
        self._locations = locations
        self._window = window
        self._keep_rows = keep_rows
        self._weigh = weigh
        self._weights: dict[int, int] = _NONE
        self._waiting: deque[Row] = deque()
        self._requeued: deque[tuple[int, Row]] | None = None
        self._rows: dict[int, Row] = {} if keep_rows else _NONE
        self._tries: dict[int, int] = {} if keep_rows else _NONE
        self._last_taken = False
        self._reporting = (*contained, *contained.values())
        self._reported: dict[int, set[int]] = {} if contained else _NONE
        """For the sets in flight, which of the contained locations are done, and of those that call them."""

    @property
    def waiting(self) -> int:
        """How many parameter sets are not opened yet."""
        return len(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether every parameter set is done, and no more will come."""
        return self.stopped and not self._waiting and not self.open

    def add(self, rows: Sequence[Row]) -> None:
        """Take further parameter sets."""
        self._waiting.extend(rows)
        self.added += len(rows)

    def resume(self, rows: Mapping[int, Row], added: int) -> None:
        """Begin with what an earlier run left over: some sets to run again, of all that had come."""
        self.added = self.opened = added
        self._requeued = deque((index, rows[index]) for index in sorted(rows))
        for index, _ in self._requeued:
            self.open[index] = self._locations
        if self._keep_rows:
            self._rows.update(rows)

    def take(self, *, allow_new: bool) -> list[FrameBatch]:
        """Open what can be opened now: sets that run again at once, new ones as far as the window allows."""
        if not self._waiting and not self._requeued and (self._last_taken or not self.stopped):
            return []  # the usual case, when a set is done
        batches: list[FrameBatch] = []
        held_back = len(self._requeued) if self._requeued else 0
        room = max(self._window - len(self.open) + held_back, 0) if allow_new else 0
        if self._requeued:
            for index, row in self._take_requeued(room):
                room -= 1
                if batches and index == batches[-1].first + len(batches[-1].rows):
                    batches[-1].rows.append(row)
                else:
                    batches.append(FrameBatch(index, [row], False))
        rows = self._take_new(min(room, len(self._waiting) - self.unwritten)) if not self._requeued else []
        if rows:
            batches.append(FrameBatch(self.opened, rows, False))
            for index in range(self.opened, self.opened + len(rows)):
                self.open[index] = self._locations
            if self._keep_rows:
                self._rows.update(enumerate(rows, self.opened))
            self.opened += len(rows)
        if self._weights:
            batches = [part for batch in batches for part in self._split(batch)]
        if self.stopped and not self._waiting and not self._requeued and not self._last_taken:
            self._last_taken = True
            end = batches.pop() if batches else FrameBatch(self.opened, [], True)
            batches.append(FrameBatch(end.first, end.rows, True))
        return batches

    def _split(self, batch: FrameBatch) -> list[FrameBatch]:
        """Split heavy sets into several batches: each is one message to a location."""
        parts: list[FrameBatch] = []
        size = 0
        for index, row in enumerate(batch.rows, batch.first):
            added = self._weights.get(index, 0)
            if not parts or size + added > BATCH_BYTES:
                parts.append(FrameBatch(index, [], False))
                size = 0
            parts[-1].rows.append(row)
            size += added
        return parts

    def _take_new(self, count: int) -> list[Row]:
        """Take at most this many of the waiting sets: fewer if they are heavy."""
        rows: list[Row] = []
        for _ in range(count):
            if not self._has_room(self.opened + len(rows), self._waiting[0]):
                break
            rows.append(self._waiting.popleft())
        return rows

    def _take_requeued(self, count: int) -> list[tuple[int, Row]]:
        """Take at most this many of the sets that run again."""
        found: list[tuple[int, Row]] = []
        requeued = self._requeued
        while requeued and len(found) < count and self._has_room(*requeued[0]):
            index, row = requeued.popleft()
            self.open[index] = self._locations
            found.append((index, row))
        return found

    def _has_room(self, index: int, row: Row) -> bool:
        """Return whether a set may be opened beside what is in flight; one that is too heavy may if nothing else is."""
        size = self._weigh(row)
        if not size:
            return True
        if self._weights and sum(self._weights.values()) + size > _WINDOW_BYTES:
            return False
        if self._weights is _NONE:
            self._weights = {}
        self._weights[index] = size
        return True

    def done(self, index: int, at: int = -1) -> bool:
        """Note that one more location is done with a set; return whether all are."""
        if at in self._reporting:
            reported = self._reported.setdefault(index, set()) if index in self.open else {at}
            if at in reported:
                return False  # its caller has reported the same
            reported.add(at)
        left = self.open[index] - 1
        if left:
            self.open[index] = left
            return False
        del self.open[index]
        if self._reporting:
            self._reported.pop(index, None)
        if self._weights:
            self._weights.pop(index, None)
        if self._keep_rows:
            self._rows.pop(index, None)
            self._tries.pop(index, None)
        return True

    def reopen(self, at: int, caller: int) -> list[int]:
        """Note that a contained location was lost, and that what it has done may not have reached its caller.

        Returns:
            the sets that the caller is done with, so that nothing is left to do for them.
        """
        held_back, over = self._held_back, []
        for index in sorted(self.open):
            reported = self._reported.get(index, set())
            if caller in reported:
                over.append(index)
            elif at in reported and index not in held_back:
                reported.discard(at)
                self.open[index] += 1
        return over

    def over_for(self, at: int) -> bool:
        """Return whether a contained location is done with all sets that there will be."""
        return self._last_taken and all(at in self._reported.get(index, ()) for index in self.open)

    def taken_by(self, at: int) -> list[FrameBatch]:
        """Return the sets in flight that a contained location is not done with, as they were opened."""
        batches: list[FrameBatch] = []
        held_back = self._held_back
        for index in sorted(self.open):
            if index in held_back or at in self._reported.get(index, ()):
                continue
            if batches and index == batches[-1].first + len(batches[-1].rows):
                batches[-1].rows.append(self._rows[index])
            else:
                batches.append(FrameBatch(index, [self._rows[index]], False))
        if self._last_taken:
            end = batches.pop() if batches else FrameBatch(self.opened, [], False)
            batches.append(FrameBatch(end.first, end.rows, True))
        return batches

    @property
    def _held_back(self) -> set[int]:
        """The sets that run again, and are not opened yet."""
        return {index for index, _ in self._requeued} if self._requeued else set()

    def requeue(self) -> int:
        """Requeue the sets in flight, which are lost; return the largest number of times that one set was lost."""
        self._requeued = deque((index, self._rows[index]) for index in sorted(self._rows))
        self._weights = _NONE
        self._last_taken = False
        if self._reporting:
            self._reported.clear()
        for index in self._rows:
            self._tries[index] = self._tries.get(index, 0) + 1
        return max(self._tries.values(), default=1)

    def clear(self) -> None:
        """Note that the job has ended: nothing will be opened any longer."""
        self._waiting.clear()
        self._requeued = None
        if self._keep_rows:
            self._rows.clear()


class IncomingSets:
    """Combine values that other jobs send into parameter sets, and keep whole sets until the job has room for them.

    ``pack_rows`` checks and packs a whole set.
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
        """Take a value. The last one of a set is answered when the job takes the set."""
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
        """Pass the next whole set to the job, and answer its sender."""
        row, answer = self._whole.popleft()
        answer("")
        return row

    def refuse(self) -> None:
        """Refuse all sets that wait: the job takes no more."""
        while self._whole:
            self._whole.popleft()[1](
                f"job {self._job_id} accepts no further parameter sets: its input was stopped, or it has ended"
            )
