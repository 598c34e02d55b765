"""Compares two checkouts: each benchmark runs in both alternately, so that both see the same noise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import columns, number

Run = Callable[[Path], Sequence[Mapping[str, Any]]]
"""Runs a benchmark in a checkout; gives its figures as dicts."""


def compare(run: Run, before: Path, after: Path, rounds: int) -> list[dict[str, Any]]:
    """Run a benchmark in two checkouts, there and back again; give the medians of each metric that one of them has."""
    values: dict[str, dict[str, Any]] = {}
    order = [("before", before), ("after", after)]
    for _ in range(rounds):
        for side, root in order:
            figures = {figure["metric"]: figure for figure in run(root)}  # some metrics have two targets
            for metric, figure in figures.items():
                row = values.setdefault(metric, {"unit": figure["unit"], "before": [], "after": []})
                row[side].append(figure["ours"])
        order.reverse()
    return [_row(metric, **row) for metric, row in values.items()]


def _row(metric: str, unit: str, before: list[float], after: list[float]) -> dict[str, Any]:
    medians = [statistics.median(found) if found else None for found in (before, after)]
    ratio = medians[1] / medians[0] if medians[0] and medians[1] is not None else None
    return {
        "metric": metric,
        "unit": unit,
        "before": medians[0],
        "after": medians[1],
        "ratio": ratio,
        "runs": {"before": before, "after": after},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out what was compared: medians, and the lowest and the highest value of each side."""
    lines = [["metric", "unit", "before", "after", "after / before", "range before", "range after"]]
    lines += [
        [
            row["metric"],
            row["unit"],
            number(row["before"]),
            number(row["after"]),
            number(row["ratio"]),
            *(_range(row["runs"][side]) for side in ("before", "after")),
        ]
        for row in rows
    ]
    return columns(lines, range(2, 7))


def _range(values: Sequence[float]) -> str:
    return f"{number(min(values))} .. {number(max(values))}" if values else "-"
