"""Text of other parties, made fit for terminals, pages and logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that could move a terminal's cursor, change its colours, or reorder the text on the screen."""


def cleaned(text: str, longest: int) -> str:
    """Escape control characters, except for line feeds and tabs, and cut the text after ``longest`` bytes."""
    text = cut(text, longest)
    return text if text.isascii() and text.isprintable() else _CONTROL.sub(_escaped, text)


def cut(text: str, longest: int) -> str:
    """Cut a text after ``longest`` bytes of UTF-8; an ellipsis marks the cut."""
    if len(text) * 4 <= longest:
        return text
    data = text.encode("utf-8", "backslashreplace")
    return text if len(data) <= longest else data[:longest].decode("utf-8", "ignore") + "…"


def shortened(value: Any, longest: int = 60) -> str:
    """Return the repr of a value for a message, cut after ``longest`` characters."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


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


def install_hint(name: str) -> str:
    """Return the command that installs an extra of this package, for error messages."""
    return f"pip install '.[{name}]' in a checkout of dfm_async"
