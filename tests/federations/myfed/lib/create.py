"""Arrays whose values rise."""

from typing import Any

import numpy as np
from nv_dfm_core.exec import Provider, Site


class Create:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    async def body(self, shape: list[int], min: float = 0.0, max: float = 1.0) -> Any:  # noqa: A002 - the file's names
        sides = np.meshgrid(*(np.linspace(0.0, 1.0, length) for length in shape), indexing="ij")
        return min + (max - min) * np.mean(sides, axis=0)
