"""Which calls a fork of a job runs again: one of a node, or all of them, and everything that depends on them.

Statements depend on those whose values they need, on those that they wait for, and on what decides whether their block
runs. A block has two sides: what its body sees of it (an element, the value of a round) and what others see of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from dfm_async.errors import ParameterError
from dfm_async.model.ids import Frame
from dfm_async.planning.plan import NodePlan

_REPEAT: Final = "repeat"
_LOOPS: Final = frozenset({"for_each", _REPEAT})

_Side: TypeAlias = tuple[int, bool]
"""A statement, and whether its body sees it."""


class ForkedCalls:
    """The calls of a job before and after the point that a fork begins at.

    Args:
        nodes: the statements of its plan.
        name: the node, such as ``train#0``; the name of the operation will do if only one node calls it.
        frame: the call of the node: a parameter set, and the numbers of its iterations of the loops around it. If the
            last ones are missing, the fork begins at all these calls.

    Raises:
        ParameterError: there is no such node, or it cannot have such a frame.
    """

    def __init__(self, nodes: Sequence[NodePlan], name: str, frame: Frame) -> None:
        self._nodes = {node.id: node for node in nodes}
        self._labels = {node.label: node for node in nodes}
        self._first = _named(nodes, name)
        self._frame = frame
        self._loops = self._loops_of(self._first)
        if len(frame) > 1 + len(self._loops):
            loops = "".join(f", and its iteration of {self._nodes[loop].label}" for loop in self._loops)
            message = f"a frame of {self.label} is the number of a parameter set{loops}, not {list(frame)}"
            raise ParameterError([message])
        self._after: set[int] = set()
        """The statements that depend on the node, in the same iterations of the loops around it."""
        self._repeated: set[int] = set()
        """The loops around the node whose next rounds depend on it."""
        self._find_dependents()

    @property
    def label(self) -> str:
        """The node that the fork begins at."""
        return self._first.label

    def is_kept(self, label: str, frame: Frame) -> bool:
        """Return whether the value of a call is used again, by its node and its frame."""
        node = self._labels.get(label)
        if node is None:
            return False
        for at, loop in enumerate(self._shared(node), 1):
            begin = self._frame[at] if at < len(self._frame) else None
            if begin is None:
                if frame[at] > 0 and loop in self._repeated:
                    return False
            elif frame[at] != begin:
                return frame[at] < begin or loop not in self._repeated
        return node.id not in self._after

    @property
    def kept(self) -> Iterator[NodePlan]:
        """The calls of which no value depends on the node."""
        for node in self._nodes.values():
            if node.kind == "call" and node.id not in self._after and self._repeated.isdisjoint(self._shared(node)):
                yield node

    def _blocks_of(self, node: NodePlan) -> list[int]:
        """Return the blocks around a statement, from the outside in."""
        found = []
        block = node.block
        while block is not None:
            found.append(block)
            block = self._nodes[block].block
        return found[::-1]

    def _loops_of(self, node: NodePlan) -> list[int]:
        return [block for block in self._blocks_of(node) if self._nodes[block].kind in _LOOPS]

    def _shared(self, node: NodePlan) -> list[int]:
        """Return the loops that a statement and the node are in, from the outside in."""
        mine = set(self._loops_of(node))
        return [loop for loop in self._loops if loop in mine]

    def _find_dependents(self) -> None:
        edges = self._edges()
        found = _reached([(self._first.id, False), (self._first.id, True)], edges)
        for loop in reversed(self._loops):
            node = self._nodes[loop]
            if node.kind != _REPEAT or found.isdisjoint((given, False) for given in node.returns):
                continue
            self._repeated.add(loop)
            inside = {inner.id for inner in self._nodes.values() if loop in self._blocks_of(inner)}
            # What others see of the next rounds: what they collect, and the value of the last one.
            outside = [side for inner in inside for side in edges[inner, False] if side[0] not in inside | {loop}]
            found |= _reached([*outside, (loop, False)], edges)
        self._after = {node for node, _ in found}

    def _edges(self) -> dict[_Side, list[_Side]]:
        """Return what depends on each side of each statement, within one iteration of the loops around the node."""
        edges: dict[_Side, list[_Side]] = defaultdict(list)
        around = set(self._loops)
        for node in self._nodes.values():
            blocks = set(self._blocks_of(node))
            edges[node.id, True].append((node.id, False))
            if node.block is not None:
                edges[node.block, True].append((node.id, True))
            for given in (*node.inputs, *node.after):
                if given not in self._nodes:
                    continue
                edges[given, given in blocks].append((node.id, False))
                returned = node.id in self._blocks_of(self._nodes[given])
                if not returned or (node.kind == _REPEAT and node.id not in around):
                    edges[given, given in blocks].append((node.id, True))
        return edges


def _reached(start: Sequence[_Side], edges: dict[_Side, list[_Side]]) -> set[_Side]:
    found = set(start)
    left = deque(found)
    while left:
        for side in edges[left.popleft()]:
            if side not in found:
                found.add(side)
                left.append(side)
    return found


def _named(nodes: Sequence[NodePlan], name: str) -> NodePlan:
    calls = [node for node in nodes if node.kind == "call"]
    found = [node for node in calls if node.label == name] or [
        node for node in calls if node.label.rpartition("#")[0] == name
    ]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(node.label for node in calls) or "none"
    problem = f"the pipeline has several calls of {name!r}" if found else f"the pipeline has no call {name!r}"
    raise ParameterError([f"{problem}; its calls are: {listed}"])
