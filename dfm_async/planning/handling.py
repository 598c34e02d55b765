"""Which failures are handled: those that become data, so that they are not errors of the job.

A failure is handled if every use of the value that it takes the place of leads to a statement that goes on without it,
such as ``collect(..., errors="skip")``. It is not if a statement that needs the value has no use itself: what that one
was meant to do is not done.
"""

from __future__ import annotations

from collections.abc import Iterator

from dfm_async.language import statements as st
from dfm_async.language.expressions import Ref
from dfm_async.planning.structure import Spot, Structure


class Handling:
    """Finds what is handled in a pipeline."""

    def __init__(self, found: Structure) -> None:
        self._found = found
        self._readers: dict[int, list[tuple[Spot, str, bool]]] = {}
        self._values: dict[int, bool] = {}
        self._blocks: dict[int, bool] = {}
        if not any(_handles(spot.statement) for spot in found.spots.values()):
            return
        for spot in found.spots.values():
            for name, node, inside in _reads(spot):
                self._readers.setdefault(node, []).append((spot, name, inside))
        for key, spot in reversed(found.spots.items()):  # readers before what they read: then nothing recurses deeply
            self._values[key] = self._value(spot)
            if spot.statement.blocks:
                self._blocks[key] = self._block(spot)

    def value(self, statement: int) -> bool:
        """Return whether a failure in the place of a statement's value is handled."""
        return self._values.get(statement, False)

    def block(self, statement: int) -> bool:
        """Return whether a failure is handled that keeps the block of a statement from running."""
        return self._blocks.get(statement, False)

    def _value(self, spot: Spot) -> bool:
        """Return whether all uses of a value handle its failure; inside a loop, its value is that of the iteration."""
        uses = [
            self._use(reader, name)
            for reader, name, inside in self._readers.get(spot.statement.id, ())
            if not self._found.reads_iteration(reader, spot.statement.id, inside)
        ]
        return bool(uses) and all(uses)

    def _use(self, reader: Spot, name: str) -> bool:
        statement = reader.statement
        if _handles(statement):
            return True
        if statement.blocks and name not in statement.reads_inside:
            if statement.id not in self._blocks:
                self._blocks[statement.id] = self._block(reader)
            return self._blocks[statement.id]
        if statement.id not in self._values:  # a block that its own body gives a value
            self._values[statement.id] = self._value(reader)
        return self._values[statement.id]

    def _block(self, spot: Spot) -> bool:
        """Return whether it is handled that nothing of a block runs: nothing of it may be missed after it."""
        block = spot.statement
        inside = {inner.id for body in block.blocks for inner in st.walk_statements(body)}
        uses = [self._value(spot)] if block.has_value and not isinstance(block, st.ForEachStatement) else []
        for node in (*inside, block.id):
            readers = self._readers.get(node, [])
            if node != block.id and not readers:
                return False  # a yield, or something that is done for its own sake
            for reader, name, _ in readers:
                if reader.statement.id in inside or reader is spot:
                    continue
                if isinstance(reader.statement, st.CollectStatement) and self._is_of(reader.statement, block):
                    uses.append(self.value(reader.statement.id))  # it has no elements that it could leave out
                elif node != block.id or not block.has_value:
                    uses.append(self._use(reader, name))
        return bool(uses) and all(uses)

    def _is_of(self, statement: st.CollectStatement, loop: st.Statement) -> bool:
        """Return whether a loop is the one whose values are collected."""
        return loop.is_loop and self._found.scope_of_value(statement.node) == self._found.scope_of_loop(loop.id)


def _handles(statement: st.Statement) -> bool:
    """Return whether a statement goes on without what failed."""
    return isinstance(statement, st.GatherStatement) or (
        isinstance(statement, st.CollectStatement) and statement.errors != "fail"
    )


def _reads(spot: Spot) -> Iterator[tuple[str, int, bool]]:
    """Yield the nodes that a statement reads: the name of its expression, the node, and whether it is read inside."""
    for name, ref, inside in spot.references:
        if isinstance(ref, Ref):
            yield name, ref.node, inside
    if isinstance(spot.statement, st.CollectStatement):
        yield "node", spot.statement.node, False
    elif isinstance(spot.statement, st.ChoiceStatement):
        yield "branch", spot.statement.branch, False
