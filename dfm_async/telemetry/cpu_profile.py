"""Where the time of jobs went: by site, worker and operation, and by the functions that calls were in."""

from __future__ import annotations

import hashlib
import html
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from dfm_async.base.files import replaced
from dfm_async.base.text import columns, time_text
from dfm_async.telemetry.sampling import OTHER
from dfm_async.telemetry.spans import Span

WAITING: Final = "(waiting)"
"""The frame of a thread that uses no processor."""
_MOST_STACKS: Final = 50_000
"""The most different stacks that are kept; the others are added up."""
_SHOWN: Final = 15
"""The number of functions that the table lists."""
_NARROWEST: Final = 0.0005
"""The smallest part of the time that a page draws."""


class CpuRow(msgspec.Struct, kw_only=True):
    """The calls of one operation in one worker. All times are sums over the calls, in seconds.

    Attributes:
        site: the site.
        worker: the process id of the worker.
        operation: the operation.
        calls: the number of calls that have ended.
        errors: how many of them have failed.
        total: how long they took, from their start to their end.
        running: how long they were using a processor; sampled.
        queued: how long they waited before they could start, for a thread, a worker or a limit of the site.
    """

    site: str
    worker: int
    operation: str
    calls: int = 0
    errors: int = 0
    total: float = 0.0
    running: float = 0.0
    queued: float = 0.0

    @property
    def waiting(self) -> float:
        """How long they waited after their start, for files, networks, locks or the interpreter."""
        return max(0.0, self.total - self.running)


