"""What all benchmarks share: targets, interleaved blocks, tables, and the cost of a tree of processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

TREE = "DFM_BENCH_TREE"
"""The environment variable that marks the processes of one measurement, also those that have left their parent."""

# figures


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a figure: absolute, or relative to a peer in the same run."""

    limit: float
    peer: str | None = None
    at_least: bool = False

    def bound(self, peers: Mapping[str, float]) -> float | None:
        """The bound as a value; None if the peer was not measured."""
        if self.peer is None:
            return self.limit
        return self.limit * peers[self.peer] if self.peer in peers else None

    def met(self, ours: float, peers: Mapping[str, float]) -> bool | None:
        """Tells whether the figure keeps the bound; None if the peer was not measured."""
        bound = self.bound(peers)
        if bound is None:
            return None
        return ours >= bound if self.at_least else ours <= bound

    def text(self, unit: str) -> str:
        """The bound in words."""
        bound = f"{self.limit:g} x {self.peer}" if self.peer else f"{self.limit:,.6g} {unit}".rstrip()
        return f"{'at least' if self.at_least else 'at most'} {bound}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, beside those of its peers."""

    metric: str
    unit: str
    ours: float
    peers: Mapping[str, float] = field(default_factory=dict)
    target: Target | None = None

    @property
    def against(self) -> str | None:
        """The peer that it is compared with: that of the target, or else the first one."""
        return self.target.peer if self.target and self.target.peer else next(iter(self.peers), None)

    @property
    def ratio(self) -> float | None:
        """Ours by that peer."""
        peer = self.peers.get(self.against) if self.against else None
        return self.ours / peer if peer else None

    def as_dict(self, benchmark: str) -> dict[str, Any]:
        """The figure as a JSON object."""
        return {
            "benchmark": benchmark,
            "metric": self.metric,
            "unit": self.unit,
            "ours": self.ours,
            "peers": dict(self.peers),
            "against": self.against,
            "ratio": self.ratio,
            "target": self.target.text(self.unit) if self.target else None,
            "bound": self.target.bound(self.peers) if self.target else None,
            "met": self.target.met(self.ours, self.peers) if self.target else None,
        }


VERDICTS = {None: "not judged", True: "ok", False: "MISSED"}
"""How a table reports whether a target was met; one whose peer is absent is not judged."""


def number(value: float | None) -> str:
    """A value with three or four digits that count."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lays out figures (as dicts) in columns: one for ours, one for each peer."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    lines = [["metric", "unit", "ours", *peers, "ratio", "target", ""]]
    lines += [
        [
            row["metric"],
            row["unit"],
            number(row["ours"]),
            *(number(row["peers"].get(peer)) for peer in peers),
            number(row["ratio"]),
            row["target"] or "-",
            VERDICTS[row["met"]] if row["target"] else "",
        ]
        for row in rows
    ]
    return columns(lines, range(2, 4 + len(peers)))


def columns(lines: Sequence[Sequence[str]], numeric: Container[int]) -> str:
    """Align the cells of a table: numbers to the right, texts to the left."""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in numeric else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


# running


@dataclass(frozen=True, slots=True)
class Options:
    """How a benchmark was asked to run."""

    json: bool
    quick: bool

    @staticmethod
    def parser(description: str | None) -> argparse.ArgumentParser:
        """What every benchmark understands."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
        parser.add_argument("--json", action="store_true", help="print one JSON object per figure")
        parser.add_argument("--quick", action="store_true", help="fewer repetitions")
        return parser

    @classmethod
    def parse(cls, description: str | None) -> Self:
        """Reads the command line."""
        given = cls.parser(description).parse_args()
        return cls(given.json, given.quick)

    @property
    def repeats(self) -> int:
        """How many blocks of each contender to measure."""
        return 3 if self.quick else 7

    def size(self, n: int) -> int:
        """How many calls a block makes."""
        return max(n // 4, 1) if self.quick else n


def main(name: str, description: str | None, run: Callable[[Options], Awaitable[list[Figure]]]) -> None:
    """Runs a benchmark and prints its figures."""
    options = Options.parse(description)
    rows = [figure.as_dict(name) for figure in asyncio.run(_awaited(run(options)))]
    if options.json:
        for row in rows:
            print(json.dumps(row), flush=True)
    else:
        print(f"{name}\n{table(rows)}", flush=True)


async def _awaited(work: Awaitable[list[Figure]]) -> list[Figure]:
    return await work


Block = Callable[[], Awaitable[float]]


async def interleave(blocks: Mapping[str, Block], repeats: int) -> dict[str, float]:
    """Runs the contenders' blocks in turn, there and back again, so that all see the same noise; gives medians.

    The first round only warms up.
    """
    found: dict[str, list[float]] = {name: [] for name in blocks}
    order = list(blocks)
    for turn in range(repeats + 1):
        for name in order:
            value = await blocks[name]()
            if turn:
                found[name].append(value)
        order.reverse()
    return {name: statistics.median(values) for name, values in found.items()}


def scaled(values: Mapping[str, float], factor: float) -> dict[str, float]:
    """All values times a factor."""
    return {name: value * factor for name, value in values.items()}


# process trees


def tree(root: int, mark: str | None = None) -> list[psutil.Process]:
    """A process, all below it, and all that carry its mark in their environment."""
    top = psutil.Process(root)
    found = {process.pid: process for process in [top, *top.children(recursive=True)]}
    if mark is not None:
        for process in psutil.process_iter():
            try:
                if process.pid not in found and process.environ().get(TREE) == mark:
                    found[process.pid] = process
            except (psutil.Error, OSError):
                continue
    return list(found.values())


def memory(processes: Iterable[psutil.Process]) -> float:
    """The proportional set size of all these processes, in MiB (the resident size where there is no such thing)."""
    total = 0
    for process in processes:
        try:
            info = process.memory_full_info()
        except psutil.Error:
            continue
        total += getattr(info, "pss", info.rss)
    return total / 2**20


@dataclass(frozen=True, slots=True)
class Usage:
    """What some processes have used up to a moment."""

    at: float
    cpu: float
    switches: int

    @classmethod
    def of(cls, processes: Iterable[psutil.Process]) -> Self:
        """Adds up all threads of all processes."""
        cpu, switches = 0.0, 0
        for process in processes:
            try:
                seconds, times = _usage(process)
            except (psutil.Error, OSError):
                continue
            cpu, switches = cpu + seconds, switches + times
        return cls(time.perf_counter(), cpu, switches)

    def since(self, before: Usage) -> tuple[float, float]:
        """Percent of one processor, and voluntary context switches per second, since then."""
        seconds = self.at - before.at
        return (self.cpu - before.cpu) / seconds * 100, (self.switches - before.switches) / seconds


def cpu_times(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """The seconds that each of these processes has used a processor, as far as it still exists."""
    found = {}
    for process in processes:
        with suppress(psutil.Error, OSError):
            found[process.pid] = _usage(process)[0]
    return found


def _usage(process: psutil.Process) -> tuple[float, int]:
    """Seconds on a processor and voluntary context switches; on Linux to the nanosecond and of all threads."""
    if not psutil.LINUX:
        times = process.cpu_times()
        return times.user + times.system, process.num_ctx_switches().voluntary
    cpu = time.clock_gettime(
        (~process.pid << 3) | 2
    )  # the processor clock of another process, see clock_getcpuclockid(3)
    switches = 0
    for task in os.scandir(f"/proc/{process.pid}/task"):
        for line in Path(task.path, "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                switches += int(line.split()[1])
    return cpu, switches
