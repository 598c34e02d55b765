"""JSON data as text: exactly what Python writes and reads again, with whole numbers of any size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final


def write_json(value: Any) -> str:
    """Write a value as JSON.

    Raises:
        TypeError, ValueError, RecursionError: it is not JSON data.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode()  # halves of surrogate pairs are no text
    return text


read_json: Final[Callable[[str], Any]] = json.loads
"""Read a value. Raises ValueError or RecursionError if it is not JSON."""