class CpuProfile:
    """Where the time went: made by ``session.profile(cpu=True)``. It prints as tables.

    Attributes:
        left_out: the number of calls and other spans that sites could not report; they are missing in the numbers.
    """

    def __init__(self) -> None:
        self.left_out: int = 0
        self._rows: dict[tuple[str, int, str], CpuRow] = {}
        self._stacks: dict[tuple[str, ...], float] = {}
        """Seconds by stack: site, worker, operation, and the functions from the outermost on."""

    @property
    def rows(self) -> list[CpuRow]:
        """The operations in each worker, the longest first."""
        return sorted(self._rows.values(), key=lambda row: -row.total)

    @property
    def stacks(self) -> list[tuple[tuple[str, ...], float]]:
        """The sampled stacks, with their seconds: site, worker, operation, and functions from the outermost on."""
        return sorted(self._stacks.items())

    def __bool__(self) -> bool:
        """Return whether any call was profiled."""
        return bool(self._rows)

    def add(self, span: Span) -> None:
        """Add the span of a call, or of a location."""
        found = span.attributes
        if span.name == "dfm.site":
            self.left_out += int(found.get("dfm.spans_left_out", 0))
        if span.name != "dfm.operation":
            return
        key = (span.process, int(found.get("dfm.worker", 0)), str(found.get("dfm.operation")))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = CpuRow(site=key[0], worker=key[1], operation=key[2])
        row.calls += 1
        row.errors += span.status == "error"
        row.total += max(0, span.end - span.start) / 1e9
        row.queued += float(found.get("dfm.waited", 0.0))
        above = (key[0], f"worker {key[1]}", key[2])
        for running, waiting, names in _samples(str(found.get("dfm.stacks", ""))):
            row.running += running
            self._add((*above, *names), running)
            self._add((*above, *names, WAITING), waiting)

    def _add(self, stack: tuple[str, ...], seconds: float) -> None:
        if not seconds:
            return
        if stack not in self._stacks and len(self._stacks) >= _MOST_STACKS:
            stack = (*stack[:3], OTHER)
        self._stacks[stack] = self._stacks.get(stack, 0.0) + seconds

    # text

    def __str__(self) -> str:
        if not self:
            return "no calls were profiled"
        rows: list[tuple[str, ...]] = [
            ("operation", "site", "worker", "calls", "total", "running", "waiting", "queued")
        ]
        for row in self.rows:
            times = [time_text(value) for value in (row.total, row.running, row.waiting, row.queued)]
            rows.append((row.operation, row.site, str(row.worker), str(row.calls), *times))
        text = columns(rows)
        if functions := self._functions():
            text += "\n\n" + columns([("function", "running", "waiting", "total"), *functions[:_SHOWN]])
        if self.left_out:
            text += f"\n\n{self.left_out:,} spans could not be recorded, and are missing here"
        return text

    __repr__ = __str__

    def _functions(self) -> list[tuple[str, ...]]:
        """Return the functions that took longest themselves: how long they ran, waited, and took with their callees."""
        found: dict[str, list[float]] = {}
        for stack, seconds in self._stacks.items():
            waits = stack[-1] == WAITING
            names = stack[3 : len(stack) - waits]
            for name in set(names):
                found.setdefault(name, [0.0, 0.0, 0.0])[2] += seconds
            if names:
                found[names[-1]][waits] += seconds
        ordered = sorted(found.items(), key=lambda item: -item[1][0] - item[1][1])
        return [(name, *map(time_text, times)) for name, times in ordered]

    # files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a flame graph: a page (``.html``), a file for speedscope (``.json``), or collapsed stacks (``.txt``).

        Raises:
            ValueError: the name ends otherwise.
            OSError: the file cannot be written.
        """
        target = Path(path)
        data = {".html": self._page, ".json": self._speedscope, ".txt": self._collapsed}[profile_suffix(target)]()
        with replaced(target) as file:
            file.write(data.encode())

    def _collapsed(self) -> str:
        return "".join(f"{';'.join(stack)} {seconds * 1e6:.0f}\n" for stack, seconds in self.stacks)

    def _speedscope(self) -> str:
        frames: dict[str, int] = {}
        profiles: dict[tuple[str, ...], tuple[list[list[int]], list[int]]] = {}
        for stack, seconds in self.stacks:
            samples, weights = profiles.setdefault(stack[:2], ([], []))
            samples.append([frames.setdefault(name, len(frames)) for name in stack[2:]])
            weights.append(round(seconds * 1e6))
        found: dict[str, Any] = {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": [
                {
                    "type": "sampled",
                    "name": " ".join(worker),
                    "unit": "microseconds",
                    "startValue": 0,
                    "endValue": sum(weights),
                    "samples": samples,
                    "weights": weights,
                }
                for worker, (samples, weights) in profiles.items()
            ],
        }
        return msgspec.json.encode(found).decode()

    def _page(self) -> str:
        template = files("dfm_async.telemetry").joinpath("flame.html").read_text(encoding="utf-8")
        root = _FrameNode("all")
        for stack, seconds in self._stacks.items():
            root.add(stack, seconds)
        graph = "".join(root.markup(root.seconds)) if root.seconds else "<p>nothing was sampled</p>"
        return template.replace("{{tables}}", html.escape(str(self))).replace("{{graph}}", graph)


def profile_suffix(path: Path) -> str:
    """Return the format of a file by its name.

    Raises:
        ValueError: there is no such format.
    """
    if path.suffix not in (".html", ".json", ".txt"):
        raise ValueError(
            f"{path}: the name must end with .html (a page), .json (speedscope) or .txt (collapsed stacks)"
        )
    return path.suffix


def _samples(text: str) -> Iterator[tuple[float, float, list[str]]]:
    """Yield the seconds that each stack ran and waited, and its frames. Invalid lines are skipped."""
    for line in text.splitlines():
        running, _, rest = line.partition(" ")
        waiting, _, stack = rest.partition(" ")
        if running.isdecimal() and waiting.isdecimal() and stack:
            yield int(running) / 1e6, int(waiting) / 1e6, stack.split(";")


class _FrameNode:
    """A frame of the graph, with those that it has called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self.called: dict[str, _FrameNode] = {}

    def add(self, stack: tuple[str, ...], seconds: float) -> None:
        node = self
        node.seconds += seconds
        for name in stack:
            node = node.called.setdefault(name, _FrameNode(name))
            node.seconds += seconds

    def markup(self, whole: float) -> Iterator[str]:
        """Yield the frame as HTML; it is as wide as its part of the time."""
        name, part = html.escape(self.name), self.seconds / whole
        colour = "#c8ccd2" if self.name == WAITING else f"hsl({_hue(self.name)} 60% 75%)"
        yield f'<div class="frame" style="flex-grow:{self.seconds * 1e6:.0f}">'
        title = f"{name}: {time_text(self.seconds)}, {part:.1%}"
        yield f'<button style="background:{colour}" title="{title}">{name}</button>'
        shown = [node for node in self.called.values() if node.seconds / whole >= _NARROWEST]
        if shown:
            yield '<div class="called">'
            for node in sorted(shown, key=lambda node: node.name):
                yield from node.markup(whole)
            rest = self.seconds - sum(node.seconds for node in shown)
            yield f'<div class="own" style="flex-grow:{max(0.0, rest) * 1e6:.0f}"></div></div>'
        yield "</div>"


def _hue(name: str) -> int:
    return 10 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2).digest()) % 50
