"""Which locations can be lost without the job: those that only run calls for one other location.

If every failure of a location's calls is handled, and the location exchanges tokens with one other location only, its
*caller*, then the caller knows everything about it that matters: which calls it had begun, and what it still has to do.
The net of the caller describes those calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dfm_async.model.policies import RetryPolicy
from dfm_async.net import spec

Policy = Callable[[spec.Net, spec.Call], RetryPolicy | None]
"""Returns the policy of a call at the location of a net."""


def contain(nets: Sequence[spec.Net], policy: Policy) -> tuple[spec.Net, ...]:
    """Return the nets of a plan, where those of callers describe the calls of locations that can be lost."""
    sources = {index: at for at, net in enumerate(nets) for index in _made(net)}
    found = list(nets)
    for net in nets:
        caller = _caller(net, nets, sources)
        if caller is not None:
            found[caller] = _with(found[caller], net, policy)
    return tuple(found)


def _made(net: spec.Net) -> set[int]:
    """Return the places that a location fills."""
    made = {index for transition in net.transitions for index in spec.outputs_of(transition.action)}
    for loop in net.loops:
        made.update(loop.collects)
        if loop.control == net.location:
            made.update(index for index in (loop.element, loop.enter) if index is not None)
    return made


def _caller(net: spec.Net, nets: Sequence[spec.Net], sources: dict[int, int]) -> int | None:
    """Return the only location that a location works for; None if there is none, or its loss cannot be contained."""
    here = net.location
    for transition in net.transitions:
        action = transition.action
        if not isinstance(action, spec.Call) or not (transition.handled or action.fallback is not None):
            return None
    inputs = {given.place for found in net.transitions for given in found.inputs}
    sent = {place.index for place in net.places if place.routes}
    for transition in net.transitions:
        if (inputs | sent).isdisjoint(spec.outputs_of(transition.action)):
            return None  # nobody waits for it: its failure would not be noticed
    params = {index for _, index in net.params}
    others = {sources[index] for index in inputs - params}
    others |= {route for place in net.places for route in place.routes}
    others |= {loop.control for loop in net.loops}
    others.discard(here)
    if len(others) != 1 or any(loop.control == here or loop.collects for loop in net.loops):
        return None
    (caller,) = others
    scopes = {scope.index for scope in nets[caller].scopes}
    return caller if {scope.index for scope in net.scopes} <= scopes else None


def _with(caller: spec.Net, net: spec.Net, policy: Policy) -> spec.Net:
    literals: list[Any] = list(caller.literals)
    calls = []
    for found in net.transitions:
        action = found.action
        assert isinstance(action, spec.Call)  # noqa: S101 - it has nothing else
        fallback = action.fallback
        if isinstance(fallback, spec.NetLiteral):
            literals.append(net.literals[fallback.literal])
            fallback = spec.NetLiteral(len(literals) - 1)
        retry = policy(net, action)
        calls.append(
            spec.ContainedCall(
                label=found.label,
                operation=action.operation,
                scope=found.scope,
                inputs=found.inputs,
                output=action.output,
                ended=action.ended,
                fallback=fallback,
                within=action.within,
                reruns=0 if retry is None else retry.on_worker_lost,
            )
        )
    contained = spec.Contained(
        location=net.location,
        calls=tuple(calls),
        params=tuple(index for _, index in net.params),
        loops=tuple(loop.index for loop in net.loops),
    )
    return msgspec.structs.replace(caller, literals=tuple(literals), contains=(*caller.contains, contained))
