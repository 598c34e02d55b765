"""What runs at the sites. How the classes are used, and with which arguments, says ``federation.dfm.yaml``."""

from typing import Any

from dfm_async.discovery import AdvisedOneOf, field_advisor
from dfm_async.site import Provider, Site

_LEVELS = {"Elbe": [180.0, 410.0, 520.0], "Rhine": [230.0, 240.0]}


class Network(Provider):
    """The stations of one owner: what the adapters of this provider share."""

    def __init__(self, site: Site, unit: str) -> None:
        super().__init__(site)
        self.unit = unit


class Levels:
    """Reads the levels of a river."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def body(self, river: str, unit: str, token: str) -> dict[str, Any]:
        """Asks the stations, which want a token."""
        self._site.dfm_context.logger.debug("asks for %s with a token of %d letters", river, len(token))
        return {"river": river, "unit": unit, "levels": _LEVELS[river]}

    @field_advisor("river")
    async def rivers(self, value: Any, context: Any) -> AdvisedOneOf:
        """Tells which rivers there are."""
        return AdvisedOneOf(sorted(_LEVELS))


class Highest:
    """Finds the highest level. The office has a slow machine for it, the model a fast one."""

    def body(self, series: dict[str, Any]) -> float:
        """Takes what ``Levels`` gives."""
        return float(max(series["levels"]))


class Report:
    """Writes a sentence."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    async def body(self, river: str, level: float, words: str) -> str:
        """``words`` is a constant of the file, which calls at this site may replace."""
        return f"{river}: {words if level > self._limit else 'all is well'} ({level:.0f} cm)"
