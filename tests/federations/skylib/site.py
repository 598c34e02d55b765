"""A site that keeps what its adapters have loaded."""

import json
from collections.abc import Callable
from typing import Any

import xarray as xr
from nv_dfm_core.exec import Site


class KeepingSite(Site):
    def kept(self, name: str, load: Callable[[], Any], *, fresh: bool) -> Any:
        """Gives what an earlier call has loaded; its attributes say so."""
        path = self.cache_storage("winds") / f"{name}.json"
        if path.exists() and not fresh:
            return xr.Dataset.from_dict(json.loads(path.read_text())).assign_attrs(kept="yes")
        found = load()
        path.write_text(json.dumps(found.to_dict()))
        return found
