"""How drawings look: colours for light and dark surroundings, and how wide text is.

Colours are CSS variables with no weight of their own (``:where``), so that a page can set others. A drawing follows the
reader's system, unless the page around it says what it is: JupyterLab, VS Code and furo do.
"""

from __future__ import annotations

import unicodedata

__all__ = ["COLOURS", "STYLE", "clipped", "text_width"]

_LIGHT = {
    "card": "#ffffff",
    "text": "#1b1f24",
    "dim": "#59636e",
    "line": "#7d8793",
    "frame": "#c3cad3",
    "shade": "rgb(100 116 139 / 7%)",
    "failed": "#c5221f",
}
_DARK = {
    "card": "#1d232b",
    "text": "#e6edf3",
    "dim": "#9ea9b5",
    "line": "#7c8794",
    "frame": "#434e5b",
    "shade": "rgb(148 163 184 / 8%)",
    "failed": "#ff8a80",
}
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
"""How many colours there are for sites; further sites begin with the first again, their names tell them apart."""


def _variables(dark: bool) -> str:
    plain = [f"--dfm-{name}:{value};" for name, value in (_DARK if dark else _LIGHT).items()]
    sites = [f"--dfm-site-{index}:{pair[dark]};" for index, pair in enumerate(_SITES)]
    return "".join(plain + sites)


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
    """Estimates how wide text is, with a font that is rather wide, so that it fits with others."""
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
    """Makes text fit into a node: on one line, of visible letters, and not too long."""
    clean = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"
