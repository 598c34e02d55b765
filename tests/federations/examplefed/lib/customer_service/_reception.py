"""A formal greeting, which names the house."""

from nv_dfm_core.exec import Provider, Site


class GreetMeReception:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site
        self._provider = provider

    async def body(self, name: str, venue: str) -> str:
        return f"{venue} has the honour to receive you, {name}."
