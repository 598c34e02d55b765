"""How deep data is nested: looked at before anything walks it that could run out of stack."""

from __future__ import annotations

from typing import Any

__all__ = ["is_deeper"]


def is_deeper(value: Any, limit: int) -> bool:
    """Tells whether dicts and lists are nested in more than so many levels. Goes down level by level."""
    level = [value] if type(value) is dict or type(value) is list else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
    return bool(level)
