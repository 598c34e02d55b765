"""Times, sizes and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns", "size_text", "time_text"]


def time_text(seconds: float) -> str:
    """A time as people write it."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"
    return "0 s"


def size_text(size: float) -> str:
    """A number of bytes as people write it."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Lays out rows in columns, the first row as their heads."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
