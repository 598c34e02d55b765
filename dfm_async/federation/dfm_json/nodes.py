"""The nodes of a file: their numbers, and which of them a statement may refer to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from dfm_async.federation.dfm_json.names import FOR_EACH, IF, WRITE_TO_CACHE, YIELD
from dfm_async.federation.dfm_json.problems import Problems
from dfm_async.federation.dfm_json.values import Ident

__all__ = ["Nodes", "Path"]

Path: TypeAlias = tuple[Ident, ...]
"""The blocks around a statement, from the outside in."""

_VALUELESS = frozenset({YIELD, IF, WRITE_TO_CACHE})
_UNUSUAL = 2**53  # larger numbers are not the same number in every reader of JSON


@dataclass(frozen=True, slots=True)
class _Node:
    kind: str
    path: Path
    waits: tuple[int, ...]
    """The nodes that are done when it is; for a Yield, which has no value itself."""


class Nodes:
    """Knows the nodes of a file while it is read, from the top to the bottom.

    Args:
        idents: the ids of all statements. Integers stay what they are; names get numbers behind them.
        problems: where to report what is wrong.
    """

    def __init__(self, idents: Iterable[Ident], problems: Problems) -> None:
        self._problems = problems
        listed = list(idents)
        usual = {ident for ident in listed if isinstance(ident, int) and 0 <= ident < _UNUSUAL}
        self._numbers: dict[Ident, int] = {ident: ident for ident in usual}
        following = max(usual, default=-1)
        for ident in listed:
            if ident not in self._numbers:
                following += 1
                self._numbers[ident] = following
        self._read: dict[Ident, _Node] = {}

    def number(self, ident: Ident) -> int:
        """The number of a node of the file."""
        return self._numbers[ident]

    def define(self, ident: Ident | None, kind: str, path: Path, where: str, waits: tuple[int, ...] = ()) -> None:
        """Says that a statement was read, so that those behind it and inside it can refer to it."""
        if ident is None:
            return
        if ident in self._read:
            self._problems.report(where, f"the node id {ident!r} is used twice")
        self._read[ident] = _Node(kind, path, waits)

    def value(self, path: Path, ident: Ident, where: str) -> int | None:
        """Finds a node whose value is read by a statement of a block; reports if it cannot be."""
        node = self._visible(path, ident, where)
        if node is None:
            return None
        if node.kind in _VALUELESS:
            self._problems.report(where, f"refers to node {ident!r}, a {node.kind}, which has no value")
        elif ident in path and node.kind != FOR_EACH:
            self._problems.report(where, f"refers to node {ident!r}, whose block it stands in")
        elif ident not in path and node.kind == FOR_EACH:
            self._problems.report(where, f"refers to the element of loop {ident!r} outside that loop")
        return self._numbers[ident]

    def order(self, path: Path, ident: Ident, where: str) -> tuple[int, ...]:
        """Finds the nodes that a statement of a block waits for; reports if it cannot.

        Whoever waits for a Yield waits for what it sends.
        """
        node = self._visible(path, ident, where)
        if node is None:
            return ()
        if ident in path:
            self._problems.report(where, f"waits for node {ident!r}, whose block it stands in")
        elif node.kind in (IF, FOR_EACH, WRITE_TO_CACHE):
            self._problems.report(where, f"waits for node {ident!r}, a {node.kind}; name an operation instead")
        elif node.kind == YIELD:
            return node.waits
        return (self._numbers[ident],)

    def _visible(self, path: Path, ident: Ident, where: str) -> _Node | None:
        if ident not in self._numbers:
            self._problems.report(where, f"refers to node {ident!r}, which does not exist")
            return None
        node = self._read.get(ident)
        if node is None:
            self._problems.report(where, f"refers to node {ident!r}, which stands later; use what is defined before")
            return None
        if path[: len(node.path)] != node.path:
            self._problems.report(where, f"refers to node {ident!r}, which is inside another block")
            return None
        return node
