"""Fields of the wind, which are made up."""

from typing import Any

import numpy as np
import xarray as xr
from nv_dfm_core.exec import Provider, Site
from nv_dfm_core.exec.discovery import AdvisedDateRange, AdvisedDict, AdvisedSubsetOf, AdvisedValue, field_advisor

_SCALES = {"u10m": 3.0, "v10m": 4.0}


class LoadWinds:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site

    async def body(self, variables: list[str], selection: dict[str, str], fresh: bool | None = None) -> Any:
        time = selection["time"]
        self._site.dfm_context.logger.info("loading %s of %s", variables, time)
        name = "-".join([*variables, time.replace(":", "")])
        return self._site.kept(name, lambda: _winds(variables, time), fresh=bool(fresh))

    @field_advisor("variables", order=0)
    async def known_variables(self, value: Any, context: Any) -> AdvisedValue:
        return AdvisedSubsetOf(list(_SCALES))

    @field_advisor("selection")
    async def known_hours(self, value: Any, context: Any) -> AdvisedValue:
        return AdvisedDict({"time": AdvisedDateRange("2026-01-01", "2026-01-31")}, allow_extras=False)


def _winds(variables: list[str], time: str) -> Any:
    grid = np.arange(6.0).reshape(1, 2, 3) / 5
    fields = {name: (("time", "lat", "lon"), _SCALES[name] * grid) for name in variables}
    where = {"time": [time], "lat": [10.0, 20.0], "lon": [0.0, 120.0, 240.0]}
    return xr.Dataset(fields, coords=where, attrs={"source": "made up"})
