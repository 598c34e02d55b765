"""Runs all benchmarks, one after the other, each in a process of its own, and prints one summary.

``--save docs/benchmarks/results.json`` keeps the figures; the page about them in the documentation is made from that.
``--against CHECKOUT`` runs each benchmark there and here alternately instead, and prints both figures of each metric.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import against, report
from benchmarks.common import Options, table
from benchmarks.external import ROOT, environment

NAMES = (
    "job_round_trip",
    "direct_calls",
    "jobs_per_second",
    "parallel_calls",
    "batch",
    "small_results",
    "time_to_first_result",
    "startup",
    "cold_start",
    "idle",
    "prepare",
    "placement",
    "federation_file",
    "graphs",
    "cross_site",
    "large_values",
    "frames",
    "param_sets",
    "worker_lost",
    "worker_memory",
    "durable_store",
    "checkpoints",
    "open_store",
    "replica_lost",
    "disk_cache",
    "sse_readers",
    "page_weight",
    "tracing",
    "program_round_trip",
    "program_transfer",
    "program_start",
    "program_lost",
    "flare_first_result",
    "flare_round_trip",
    "flare_tokens",
    "flare_arrays",
    "flare_results",
    "flare_batch",
)
LIMIT = 900


def run(name: str, quick: bool, root: Path = ROOT) -> list[dict[str, Any]]:
    """Run a benchmark in a checkout; give its figures, none if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            command, env=environment(root), cwd=root, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True
        )
    except subprocess.SubprocessError as error:
        print(f"{name} did not run in {root}: {error}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = Options.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of them; all, if none is named:\n{_listed()}")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures to a file, with machine and date")
    parser.add_argument("--note", default="", help="a sentence to go with them, such as what else was running")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with another checkout")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each runs in each checkout")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in NAMES]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are:\n{_listed()}")
    if given.against is not None:
        if given.save:
            parser.error("--save needs the figures of one checkout: leave out --against")
        if not (given.against / "benchmarks").is_dir():
            parser.error(f"{given.against} is not a checkout: it has no folder benchmarks")
        _compare(given.names or NAMES, given.against.resolve(), given)
        return
    before = report.load()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in given.names or NAMES:
        found = rows[name] = run(name, given.quick)
        if given.json:
            print("\n".join(map(json.dumps, found)), flush=True)
        elif found:
            print(f"{name}\n{table(found)}\n", flush=True)
    if given.save:
        report.save(given.save, report.document(rows, quick=given.quick, before=before, note=given.note))
    if not given.json:
        print(_summary(rows))


def _compare(names: Sequence[str], other: Path, given: argparse.Namespace) -> None:
    for name in names:
        rows = against.compare(partial(run, name, given.quick), other, ROOT, given.rounds)
        if given.json:
            print("\n".join(json.dumps({"benchmark": name, **row}) for row in rows), flush=True)
        else:
            print(f"{name}\n{against.table(rows)}\n", flush=True)


def _listed() -> str:
    return textwrap.fill(", ".join(NAMES), 80)


def _summary(found: dict[str, list[dict[str, Any]]]) -> str:
    judged = [row for rows in found.values() for row in rows if row["met"] is not None]
    missed = [f"{row['benchmark']}: {row['metric']}" for row in judged if not row["met"]]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets met"]
    lines += [f"  missed: {name}" for name in missed]
    lines += [
        f"  not judged, its peer is absent: {row['benchmark']}: {row['metric']} ({row['target']})"
        for rows in found.values()
        for row in rows
        if row["target"] and row["met"] is None
    ]
    lines += [f"  not run: {name}" for name, rows in found.items() if not rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
