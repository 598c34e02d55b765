"""What a run of all benchmarks found, as one JSON document: the figures, the machine, the date, and how busy it was.

``docs/benchmarks.md`` is made from such a document; ``benchmarks.page`` draws it.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

FORMAT = 1
"""Changes when a reader of older documents would misunderstand them."""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(psutil.Process().cpu_affinity()) if psutil.LINUX else psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _processor() -> str:
    """The name of the processor; on Linux the one that the kernel tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load() -> float:
    """How many processes wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def described(name: str) -> tuple[str, str]:
    """What a benchmark claims, and how it measures that: the first line of its module's docstring, and the rest."""
    source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    first, _, rest = (ast.get_docstring(ast.parse(source)) or name).partition("\n")
    return first.strip(), textwrap.dedent(rest).strip()


def document(
    found: Mapping[str, Sequence[Mapping[str, Any]]], *, quick: bool, before: float, note: str = ""
) -> dict[str, Any]:
    """Puts together what was found, by the names of the benchmarks; one without figures did not run."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version("dfm-async"),
        "quick": quick,
        "note": note,
        "machine": machine(),
        "load": {"before": before, "after": load()},
        "benchmarks": [_benchmark(name, figures, quick) for name, figures in found.items()],
    }


def _benchmark(name: str, figures: Sequence[Mapping[str, Any]], quick: bool) -> dict[str, Any]:
    claim, method = described(name)
    return {
        "name": name,
        "command": f"python -m benchmarks.{name}{' --quick' if quick else ''}",
        "claim": claim,
        "method": method,
        "figures": [{key: value for key, value in row.items() if key != "benchmark"} for row in figures],
    }


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a document; what was there stays whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
