"""What ``after=`` asks of streams: which calls have to report their end, and which streams have to run ahead.

A statement that is ordered after a stream waits for its end, and a stream ends because its readers read it. If one of
the readers needs what is ordered after the stream, neither could go on: such a stream runs to its end by itself, and
its elements are kept for its readers. The same holds for readers of several streams that wait for each other's ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from dfm_async.language.expressions import Ref
from dfm_async.language.statements import (
    CacheStatement,
    CallStatement,
    CollectStatement,
    ForEachStatement,
    walk_statements,
)
from dfm_async.planning.structure import Spot, Structure


def followed_calls(found: Structure, streams: Callable[[str], bool]) -> dict[int, bool]:
    """Return the calls that something is ordered after, and for each whether its stream has to run ahead."""
    calls: dict[int, bool] = {}
    for spot in found.spots.values():
        for node in _after(spot):
            if isinstance(found.spots[node].statement, CallStatement):
                calls[node] = False
    if calls:
        order = _StatementOrder(found, streams)
        for node in calls:
            calls[node] = order.runs_ahead(node)
    return calls


def _after(spot: Spot) -> list[int]:
    """Return the nodes whose ends a statement waits for; not those that it reads: what it reads cannot have ended."""
    if not spot.statement.after:
        return []
    read = {ref.node for _, ref, _ in spot.references if isinstance(ref, Ref)}
    return [node for node in spot.statement.after if node not in read]


@dataclass(slots=True)
class _StatementOrder:
    """Who needs whom in a pipeline."""

    found: Structure
    streams: Callable[[str], bool]
    readers: dict[int, list[int]] = field(default_factory=dict)
    """The statements that read each node."""
    followers: dict[int, list[int]] = field(default_factory=dict)
    """The statements that are ordered after each node."""

    def __post_init__(self) -> None:
        for key, spot in self.found.spots.items():
            for _, ref, _ in spot.references:
                if isinstance(ref, Ref):
                    self.readers.setdefault(ref.node, []).append(key)
            for node in _after(spot):
                self.followers.setdefault(node, []).append(key)
            if isinstance(spot.statement, CollectStatement):
                target = self.found.spots[spot.statement.node]
                inside = isinstance(target.statement, ForEachStatement)
                loop = spot.statement.node if inside else self.found.loops[target.scope - 1]
                self.readers.setdefault(loop, []).append(key)

    def runs_ahead(self, node: int) -> bool:
        """Return whether one of the statements that a stream ends by needs one that waits for its end."""
        statement = self.found.spots[node].statement
        assert isinstance(statement, CallStatement)  # noqa: S101 - only calls are asked about
        if node not in self.readers or not self.streams(statement.operation):
            return False
        drivers: set[int] = set()
        waiting: set[int] = set()
        # Side by side: if they meet, they mostly do so soon.
        for driver, follower in zip_longest(self._drivers(node), self._waiting(node)):
            if driver is not None:
                drivers.add(driver)
            if follower is not None:
                waiting.add(follower)
            if driver in waiting or follower in drivers:
                return True
        return False

    def _drivers(self, node: int) -> Iterator[int]:
        """Yield the statements that have to go on, so that a stream comes to its end."""
        return _reachable(self.readers[node], self._read_for)

    def _read_for(self, key: int) -> Iterable[int]:
        """Return the statements that have to go on, so that a reader of a stream does."""
        statement = self.found.spots[key].statement
        if isinstance(statement, CallStatement) and self.streams(statement.operation):
            return self.readers.get(key, ())
        if isinstance(statement, ForEachStatement):
            return [inner.id for inner in walk_statements(statement.body)]
        return ()

    def _waiting(self, node: int) -> Iterator[int]:
        """Yield the statements that do not run before a stream has ended."""
        around = {block for block, _ in self.found.spots[node].path}
        return _reachable(self.followers[node], lambda key: self._dependents(key, around))

    def _dependents(self, key: int, around: set[int]) -> Iterator[int]:
        spot = self.found.spots[key]
        yield from self.readers.get(key, ())
        yield from self.followers.get(key, ())
        for stream in _reachable(self._streams_read(key), self._streams_read):
            # A stream does not end before its reader has read it, nor do the streams that it is made of.
            yield from self.followers.get(stream, ())
        for inner in walk_statements((spot.statement,)):  # a block waits as a whole
            yield inner.id
        for block, _ in spot.path:
            # A loop goes on when all of its body is done with an element; a cache asks when its body can run.
            outer = self.found.spots[block].statement
            if block not in around and (outer.is_loop or isinstance(outer, CacheStatement)):
                yield block

    def _streams_read(self, key: int) -> Iterator[int]:
        """Yield the calls whose streams a statement reads."""
        for _, ref, _ in self.found.spots[key].references:
            if isinstance(ref, Ref):
                statement = self.found.spots[ref.node].statement
                if isinstance(statement, CallStatement) and self.streams(statement.operation):
                    yield ref.node


def _reachable(first: Iterable[int], following: Callable[[int], Iterable[int]]) -> Iterator[int]:
    seen: set[int] = set()
    pending = deque(first)
    while pending:
        key = pending.popleft()
        if key not in seen:
            seen.add(key)
            yield key
            pending.extend(following(key))
