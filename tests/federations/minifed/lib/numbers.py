"""Numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nv_dfm_core.exec import Provider, Site


class Square:
    def __init__(self, site: Site, provider: Provider | None) -> None:
        self._site = site
        self._provider = provider

    async def body(self, x: float) -> float:
        return x * x


class Scale:
    def __init__(self, bias: float, provider: Provider | None) -> None:
        self._bias = bias
        self._provider = provider

    async def body(self, x: float, factor: float) -> float:
        return x * factor + self._bias


class Range:
    def body(self, count: int, start: int = 0) -> Iterator[int]:
        return iter(range(start, start + count))
