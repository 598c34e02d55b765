"""Data with something wrong in it, for readers of untrusted input."""

from __future__ import annotations

from typing import Any


def spots(data: Any) -> list[tuple[Any, Any]]:
    """Return all members of lists and dicts, however deep: each with its holder and its key."""
    found: list[tuple[Any, Any]] = []
    stack = [data]
    while stack:
        holder = stack.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ():
            found.append((holder, key))
            stack.append(holder[key])
    return found
