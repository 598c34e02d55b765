"""Runs all benchmarks, one after the other, each in a process of its own, and prints one summary."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.common import Options, table
from benchmarks.external import ROOT, environment

NAMES = (
    "job_round_trip",
    "jobs_per_second",
    "small_results",
    "time_to_first_result",
    "cold_start",
    "idle",
    "prepare",
    "graphs",
    "cross_site",
    "large_values",
    "param_sets",
    "worker_lost",
    "worker_memory",
    "durable_store",
    "sse_readers",
    "tracing",
    "program_round_trip",
    "program_transfer",
    "program_start",
    "program_lost",
)
LIMIT = 900


def _run(name: str, quick: bool) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True
        )
    except subprocess.SubprocessError as error:
        print(f"{name} did not run: {error}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    options = Options.parse(__doc__)
    rows: list[dict[str, Any]] = []
    failed = []
    for name in NAMES:
        found = _run(name, options.quick)
        rows += found
        if not found:
            failed.append(name)
        if options.json:
            print("\n".join(map(json.dumps, found)), flush=True)
        elif found:
            print(f"{name}\n{table(found)}\n", flush=True)
    judged = [row for row in rows if row["verdict"]]
    missed = [f"{row['benchmark']}: {row['metric']}" for row in judged if row["verdict"] == "MISSED"]
    if not options.json:
        print(f"{len(judged) - len(missed)} of {len(judged)} targets met")
        print("".join(f"  missed: {name}\n" for name in missed) + "".join(f"  not run: {name}\n" for name in failed))


if __name__ == "__main__":
    main()
