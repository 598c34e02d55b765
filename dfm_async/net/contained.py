"""What a location knows of another one that it calls, and that can be lost without the job."""

from __future__ import annotations

import msgspec

from dfm_async.model.ids import Frame
from dfm_async.net import spec
from dfm_async.net.compiled_net import CompiledNet, Evaluate, compile_formula
from dfm_async.net.game_state import Instance


class ContainedCallCode(msgspec.Struct, eq=False):
    """A call of the other location. ``loops``: how many loops are around it."""

    spec: spec.ContainedCall
    depth: int
    fallback: Evaluate | None
    local: bool = False
    """Whether the location itself reads its output."""


class ContainedLocation:
    """Another location whose loss can be contained."""

    def __init__(self, found: spec.Contained, program: CompiledNet) -> None:
        self.number = found.location
        self.site = program.net.locations[found.location].site
        self.params = frozenset(found.params)
        self.calls: dict[int, list[ContainedCallCode]] = {}
        """By scope."""
        self.made: dict[int, ContainedCallCode] = {}
        """By output."""
        self.readers: dict[int, list[ContainedCallCode]] = {}
        """By input."""
        self.inputs: dict[int, list[int]] = {}
        """By scope: the places of the caller that the location reads."""
        self.loops: dict[int, list[int]] = {}
        """By scope: the loops in it that the location takes part in."""
        self.lost = 0
        """How often it was lost."""
        self.clocks: set[tuple[Frame, int]] = set()
        """The calls that have waited for a worker since it was lost for the last time, and have a limit."""
        for call in found.calls:
            fallback = None if call.fallback is None else compile_formula(call.fallback, program.net.literals)
            code = ContainedCallCode(call, len(program.scopes[call.scope].path), fallback)
            self.calls.setdefault(call.scope, []).append(code)
            self.made[call.output] = code
            if call.ended is not None:
                self.made[call.ended] = code
            for given in call.inputs:
                self.readers.setdefault(given.place, []).append(code)
        for index, readers in self.readers.items():
            if index in self.made:
                self.made[index].local = self.made[index].local or index == self.made[index].spec.output
            elif index not in self.params and readers:
                self.inputs.setdefault(_scope_of_place(program, index), []).append(index)
        for index in found.loops:
            parent = next(scope.parent for scope in program.net.scopes if scope.loop == index)
            self.loops.setdefault(parent or 0, []).append(index)


def _scope_of_place(program: CompiledNet, index: int) -> int:
    home = program.places[index].scope
    return 0 if home is None or home.loop is None else home.loop.scope


def scope_of(instance: Instance) -> int:
    """Return the number of an instance's scope."""
    return 0 if instance.scope.loop is None else instance.scope.loop.scope
