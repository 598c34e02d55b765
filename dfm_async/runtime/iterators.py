"""What counts as a stream of values."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["is_iterator"]


def is_iterator(value: Any) -> bool:
    """Tells whether a result is to be consumed element by element."""
    if isinstance(value, (list, dict, str, bytes, int, float, tuple, type(None))):
        return False
    return (inspect.isgenerator(value) or inspect.isasyncgen(value)) or (
        hasattr(value, "__next__") or hasattr(value, "__anext__")
    )
