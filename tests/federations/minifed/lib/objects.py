"""What sites and providers keep."""

from typing import Any

from nv_dfm_core.exec import Provider, Site


class AlphaSite(Site):
    def __init__(self, *args: Any, region: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.region = region


class Acme(Provider):
    def __init__(self, site: Site, unit: str) -> None:
        super().__init__(site)
        self.unit = unit


class Shelf:
    """A vault that has its secrets in its arguments."""

    def __init__(self, secrets: dict[str, str]) -> None:
        self._secrets = secrets

    def secret_for_key(self, key: str) -> str:
        return self._secrets[key]
