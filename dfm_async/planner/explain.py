"""Plans as people read them: which node runs where, and why; and each site's net."""

from __future__ import annotations

import html

from dfm_async.net import spec
from dfm_async.planner.plan import NodePlan, Plan

__all__ = ["Explanation", "net_text"]

_ROW = 44
_COLUMN = 190


class Explanation:
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
        """Draws the plan as SVG, one column per site."""
        plan = self.plan
        spots: dict[int, tuple[int, int]] = {}
        for row, node in enumerate(plan.nodes):
            spots[node.id] = (
                plan.locations.index(node.location) if node.location in plan.locations else 0,
                row,
            )
        width, height = _COLUMN * max(1, len(plan.locations)), _ROW * (len(plan.nodes) + 1)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12" role="img" aria-label="plan">'
        ]
        for column, location in enumerate(plan.locations):
            x = column * _COLUMN
            parts.append(f'<rect x="{x + 4}" y="4" width="{_COLUMN - 8}" height="{height - 8}" rx="8" fill="#8881"/>')
            parts.append(
                f'<text x="{x + 14}" y="24" font-weight="bold" fill="currentColor">{html.escape(location)}</text>'
            )
        for node in plan.nodes:
            parts += [_line(spots[source], spots[node.id]) for source in node.inputs if source in spots]
        parts += [_box(node, *spots[node.id]) for node in plan.nodes]
        return "".join([*parts, "</svg>"])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='padding-left:{8 + 16 * node.depth}px;text-align:left'>{html.escape(node.label)}</td>"
            f"<td style='text-align:left'>{html.escape(node.location)}</td>"
            f"<td style='text-align:left'>{html.escape(node.why)}</td></tr>"
            for node in self.plan.nodes
        )
        return f"{self.to_svg()}<table><tr><th>node</th><th>site</th><th>why</th></tr>{rows}</table>"


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    a, b = x1 * _COLUMN + _COLUMN // 2, (y1 + 1) * _ROW + 26
    c, d = x2 * _COLUMN + _COLUMN // 2, (y2 + 1) * _ROW
    return f'<path d="M{a} {b} C{a} {b + 14} {c} {d - 14} {c} {d}" fill="none" stroke="currentColor" opacity=".4"/>'


def _box(node: NodePlan, column: int, row: int) -> str:
    x, y = column * _COLUMN + 16, (row + 1) * _ROW
    label = html.escape(node.label if len(node.label) <= 22 else node.label[:21] + "…")
    return (
        f'<rect x="{x}" y="{y}" width="{_COLUMN - 32}" height="26" rx="5" fill="#76b90033" stroke="#76b900"/>'
        f'<text x="{x + 8}" y="{y + 17}" fill="currentColor">{label}<title>{html.escape(node.why)}</title></text>'
    )


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
