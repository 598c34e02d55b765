"""Limits of containers: of the size of a dict, and of the depth of nested data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dict that evicts its oldest item when a new key would exceed the limit.

    Setting a key that is present does not change its age; :meth:`use` makes it the newest.

    Args:
        limit: the largest number of items.
        on_evict: is called with the key and the value of each evicted item.
    """

    __slots__ = ("_on_evict", "limit")

    def __init__(self, limit: int, on_evict: Callable[[K, V], object] | None = None) -> None:
        super().__init__()
        self.limit = limit
        self._on_evict = on_evict

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.limit:
            evicted = self.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(*evicted)

    def use(self, key: K) -> V | None:
        """Return the value of a key, which becomes the newest; None if it is missing."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)


def is_deeper(value: Any, limit: int) -> bool:
    """Return whether dicts and lists are nested deeper than a limit. Not recursive: for checks before code that is."""
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
