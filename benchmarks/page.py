"""Makes the page about the benchmarks from a document of :mod:`benchmarks.report`: Markdown, with bars as static SVG.

It imports nothing but the standard library, because the documentation is built where no benchmark can run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

FORMAT = 1
MISSING = """```{note}
No results are stored here. Run the benchmarks on your own machine:
`python -m benchmarks.all --save docs/benchmarks/results.json`.
```
"""


def page(path: Path) -> str:
    """The figures of a stored document as Markdown; a few words if there is none that can be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return MISSING
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        return MISSING
    return markdown(report)


def markdown(report: Mapping[str, Any]) -> str:
    """A document as Markdown."""
    parts = [*_circumstances(report), *_verdicts(report)]
    for benchmark in report["benchmarks"]:
        parts += _benchmark(benchmark)
    return "\n\n".join(parts) + "\n"


def number(value: float) -> str:
    """A value with three or four digits that count."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _circumstances(report: Mapping[str, Any]) -> Iterator[str]:
    machine, load = report["machine"], report["load"]
    when = datetime.fromisoformat(report["date"])
    kind = "quick run: fewer repetitions" if report["quick"] else "full run"
    yield "## Machine and date"
    if report["note"]:
        yield f"```{{admonition}} Read these figures with care\n:class: warning\n\n{report['note']}\n```"
    rows = [
        ("measured", f"{when:%d %B %Y, %H:%M} UTC, {kind}"),
        ("processor", f"{machine['processor']}, {machine['cores']} cores"),
        ("memory", f"{machine['memory_gib']:g} GiB"),
        ("system", f"{machine['system']}, {machine['python']}"),
        ("version", f"dfm_async {report['version']}"),
        ("load", f"{load['before']:g} before, {load['after']:g} after (processes that wanted to run, on average)"),
    ]
    yield "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _verdicts(report: Mapping[str, Any]) -> Iterator[str]:
    """How many targets were met, and each one that was not."""
    judged = [(found, row) for found in report["benchmarks"] for row in found["figures"] if row["met"] is not None]
    missed = [(found, row) for found, row in judged if not row["met"]]
    absent = [found["name"] for found in report["benchmarks"] if not found["figures"]]
    yield f"## Targets\n\n**{len(judged) - len(missed)} of {len(judged)} targets were met in this run.**"
    if missed:
        lines = [f"| [{found['name']}](#{found['name']}) | {_cells(row)} |" for found, row in missed]
        yield "Missed:\n\n| benchmark | figure | measured | target |\n|---|---|---|---|\n" + "\n".join(lines)
    if absent:
        yield "Not run: " + ", ".join(f"`{name}`" for name in absent) + "."


def _cells(row: Mapping[str, Any]) -> str:
    return f"{row['metric']} | {number(row['ours'])} {row['unit']} | {row['target']}"


def _benchmark(found: Mapping[str, Any]) -> Iterator[str]:
    judged = [row["met"] for row in found["figures"] if row["met"] is not None]
    kept = f" In this run {sum(judged)} of {len(judged)} targets were met." if judged else ""
    yield f"({found['name']})=\n## {found['claim'].rstrip('.')}"
    yield found["method"] + kept
    yield f"```sh\n{found['command']}\n```"
    if found["figures"]:
        yield '<div class="figures">\n' + "\n".join(map(_figure, found["figures"])) + "\n</div>"
    else:
        yield "It did not run."


def _figure(row: Mapping[str, Any]) -> str:
    """One figure: ours and its peers as bars on one scale, with the target as a line."""
    values = {"dfm_async": row["ours"], **row["peers"]}
    largest = max([*values.values(), row["bound"] or 0.0]) or 1.0
    bars = "".join(_bar(name, value, row, largest) for name, value in values.items())
    return f'<div class="figure"><p class="metric">{escape(row["metric"])}{_verdict(row)}</p>{bars}</div>'


def _verdict(row: Mapping[str, Any]) -> str:
    words: Sequence[str] = []
    if row["ratio"] is not None:
        words = [f"{number(row['ratio'])} x {escape(row['against'])}"]
    if row["target"] is not None:
        state = {True: "met", False: "missed", None: "not judged"}[row["met"]]
        mark = f'<strong class="{state.replace(" ", "-")}">{state}</strong>'
        words = [*words, f"target: {escape(row['target'])}, {mark}"]
    return f' <span class="verdict">{"; ".join(words)}</span>' if words else ""


def _bar(name: str, value: float, row: Mapping[str, Any], largest: float) -> str:
    own = name == "dfm_async"
    shown = f"{number(value)} {row['unit']}".rstrip()
    line = ""
    if own and row["bound"] is not None:
        at = f"{100 * row['bound'] / largest:.1f}%"
        line = f'<line class="bound" x1="{at}" x2="{at}" y1="0" y2="100%"/>'
    return (
        f'<div class="bar{" own" if own else ""}"><span class="name">{escape(name)}</span>'
        f'<svg role="img" aria-label="{escape(name)}: {escape(shown)}">'
        f'<rect width="{100 * value / largest:.1f}%" height="100%"/>{line}</svg>'
        f'<span class="value">{escape(shown)}</span></div>'
    )
