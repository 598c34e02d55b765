"""Drawings as SVG: self-contained, without scripts, for light and dark surroundings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from dfm_async.drawing.boxes import LineEnd
from dfm_async.drawing.graph import COMPOUND, FEET, Graph, Node
from dfm_async.drawing.layout import Layout, Rect, StraightRun, lay_out

_COLOURS = {
    "card": ("#ffffff", "#1d232b"),
    "text": ("#1b1f24", "#e6edf3"),
    "dim": ("#59636e", "#9ea9b5"),
    "line": ("#7d8793", "#7c8794"),
    "frame": ("#c3cad3", "#434e5b"),
    "shade": ("rgb(100 116 139 / 7%)", "rgb(148 163 184 / 8%)"),
    "failed": ("#c5221f", "#ff8a80"),
}
"""For light and for dark surroundings."""
_SITES = (
    ("#2563eb", "#60a5fa"),
    ("#b45309", "#fbbf24"),
    ("#047857", "#34d399"),
    ("#a21caf", "#e879f9"),
    ("#0e7490", "#22d3ee"),
    ("#be185d", "#f472b6"),
    ("#4d7c0f", "#a3e635"),
    ("#6d28d9", "#a78bfa"),
)
COLOURS = len(_SITES)
"""How many colours there are for sites; further sites start with the first again, and have only their names."""


def _variables(dark: bool) -> str:
    pairs = _COLOURS | {f"site-{index}": pair for index, pair in enumerate(_SITES)}
    return "".join(f"--dfm-{name}:{pair[dark]};" for name, pair in pairs.items())


_SAYS_LIGHT = '[data-theme="light"],[data-jp-theme-light="true"],.vscode-light'
_SAYS_DARK = '[data-theme="dark"],[data-jp-theme-light="false"],.vscode-dark,.vscode-high-contrast'
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif'

STYLE = "\n".join(
    [
        f":where(.dfm-graph){{{_variables(False)}}}",
        f"@media(prefers-color-scheme:dark){{:where(.dfm-graph){{{_variables(True)}}}"
        "svg.dfm-graph:root{background:#0e1116}}",  # a document of its own: browsers paint it white
        f":where({_SAYS_LIGHT}) :where(.dfm-graph){{{_variables(False)}}}",
        f":where({_SAYS_DARK}) :where(.dfm-graph){{{_variables(True)}}}",
        f".dfm-graph text{{font:13px {_FONT};fill:var(--dfm-text)}}",
        ".dfm-graph .title{font-weight:600}",
        ".dfm-graph .dim,.dfm-graph .sub,.dfm-graph .word{font-size:11px;font-weight:400;fill:var(--dfm-dim)}",
        ".dfm-graph .node,.dfm-graph .key{--dfm-own:var(--dfm-line)}",
        *(f".dfm-graph .s{index}{{--dfm-own:var(--dfm-site-{index})}}" for index in range(COLOURS)),
        ".dfm-graph .shape{fill:var(--dfm-card);fill:color-mix(in srgb,var(--dfm-own) 9%,var(--dfm-card));"
        "stroke:var(--dfm-own);stroke-width:1.5}",
        ".dfm-graph .parameter .shape{stroke-dasharray:4 3}",
        ".dfm-graph .dot{fill:var(--dfm-own)}",
        ".dfm-graph .frame{fill:var(--dfm-shade);stroke:var(--dfm-frame)}",
        ".dfm-graph .branch{fill:none;stroke:var(--dfm-frame);stroke-dasharray:5 4}",
        ".dfm-graph .edge,.dfm-graph .gate{fill:none;stroke:var(--dfm-line);stroke-width:1.5;"
        "stroke-linejoin:round;stroke-linecap:round}",
        ".dfm-graph .after{stroke-dasharray:1.5 4}",
        ".dfm-graph .gate{stroke-dasharray:5 4}",
        ".dfm-graph .active>.shape{stroke-width:3}",
        ".dfm-graph .done>.shape{fill:color-mix(in srgb,var(--dfm-own) 30%,var(--dfm-card))}",
        ".dfm-graph .failed>.shape{stroke:var(--dfm-failed);stroke-width:3}",
    ]
)
"""The style sheet that every drawing carries. A page can give nodes the classes ``active``, ``done`` and ``failed``."""

_NARROW = frozenset("fijlrtI.,:;'|!()[]{}/\\ -`")
_BROAD = frozenset("mwMW@%")


def text_width(text: str, size: float) -> float:
    """Estimate how wide text is, with a font that is rather wide, so that it fits with others."""
    total = 0.0
    for letter in text:
        if unicodedata.east_asian_width(letter) in "WF":
            total += 1.05
        elif letter in _NARROW:
            total += 0.40
        elif letter in _BROAD:
            total += 0.95
        else:
            total += 0.72 if letter.isupper() else 0.62
    return total * size


def clipped(text: str, most: int = 30) -> str:
    """Make text fit into a node: on one line, of visible letters, and not too long."""
    clean = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


_MARGIN = 16.0
_WORDS = {"yield": "yield", "parameter": "parameter", "if": "if", "wait": "wait", "sleep": "sleep"}
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NO_MARKS: Mapping[str, str] = {}


def svg(graph: Graph, marks: Mapping[str, str] = _NO_MARKS) -> str:
    """Draw a graph.

    Each node is ``<g class="node KIND" data-node="ID" data-site="SITE">``, each edge
    ``<path class="edge ROLE" data-from="ID" data-to="ID">``. Sites have colours, and nodes show the names.

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
            rect = layout.ends[LineEnd(node.id, "node")]
            inside = _title_of(node) + _shape(node, rect) + _label(node, rect)
            parts.append(f"{_open(node, classes[node.id])}{inside}</g>")
    return "".join([*parts, *keys, "</svg>"])


