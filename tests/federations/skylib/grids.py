"""Calculations with fields, and pictures of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from nv_dfm_core.exec import Provider, Site
from nv_dfm_core.exec.discovery import AdvisedOneOf, AdvisedValue, field_advisor
from PIL import Image


class Norm:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    async def body(
        self, data: Any, variables: list[str], output_name: str | None = None, p: float | None = None
    ) -> Any:
        power = 2.0 if p is None else p
        total = sum(np.abs(data[name]) ** power for name in variables)
        return (total ** (1 / power)).to_dataset(name=output_name or "norm").assign_attrs(data.attrs)

    @field_advisor("p")
    async def powers(self, value: Any, context: Any) -> AdvisedValue:
        return AdvisedOneOf([1.0, 2.0])


class ToLevels:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    def body(self, data: Any, variable: str, highest: float) -> Any:
        levels = np.round(data[variable].clip(0, highest) / highest * 255).astype(np.uint8)
        return levels.to_dataset(name=variable)


class Render:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    def body(self, data: Any, variable: str) -> Iterator[Any]:
        for time in data["time"].values:
            yield Image.fromarray(data[variable].sel(time=time).values)
