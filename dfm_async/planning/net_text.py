"""The net of one location as text."""

from __future__ import annotations

from dfm_async.net import spec


def net_text(net: spec.Net) -> str:
    """Write one location's net: its places and transitions."""
    names = {place.index: place.label for place in net.places}
    lines = [f"net of {net.locations[net.location]}"]
    for place in net.places:
        routes = f" -> {', '.join(str(net.locations[route]) for route in place.routes)}" if place.routes else ""
        lines.append(f"  place {place.index} [scope {place.scope}] {place.label}{routes}")
    for loop in net.loops:
        members = ", ".join(str(net.locations[member]) for member in loop.members)
        lines.append(f"  loop {loop.label} [scope {loop.scope}] at {net.locations[loop.control]}, body at {members}")
    for transition in net.transitions:
        inputs = ", ".join(
            names.get(given.place, str(given.place)) + ("" if given.role == "data" else f" ({given.role})")
            for given in transition.inputs
        )
        kind = type(transition.action).__name__.lower()
        output = getattr(transition.action, "output", None)
        outputs = [names[place] for place in (output, getattr(transition.action, "ended", None)) if place in names]
        target = f" => {', '.join(outputs) or 'nothing'}" if output is not None else ""
        lines.append(f"  {transition.label} [scope {transition.scope}]: {kind}({inputs}){target}")
    return "\n".join(lines)