def _title(graph: Graph) -> str:
    name = "Pipeline" if graph.name is None else f"Pipeline {_clean(graph.name)}"
    where = f" at {', '.join(graph.sites)}" if graph.sites else ""
    return f"{name}: {len(graph.nodes)} nodes{_clean(where)}"


def _size(node: Node, part: str) -> tuple[float, float]:
    if part == "foot":
        return text_width(FEET[node.kind], 11) + 24, 22.0
    title = text_width(_text(node), 13) * 1.06 + text_width(_number(node), 11)
    below = _below(node)
    wide = max(title, text_width(below, 11) + (11 if node.site else 0)) + 28
    return max(wide, 64.0), 44.0 if below else 30.0


def _text(node: Node) -> str:
    return clipped(node.text) or "\N{NO-BREAK SPACE}"


def _number(node: Node) -> str:
    """Return the number that distinguishes nodes with the same name."""
    return f" #{node.id.rpartition('#')[2]}" if node.kind not in ("parameter", "yield", "if") else ""


def _below(node: Node) -> str:
    """Return the second line: what it is, if that is not plain, and where it runs."""
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
    head = layout.ends[LineEnd(node.id, "head")]
    parts = [_open(node, classes), _title_of(node), _rect(frame, 12, "frame"), _shape(node, head), _label(node, head)]
    foot = layout.ends.get(LineEnd(node.id, "foot"))
    if foot is not None:
        parts.append(_rect(foot, 11, "shape foot"))
        parts.append(
            f'<text class="sub" text-anchor="middle" x="{_n(foot.middle)}" y="{_n(foot.y + 15)}">'
            f"{FEET[node.kind]}</text>"
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
    """Return the names of the sites with their colours, on as many lines as they need; and how much room that takes."""
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


def _path(runs: Sequence[StraightRun]) -> str:
    """Return the path of a line: straight down in each column, curves in between, and an arrow at the end."""
    first = runs[0]
    parts = [f"M{_n(first.x)} {_n(first.top)}"]
    before: StraightRun | None = None
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
    """Replace what XML cannot hold."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
