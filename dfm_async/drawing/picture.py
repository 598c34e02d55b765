"""Drawings as SVG: self-contained, without scripts, for light and dark surroundings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from dfm_async.drawing.boxes import End
from dfm_async.drawing.graph import COMPOUND, Graph, Node
from dfm_async.drawing.layout import Layout, Rect, Run, lay_out
from dfm_async.drawing.style import COLOURS, STYLE, clipped, text_width

__all__ = ["svg"]

_MARGIN = 16.0
_WORDS = {"yield": "yield", "parameter": "parameter", "if": "if"}
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NO_MARKS: Mapping[str, str] = {}
_FEET = {"repeat": "next", "try_from_cache": "store"}


def svg(graph: Graph, marks: Mapping[str, str] = _NO_MARKS) -> str:
    """Draws a graph.

    Each node is ``<g class="node KIND" data-node="ID" data-site="SITE">``, each edge
    ``<path class="edge ROLE" data-from="ID" data-to="ID">``. Sites have colours, and their names stand in the nodes.

    Args:
        graph: what is drawn.
        marks: for nodes by their id: "active", "done" or "failed", which becomes a class too, and shows.
    """
    nodes = {node.id: node for node in graph.nodes}
    layout = lay_out(graph, lambda end: _size(nodes[end.node], end.part))
    colours = {site: f" s{index % COLOURS}" for index, site in enumerate(graph.sites)}
    classes = {node.id: _classes(node, colours.get(node.site, ""), marks.get(node.id, "")) for node in graph.nodes}
    keys, wide, high = _legend(graph.sites, colours, layout)
    width, height = max(layout.width, wide) + 2 * _MARGIN, layout.height + high + 2 * _MARGIN
    title = _title(graph)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="dfm-graph" role="img" aria-label={quoteattr(title)} '
        f'width="{_n(width)}" height="{_n(height)}" viewBox="{_n(-_MARGIN)} {_n(-_MARGIN)} {_n(width)} {_n(height)}">',
        f"<title>{escape(title)}</title><style>{escape(STYLE)}</style>",
    ]
    for box, rect in layout.frames:
        node = box.node
        assert node is not None  # noqa: S101 - only the whole drawing has none, and it has no frame
        if box.word:
            word = f'<text class="word" x="{_n(rect.x + 10)}" y="{_n(rect.y + 16)}">{box.word}</text>'
            parts.append(_rect(rect, 8, "branch") + word)
        else:
            parts.append(_compound(node, rect, layout, classes[node.id]))
    for line, runs in layout.lines:
        path = _path(runs)
        if line.edge is None:
            parts.append(f'<path class="gate" d="{path}"/>')
        else:
            ends = f"data-from={quoteattr(_clean(line.edge.source))} data-to={quoteattr(_clean(line.edge.target))}"
            role = "" if line.edge.role == "data" else f" {line.edge.role}"
            parts.append(f'<path class="edge{role}" {ends} d="{path}"/>')
    for node in graph.nodes:
        if node.kind not in COMPOUND:
            rect = layout.ends[End(node.id, "node")]
            inside = _title_of(node) + _shape(node, rect) + _label(node, rect)
            parts.append(f"{_open(node, classes[node.id])}{inside}</g>")
    return "".join([*parts, *keys, "</svg>"])


def _title(graph: Graph) -> str:
    name = "Pipeline" if graph.name is None else f"Pipeline {_clean(graph.name)}"
    where = f" at {', '.join(graph.sites)}" if graph.sites else ""
    return f"{name}: {len(graph.nodes)} nodes{_clean(where)}"


def _size(node: Node, part: str) -> tuple[float, float]:
    if part == "foot":
        return text_width(_FEET[node.kind], 11) + 24, 22.0
    title = text_width(_text(node), 13) * 1.06 + text_width(_number(node), 11)
    below = _below(node)
    wide = max(title, text_width(below, 11) + (11 if node.site else 0)) + 28
    return max(wide, 64.0), 44.0 if below else 30.0


def _text(node: Node) -> str:
    return clipped(node.text) or "\N{NO-BREAK SPACE}"


def _number(node: Node) -> str:
    """The number that tells nodes with the same name apart."""
    return f" #{node.id.rpartition('#')[2]}" if node.kind not in ("parameter", "yield", "if") else ""


def _below(node: Node) -> str:
    """The second line: what it is, if that is not plain, and where it runs."""
    return " · ".join(part for part in (_WORDS.get(node.kind, ""), clipped(node.site)) if part)


def _classes(node: Node, colour: str, mark: str) -> str:
    kind = node.kind if node.kind.isidentifier() else "other"
    return f"node {kind}{colour}" + (f" {mark}" if mark in ("active", "done", "failed") else "")


def _open(node: Node, classes: str) -> str:
    names = f"data-node={quoteattr(_clean(node.id))} data-site={quoteattr(_clean(node.site))}"
    return f'<g class="{classes}" {names}>'


def _title_of(node: Node) -> str:
    where = f" at {node.site}" if node.site else ""
    why = f" ({node.why})" if node.why else ""
    return f"<title>{escape(_clean(node.id + where + why))}</title>"


def _compound(node: Node, frame: Rect, layout: Layout, classes: str) -> str:
    head = layout.ends[End(node.id, "head")]
    parts = [_open(node, classes), _title_of(node), _rect(frame, 12, "frame"), _shape(node, head), _label(node, head)]
    foot = layout.ends.get(End(node.id, "foot"))
    if foot is not None:
        parts.append(_rect(foot, 11, "shape foot"))
        parts.append(
            f'<text class="sub" text-anchor="middle" x="{_n(foot.middle)}" y="{_n(foot.y + 15)}">'
            f"{_FEET[node.kind]}</text>"
        )
    return "".join([*parts, "</g>"])


def _shape(node: Node, rect: Rect) -> str:
    if node.kind == "if":
        x, y, w, h = rect
        a, b, c = x + 12, x + w - 12, y + h / 2
        points = ((a, y), (b, y), (x + w, c), (b, y + h), (a, y + h), (x, c))
        return f'<path class="shape" d="M{"L".join(f"{_n(h)} {_n(v)}" for h, v in points)}Z"/>'
    return _rect(rect, rect.height / 2 if node.kind in ("yield", "parameter") else 8, "shape")


def _label(node: Node, rect: Rect) -> str:
    below = _below(node)
    number = f'<tspan class="dim">{escape(_number(node))}</tspan>' if _number(node) else ""
    title = (
        f'<text class="title" text-anchor="middle" x="{_n(rect.middle)}" y="{_n(rect.y + 20)}">'
        f"{escape(_text(node))}{number}</text>"
    )
    if not below:
        return title
    dot = ""
    middle = rect.middle
    if node.site:
        middle += 5.5
        left = middle - text_width(below, 11) * 0.5 - 6
        dot = f'<circle class="dot" cx="{_n(left)}" cy="{_n(rect.y + 32)}" r="3.5"/>'
    sub = f'<text class="sub" text-anchor="middle" x="{_n(middle)}" y="{_n(rect.y + 36)}">{escape(below)}</text>'
    return title + dot + sub


def _legend(sites: Sequence[str], colours: dict[str, str], layout: Layout) -> tuple[list[str], float, float]:
    """The names of the sites with their colours, on as many lines as they need; and how much room that takes."""
    parts = []
    x, y, widest = 0.0, layout.height + 32, 0.0
    for site in sites:
        wide = text_width(clipped(site), 11) + 30
        if x and x + wide > max(layout.width, 320):
            x, y = 0.0, y + 20
        parts.append(
            f'<g class="key{colours[site]}"><circle class="dot" cx="{_n(x + 6)}" cy="{_n(y - 4)}" r="5"/>'
            f'<text class="sub" x="{_n(x + 16)}" y="{_n(y)}">{escape(clipped(site))}</text></g>'
        )
        x += wide
        widest = max(widest, x)
    return parts, widest, y - layout.height + 4 if sites else 0.0


def _path(runs: Sequence[Run]) -> str:
    """Straight down in each column, in a curve from one to the next, and an arrow at the end."""
    first = runs[0]
    parts = [f"M{_n(first.x)} {_n(first.top)}"]
    before: Run | None = None
    for run in runs:
        if before is not None:
            half = _n((before.bottom + run.top) / 2)
            parts.append(f"C{_n(before.x)} {half} {_n(run.x)} {half} {_n(run.x)} {_n(run.top)}")
        if run.bottom > run.top:
            parts.append(f"V{_n(run.bottom)}")
        before = run
    x, y = runs[-1].x, runs[-1].bottom
    return "".join([*parts, f"M{_n(x - 4)} {_n(y - 6)}L{_n(x)} {_n(y)}L{_n(x + 4)} {_n(y - 6)}"])


def _rect(rect: Rect, radius: float, kind: str) -> str:
    x, y, w, h = map(_n, rect)
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="{_n(radius)}"/>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _clean(text: str) -> str:
    """Replaces what XML cannot hold."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
