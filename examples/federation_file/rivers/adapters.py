"""The adapters of the sites. ``federation.dfm.yaml`` declares how they are used, and with which arguments."""

from typing import Any

from dfm_async.discovery import AdvisedOneOf, field_advisor
from dfm_async.site import Provider, Site

_LEVELS = {"Elbe": [180.0, 410.0, 520.0], "Rhine": [230.0, 240.0]}


class Network(Provider):
    """The stations of one owner, shared by the adapters of this provider."""

    def __init__(self, site: Site, unit: str) -> None:
        super().__init__(site)
        self.unit = unit


class Levels:
    """Read the levels of a river."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def body(self, river: str, unit: str, token: str) -> dict[str, Any]:
        """Query the stations, which require a token."""
        self._site.dfm_context.logger.debug("querying %s with a token of %d characters", river, len(token))
        return {"river": river, "unit": unit, "levels": _LEVELS[river]}

    @field_advisor("river")
    async def rivers(self, value: Any, context: Any) -> AdvisedOneOf:
        """Advise the known rivers."""
        return AdvisedOneOf(sorted(_LEVELS))


class Highest:
    """Find the highest level. The machine of the office is slow, that of the model site is fast."""

    def body(self, series: dict[str, Any]) -> float:
        """Return the highest level of a result of ``Levels``."""
        return float(max(series["levels"]))


class Report:
    """Write a sentence."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    async def body(self, river: str, level: float, words: str) -> str:
        """Return the sentence. ``words`` is a constant in the file, which calls at this site may replace."""
        return f"{river}: {words if level > self._limit else 'all is well'} ({level:.0f} cm)"
