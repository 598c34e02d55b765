"""Plans as people read them: which node runs where, and why; and each site's net."""

from __future__ import annotations

from dfm_async.net import spec
from dfm_async.planner.plan import Plan
from dfm_async.rendering import Shown

__all__ = ["Explanation", "net_text"]


class Explanation(Shown):
    """Where each node of a plan runs, and why."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __str__(self) -> str:
        plan = self.plan
        rows = [("node", "site", "why")]
        rows += [("  " * node.depth + node.label, node.location, node.why) for node in plan.nodes]
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in rows]
        head = f"pipeline {plan.pipeline!r} over {', '.join(plan.locations)}"
        return "\n".join([head, lines[0], "-" * len(lines[0]), *lines[1:]])

    __repr__ = __str__

    def to_mermaid(self) -> str:
        """Draws the plan as a Mermaid flow chart, one box per site."""
        lines = ["flowchart LR"]
        for location in self.plan.locations:
            lines.append(f'  subgraph s{self.plan.locations.index(location)}["{location}"]')
            lines += [f'    n{node.id}["{node.label}"]' for node in self.plan.nodes if node.location == location]
            lines.append("  end")
        lines += [f"  n{source} --> n{node.id}" for node in self.plan.nodes for source in node.inputs]
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Draws the plan as SVG."""
        return self.plan.to_svg()


def net_text(net: spec.Net) -> str:
    """Writes one location's net: its places and transitions."""
    names = {place.index: place.label for place in net.places}
    lines = [f"net of {net.locations[net.location]}"]
    for place in net.places:
        routes = f" -> {', '.join(net.locations[route] for route in place.routes)}" if place.routes else ""
        lines.append(f"  place {place.index} [scope {place.scope}] {place.label}{routes}")
    for loop in net.loops:
        members = ", ".join(net.locations[member] for member in loop.members)
        lines.append(f"  loop {loop.label} [scope {loop.scope}] at {net.locations[loop.control]}, body at {members}")
    for transition in net.transitions:
        inputs = ", ".join(
            names.get(given.place, str(given.place)) + ("" if given.role == "data" else f" ({given.role})")
            for given in transition.inputs
        )
        kind = type(transition.action).__name__.lower()
        output = getattr(transition.action, "output", None)
        target = f" => {names.get(output, 'nobody')}" if output is not None else ""
        lines.append(f"  {transition.label} [scope {transition.scope}]: {kind}({inputs}){target}")
    return "\n".join(lines)
