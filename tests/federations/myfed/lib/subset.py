"""Slices of arrays."""

from typing import Any

from nv_dfm_core.exec import Provider, Site


class Subset:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    async def body(self, array: Any, index: list[int]) -> Any:
        return array[tuple(index)]
