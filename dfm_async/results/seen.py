"""Deduplication: the results of unfinished parameter sets in a log, so that a rerun adds each result once.

A result is identified by its yield and its frame. Frames that differ only in their last number are kept as ranges: a
loop or a generator of a million elements in order takes one range.
"""

from __future__ import annotations

from bisect import bisect_right

from dfm_async.model.ids import Frame


class Seen:
    """The results that were seen, by yield and frame, until their parameter set is done."""

    __slots__ = ("_by_root",)

    def __init__(self) -> None:
        self._by_root: dict[int, dict[tuple[int, Frame], _Ranges]] = {}

    def add(self, point: int, frame: Frame, start: int, count: int) -> list[range]:
        """Add results of a yield, and return which of them are new, as ranges of positions counted from 0.

        ``start`` is the first element's number for elements of an iterator, -1 for a plain value.
        """
        prefix, first = (frame[:-1], frame[-1]) if start < 0 else (frame, start)
        root = self._by_root.setdefault(frame[0], {})
        ranges = root.get((point, prefix))
        if ranges is None:
            ranges = root[point, prefix] = _Ranges()
        return [range(part.start - first, part.stop - first) for part in ranges.add(first, first + count)]

    def forget(self, root: int) -> None:
        """Forget a parameter set that is done: no result of it will come again."""
        self._by_root.pop(root, None)


class _Ranges:
    """A set of whole numbers as sorted ranges that do not touch."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> list[range]:
        """Add a range; return the parts of it that were missing."""
        starts, stops = self._starts, self._stops
        if not stops or start > stops[-1]:
            starts.append(start)
            stops.append(stop)
            return [range(start, stop)]
        if start == stops[-1]:  # the usual case: elements in order
            stops[-1] = stop
            return [range(start, stop)]
        low = bisect_right(stops, start - 1)  # the first that touches it or is after it
        high = bisect_right(starts, stop)  # after the last that touches it
        missing, at = [], start
        for index in range(low, high):
            if at < starts[index]:
                missing.append(range(at, starts[index]))
            at = max(at, stops[index])
        if at < stop:
            missing.append(range(at, stop))
        merged_start = min([start, *starts[low:high][:1]])
        merged_stop = max([stop, *stops[low:high][-1:]])
        starts[low:high] = [merged_start]
        stops[low:high] = [merged_stop]
        return missing
