"""Which sites a hub has: those that are there, and those that are gone, and why."""

from __future__ import annotations

import time
from collections.abc import Collection

from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.node import HUB

__all__ = ["Roster"]


class Roster:
    """The sites of a carrier. A site that begins anew has another *life*.

    Args:
        deployed: the sites that the FLARE job was sent to.
    """

    def __init__(self, deployed: Collection[str]) -> None:
        self.deployed = list(deployed)
        self._expected = frozenset(deployed)
        self.sites: dict[str, fm.SiteHello] = {}
        """Those that are there, and what they have told of themselves."""
        self.gone: dict[str, str] = {}
        """Those that are not any more, or cannot be, and why."""
        self.began = time.time()
        """Since when there has been a hub, by the clock of the server."""
        self.since: dict[str, float] = {}
        """Since when those of :attr:`gone` have been."""
        self._lives: dict[str, str] = {}
        """The last life of each site that was there."""
        self._strangers: set[str] = set()
        """Those that were told that they were given up."""

    def expects(self, site: str) -> bool:
        """Whether the FLARE job was sent to a site: other participants of the federation have no part in it."""
        return site in self._expected

    def came(self, hello: fm.SiteHello) -> None:
        """A site is there."""
        site = hello.site
        self.sites[site], self._lives[site] = hello, hello.life
        self.gone.pop(site, None)
        self.since.pop(site, None)
        self._strangers.discard(site)

    def unfit(self, site: str, reason: str) -> None:
        """A site cannot take part."""
        self._leaves(site, reason)

    def _leaves(self, site: str, reason: str) -> None:
        self.gone[site], self.since[site] = reason, time.time()

    def lost(self, site: str, reason: str, life: str) -> bool:
        """A site is there no more; tells whether that is news. ``life``: which life of it, if that is known."""
        self._strangers.discard(site)
        if (life and life != self._lives.get(site)) or site in self.gone or not (site in self.sites or site == HUB):
            return False
        self.sites.pop(site, None)
        self._leaves(site, reason)
        return True

    def has(self, site: str, life: str) -> bool:
        """Whether a site is there, in this life, if that is known."""
        return site in self.sites and (not life or life == self._lives.get(site))

    def given_up(self, site: str) -> fm.GivenUp | None:
        """What a site is to be told that speaks and was taken for lost, if it was not told yet."""
        if site in self._strangers or not self.expects(site):
            return None
        self._strangers.add(site)
        return fm.GivenUp(self._lives.get(site, ""))
