"""The sites of a federation, seen from the hub: which are present, and how they are asked for workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from dfm_async.engine.machine import Phase
from dfm_async.engine.run import Run
from dfm_async.model.status import JobStatus
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.node import HUB
from dfm_async.wire import messages as msg


class Membership:
    """The sites of a host job. A site that starts again is another *incarnation*.

    Args:
        deployed: the sites that the FLARE job was sent to.
    """

    def __init__(self, deployed: Collection[str]) -> None:
        self.deployed = list(deployed)
        self._expected = frozenset(deployed)
        self.sites: dict[str, fm.SiteHello] = {}
        """Those that are present, and what they have reported about themselves."""
        self.gone: dict[str, str] = {}
        """Those that are not any longer, or cannot be, and why."""
        self.began = time.time()
        """Since when there has been a hub, by the clock of the server."""
        self.since: dict[str, float] = {}
        """Since when those of :attr:`gone` have been."""
        self._incarnations: dict[str, str] = {}
        """The last incarnation of each site that was present."""
        self._notified: set[str] = set()
        """Those that were notified of their eviction."""

    def expects(self, site: str) -> bool:
        """Return whether the FLARE job was sent to a site: other participants of the federation have no part in it."""
        return site in self._expected

    def came(self, hello: fm.SiteHello) -> None:
        """Note that a site is present."""
        site = hello.site
        self.sites[site], self._incarnations[site] = hello, hello.incarnation
        self.gone.pop(site, None)
        self.since.pop(site, None)
        self._notified.discard(site)

    def unfit(self, site: str, reason: str) -> None:
        """Note that a site cannot take part, and why."""
        self.gone[site], self.since[site] = reason, time.time()

    def lost(self, site: str, reason: str, incarnation: str) -> bool:
        """Note that a site is lost; return whether it was present. ``incarnation``: the one that is lost, if known."""
        self._notified.discard(site)
        if (
            (incarnation and incarnation != self._incarnations.get(site))
            or site in self.gone
            or not (site in self.sites or site == HUB)
        ):
            return False
        self.sites.pop(site, None)
        self.unfit(site, reason)
        return True

    def has(self, site: str, incarnation: str) -> bool:
        """Return whether a site is present, in this incarnation if it is known."""
        return site in self.sites and (not incarnation or incarnation == self._incarnations.get(site))

    def eviction(self, site: str) -> fm.Evicted | None:
        """Return the notice for a site that still sends although it was taken for lost, if it did not get one yet."""
        if site in self._notified or not self.expects(site):
            return None
        self._notified.add(site)
        return fm.Evicted(self._incarnations.get(site, ""))


class RemoteHosts:
    """Asks the sites of a federation for workers; an absent site is asked when it comes.

    Args:
        members: which sites are present.
        send: sends a message to a site.
        request: describes a location of a run for its site.
    """

    def __init__(
        self, members: Membership, send: Callable[[str, Any], None], request: Callable[[Run, int], fm.Assign]
    ) -> None:
        self.start_timeout = 60.0
        """The number of seconds for which a job waits for an absent site."""
        self.members = members
        self.send = send
        self.request = request
        self.waiting: dict[str, dict[_RemoteAssignment, None]] = {}
        """The locations that wait for absent sites."""

    def assign(self, run: Run, at: int) -> _RemoteAssignment:
        """Ask the site of a location for a worker, or wait for the site."""
        assignment = _RemoteAssignment(self, run, at)
        assignment.begin()
        return assignment

    def site_came(self, site: str) -> None:
        """Note that a site is present: ask it for what jobs have waited for."""
        for assignment in self.waiting.pop(site, {}):
            assignment.ask()


class _RemoteAssignment:
    """One location of a run at a site of the federation."""

    replaceable = False
    """A lost site costs the job, or its run: the hub does not ask for a worker in the middle of a run."""
    address = ""
    """Sites know the addresses of their own workers, and nobody needs those of others."""

    def __init__(self, hosts: RemoteHosts, run: Run, at: int) -> None:
        self._hosts = hosts
        self._run = run
        self._at = at
        self._site = run.locations[at].site
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Ask the site, or wait for it."""
        hosts = self._hosts
        if self._site in hosts.members.sites:
            self.ask()
            return
        self._run.coordinator.machine.waiting_for = f"site {self._site!r}"
        hosts.waiting.setdefault(self._site, {})[self] = None
        self._timer = asyncio.get_running_loop().call_later(hosts.start_timeout, self._still_absent)

    def ask(self) -> None:
        """Ask the site, which is present."""
        self._stop_waiting()
        self.send(self._hosts.request(self._run, self._at))

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._hosts.waiting.get(self._site, {}).pop(self, None)

    def _still_absent(self) -> None:
        self._stop_waiting()
        coordinator = self._run.coordinator
        if coordinator.phase is Phase.WAITING:
            why = self._hosts.members.gone.get(self._site, "it has not connected")
            coordinator.halt(JobStatus.ABORTED, f"site {self._site!r} is not present: {why}", 0)

    def prepare(self) -> None:
        """Do nothing: the net came with the request."""

    def launched(self) -> None:
        """Do nothing: the site watches its workers."""

    def send(self, message: msg.Message | fm.Assign | fm.StopByForce | fm.Unassign) -> None:
        self._hosts.send(self._site, message)

    def stop_by_force(self, *, seen: bool) -> None:
        """Have the site end what has not stopped within its grace period."""
        self.send(fm.StopByForce(self._run.number, self._at, seen))

    def release(self, *, succeeded: bool) -> None:
        self._stop_waiting()
        if self._site in self._hosts.members.sites:
            self.send(fm.Unassign(self._run.number, self._at, succeeded))
