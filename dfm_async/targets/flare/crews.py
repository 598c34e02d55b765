"""The code that a site has, installed or brought by users, and the workers for each version of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dfm_async.errors import DfmError
from dfm_async.model.flare import SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.model.stats import SiteStats
from dfm_async.targets.flare import messages as fm
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.crew import Crew
from dfm_async.workers.fork_server import ForkServer

__all__ = ["Crews", "Installed"]

_log = logging.getLogger(__name__)

_MOST_OFFERS: Final = 64
"""How many versions of its code a user may have here."""
_REPORT_EVERY: Final = 0.5


class Installed(msgspec.Struct, frozen=True):
    """What is installed at a site: its operations, their fingerprints, and their code ready for workers."""

    operations: dict[str, str]
    shipped: bytes | None
    workers: int | None = None
    threads: int = 8
    problem: str = ""
    """Why nothing is offered, if something is wrong with it."""
    own_process: frozenset[str] = frozenset()
    """The operations that have a process of their own."""


class Crews:
    """Starts workers for code when it is first needed, and ends them when nobody needs it any more.

    Args:
        settings: what the site decides for itself.
        user: the name of the user whose jobs come.
        installed: what the site offers.
        options: how workers start, and the graces.
        audit: where it is recorded what others did.
        tell: tells the hub something.
        on_message: takes what workers say.
        allow_code: whether the user may bring code.
    """

    def __init__(
        self,
        settings: SiteSettings,
        user: str,
        installed: Installed,
        options: LocalOptions,
        audit: AuditLog,
        tell: Callable[[Any], None],
        on_message: Callable[[Any], None],
        *,
        allow_code: bool,
    ) -> None:
        self.fork_server: ForkServer | None = None
        """What starts workers, if that does."""
        self._site = settings.site
        self._environment = settings.environment
        self._user = user
        self._allow_code = allow_code
        self._installed = installed
        self._options = options
        self._audit = audit
        self._tell = tell
        self._on_message = on_message
        self._offers: dict[str, fm.Offer] = {}
        self._crews: dict[str, Crew] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._report_timer: asyncio.TimerHandle | None = None

    # code

    def offer(self, offer: fm.Offer) -> None:
        """A user brings code.

        Raises:
            OSError: it cannot be recorded, and so must not come.
        """
        digest = hashlib.sha256(offer.shipped).hexdigest()
        reason = ""
        if not self._allow_code:
            reason = "this site does not run code that users bring"
        elif offer.site != self._site or offer.key != digest:
            reason = "it is not what it says it is"
        elif offer.python != fm.PYTHON:
            reason = f"it comes from Python {offer.python}, and this site runs Python {fm.PYTHON}"
        elif offer.key not in self._offers and len(self._offers) >= _MOST_OFFERS:
            reason = f"there are {_MOST_OFFERS} others"
        about = {"user": self._user, "sha256": digest, "bytes": len(offer.shipped)}
        if reason:
            _log.warning("code of user %s is refused: %s", self._user, reason)
            self._audit.note("code refused", reason=reason, **about)
        else:
            self._audit.write("code", **about)
            self._offers[offer.key] = offer

    def drop(self, message: fm.Drop) -> None:
        """Nobody will need some code any more."""
        self._offers.pop(message.key, None)
        crew = self._crews.get(message.key)
        if crew is not None:
            crew.wanted = False
            self.left(message.key, crew)

    # workers

    def of(self, key: str) -> Crew:
        """The crew for some code; empty means what is installed.

        Raises:
            DfmError: there is no such code here, and why.
        """
        crew = self._crews.get(key)
        if crew is not None:
            return crew
        installed = self._installed
        shipped, workers, threads, lanes = installed.shipped, installed.workers, installed.threads, 0
        if key:
            offer = self._offers.get(key)
            if offer is None:
                raise DfmError(f"site {self._site!r} does not run code that users bring (allow_code in its settings)")
            shipped, workers, threads, lanes = offer.shipped, offer.workers, offer.threads, offer.lanes
        if shipped is None:
            raise DfmError(f"site {self._site!r} offers nothing: {installed.problem or 'no federation is installed'}")
        crew = self._crews[key] = Crew(
            self._site,
            shipped,
            workers,
            threads,
            lanes or self._options.lanes_for([workers]),
            self._options,
            self.fork_server,
            self._on_message,
            self._changed,
            self._environment,
            installed=not key,
        )
        return crew

    def left(self, key: str, crew: Crew) -> None:
        """A location has left a crew: one that nobody needs any more ends."""
        if not crew.wanted and not crew.seats and self._crews.get(key) is crew:
            del self._crews[key]
            for location in crew.pools:
                self._tell(fm.SiteReport(key, location, (), 0, (0, 0)))  # nobody need keep what was told of it
            task = asyncio.get_running_loop().create_task(crew.shut_down(self._options.shutdown_grace))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def pause(self, *, paused: bool) -> None:
        """Has all workers wait with what they send, or go on."""
        for crew in self._crews.values():
            crew.pause(paused=paused)

    def when_read(self, call: Callable[[], None]) -> None:
        """Calls when everything that workers have said by now has been read."""
        workers = [worker for crew in self._crews.values() for pool in crew.pools.values() for worker in pool.processes]
        left = len(workers)

        def read() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                call()

        if not workers:
            read()
        for worker in workers:
            worker.when_read(read)

    async def shut_down(self) -> None:
        """Ends all workers; returns when all are reaped."""
        if self._report_timer is not None:
            self._report_timer.cancel()
        crews = [crew.shut_down(self._options.shutdown_grace) for crew in self._crews.values()]
        for failed in await asyncio.gather(*crews, *self._ending, return_exceptions=True):
            if isinstance(failed, BaseException):
                _log.error("workers of site %s did not end as they should", self._site, exc_info=failed)
        self._crews.clear()

    # reports

    def _changed(self) -> None:
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(_REPORT_EVERY, self._report)

    def _report(self) -> None:
        self._report_timer = None
        for key, crew in self._crews.items():
            for location, pool in crew.pools.items():
                self._tell(_report_of(key, location, pool.stats()))


def _report_of(offer: str, location: str, stats: SiteStats) -> fm.SiteReport:
    workers = tuple(
        fm.WorkerReport(
            worker.pid, worker.jobs, worker.memory, worker.lag, worker.unresponsive, worker.retired, worker.abandoned
        )
        for worker in stats.workers
    )
    return fm.SiteReport(offer, location, workers, stats.restarts, (stats.tokens.count, stats.tokens.bytes))
