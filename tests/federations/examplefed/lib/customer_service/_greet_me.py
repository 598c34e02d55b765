"""A greeting whose words the site chooses."""

from nv_dfm_core.exec import Provider, Site


class GreetMe:
    def __init__(self, site: Site, provider: Provider | None):
        self._site = site
        self._provider = provider

    async def body(self, name: str, greet_fmt: str) -> str:
        return greet_fmt.format(name=name)
