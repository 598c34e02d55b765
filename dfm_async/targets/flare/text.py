"""Texts of other organisations, made fit to be shown and written down."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["cleaned", "cut"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What could move a terminal's cursor, change its colours, or let a text be read in another order."""


def cleaned(text: str, longest: int) -> str:
    """Writes control characters out, except for the ends of lines and tabs, and cuts what is too long."""
    text = cut(text, longest)
    return text if text.isascii() and text.isprintable() else _CONTROL.sub(_written_out, text)


def cut(text: str, longest: int) -> str:
    """Cuts a text after so many bytes; says so."""
    if len(text) * 4 <= longest:
        return text
    data = text.encode("utf-8", "backslashreplace")
    return text if len(data) <= longest else data[:longest].decode("utf-8", "ignore") + "…"


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
