"""Whether the parts of a plan that came from outside fit together."""

from __future__ import annotations

from collections.abc import Sequence

from dfm_async.net import spec
from dfm_async.net.program import Program

__all__ = ["check_parts"]


def check_parts(locations: Sequence[str], params: Sequence[str], nets: Sequence[spec.Net]) -> None:
    """Checks that nets can be run, and mean the same locations, parameters and yields.

    Raises:
        ValueError: they do not.
    """
    known = set(range(len(locations)))
    if [net.location for net in nets] != sorted(known):
        raise ValueError("its nets are not those of its locations")
    for name, net in zip(locations, nets, strict=True):
        try:
            Program(net)
        except (LookupError, AssertionError, AttributeError) as error:
            raise ValueError(f"the net of {name!r} does not fit together: {error!r}") from error
        emitted = {found.action.point for found in net.transitions if isinstance(found.action, spec.Emit)}
        routes = {at for place in net.places for at in place.routes}
        members = {at for loop in net.loops for at in (*loop.members, loop.control)}
        if tuple(net.locations) != tuple(locations) or not routes | members <= known:
            raise ValueError(f"the net of {name!r} leads to other locations")
        if not {param for param, _ in net.params} <= set(params):
            raise ValueError(f"the net of {name!r} has other parameters")
        if net.points != nets[0].points or not emitted <= set(range(len(net.points))):
            raise ValueError(f"the net of {name!r} has other yields")
