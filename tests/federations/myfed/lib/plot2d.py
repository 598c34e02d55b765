"""Pictures of arrays, as arrays of grey values: an image library would only wrap them."""

from typing import Any

import numpy as np
from nv_dfm_core.exec import Provider, Site


class Plot2D:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    async def body(self, array: Any) -> Any:
        if array.ndim != 2:
            raise ValueError(f"a picture has two sides, and this array has {array.ndim}")
        least, greatest = array.min(), array.max()
        return np.round((array - least) / (greatest - least) * 255).astype(np.uint8)
