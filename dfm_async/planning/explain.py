"""Plans as text: which node runs where, and why; and the net of each location."""

from __future__ import annotations

from typing import Final

from dfm_async.base.rendering import Shown
from dfm_async.base.text import columns, size_text, time_text
from dfm_async.net import spec
from dfm_async.planning.plan import NodePlan, Plan

_COSTS: Final = ("start", "time", "in", "out", "sent to it")
REJECTED: Final = ("rejected", "site", "in total", "adds")
"""The column heads of the table of rejected sites."""


class Explanation(Shown):
    """Where each node of a plan runs, and why; if costs are known, also what it costs, and what else was possible."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the columns of the table of nodes."""
        return ("node", "site", "why") if self.plan.cost is None else ("node", "site", *_COSTS, "why")

    def row(self, node: NodePlan) -> tuple[str, ...]:
        """Return the row of a node in the table."""
        costs = () if self.plan.cost is None else _costs(node)
        return (node.label, _where(str(node.location), node.provider), *costs, node.why)

    @property
    def rejected(self) -> list[tuple[str, str, str, str]]:
        """The rejected sites: the node, the site, how long everything would take there, and how much that adds."""
        return [
            (node.label, _where(other.site, other.provider), time_text(other.total), f"+{time_text(other.difference)}")
            for node in self.plan.nodes
            for other in node.alternatives
        ]

    @property
    def total(self) -> str:
        """How long everything takes, in words; empty if nothing is known."""
        cost = self.plan.cost
        if cost is None:
            return ""
        return f"{time_text(cost.seconds)} in total, {'the least' if cost.optimal else 'the least that was found'}"

    def __str__(self) -> str:
        plan = self.plan
        rows = [self.heads]
        for node in plan.nodes:
            label, *rest = self.row(node)
            rows.append(("  " * node.depth + label, *rest))
        head = f"pipeline {plan.pipeline!r} over {', '.join(map(str, plan.locations))}"
        text = "\n".join([f"{head}: {self.total}" if self.total else head, columns(rows)])
        if any(node.cost is not None and node.cost.critical for node in plan.nodes):
            text += "\n* everything waits for these"
        if self.rejected:
            text += "\n\n" + columns([REJECTED, *self.rejected])
        return text

    __repr__ = __str__

    def to_mermaid(self) -> str:
        """Draw the plan as a Mermaid flow chart, one box per site."""
        lines = ["flowchart LR"]
        for location in self.plan.locations:
            lines.append(f'  subgraph s{self.plan.locations.index(location)}["{location}"]')
            lines += [f'    n{node.id}["{_box(node)}"]' for node in self.plan.nodes if node.location == location]
            lines.append("  end")
        lines += [f"  n{source} --> n{node.id}" for node in self.plan.nodes for source in node.inputs]
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Draw the plan as SVG."""
        return self.plan.to_svg()


def _costs(node: NodePlan) -> tuple[str, ...]:
    cost = node.cost
    if cost is None:
        return ("",) * len(_COSTS)
    transfers = [f"{size_text(sent.bytes)} from {sent.source}: {time_text(sent.seconds)}" for sent in cost.transfers]
    star = " *" if cost.critical else ""
    return (
        time_text(cost.start),
        time_text(cost.seconds) + star,
        size_text(cost.bytes_in),
        size_text(cost.bytes_out),
        ", ".join(transfers) or "-",
    )


def _where(place: str, provider: str | None) -> str:
    return place if provider is None else f"{place}/{provider}"


def _box(node: NodePlan) -> str:
    return node.label if node.cost is None else f"{node.label}<br/>{time_text(node.cost.seconds)}"


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
