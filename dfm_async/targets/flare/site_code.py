"""The code that a site runs: what is installed there, and what users bring."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from dfm_async.engine.site_host import Code
from dfm_async.errors import DfmError
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Adapter
from dfm_async.model.call_limits import SiteCapacity
from dfm_async.model.flare import SETTINGS_FILE, SiteSettings
from dfm_async.model.options import LocalOptions
from dfm_async.model.pool_size import IDLE_AFTER, Workers
from dfm_async.model.resources import SiteConfig
from dfm_async.runtime.permits import check_capacity
from dfm_async.site.authorizing import PipelineAuthorizer
from dfm_async.site.loading import Loader
from dfm_async.targets.flare import protocol as fm
from dfm_async.targets.flare.admission import HostJobUser
from dfm_async.targets.flare.audit import AuditLog
from dfm_async.targets.flare.node import HUB
from dfm_async.workers.shipping import ship_site

_log = logging.getLogger(__name__)

_MOST_OFFERS: Final = 64
"""The largest number of versions of a user's code at a site."""


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed at a site: its operations, their fingerprints, and their code ready for workers."""

    operations: dict[str, str]
    shipped: bytes | None
    workers: Workers = None
    threads: int = 8
    idle_after: float = IDLE_AFTER
    problem: str = ""
    """Why nothing is offered, if something is wrong with it."""
    own_process: frozenset[str] = frozenset()
    """The operations that have a process of their own."""
    capacity: SiteCapacity = SiteCapacity()
    """What the site has for its calls."""


class SiteCode:
    """Checks and records code that a user brings.

    Args:
        settings: what the site decides for itself.
        user: the name of the user whose jobs come.
        installed: what the site offers.
        options: how workers start.
        audit: the site's record of what others did there.
        allow_code: whether the user may bring code.
    """

    def __init__(
        self,
        settings: SiteSettings,
        user: str,
        installed: Installed,
        options: LocalOptions,
        audit: AuditLog,
        *,
        allow_code: bool,
    ) -> None:
        self._site = settings.site
        self._user = user
        self._allow_code = allow_code
        self._installed = installed
        self._options = options
        self._audit = audit
        self._offers: dict[str, fm.Offer] = {}

    def offer(self, offer: fm.Offer) -> None:
        """Take code that a user brings, or refuse it.

        Raises:
            OSError: it cannot be recorded, and so must not come.
        """
        digest = hashlib.sha256(offer.shipped).hexdigest()
        reason = ""
        if not self._allow_code:
            reason = "this site does not run code that users bring"
        elif offer.site != self._site or offer.key != digest:
            reason = "its name is not the hash of its content"
        elif offer.python != fm.PYTHON:
            reason = f"it comes from Python {offer.python}, and this site runs Python {fm.PYTHON}"
        elif offer.key not in self._offers and len(self._offers) >= _MOST_OFFERS:
            reason = f"the user has brought {_MOST_OFFERS} versions already"
        about = {"user": self._user, "sha256": digest, "bytes": len(offer.shipped)}
        if reason:
            _log.warning("code of user %s is refused: %s", self._user, reason)
            self._audit.note("code refused", reason=reason, **about)
        else:
            self._audit.write("code", **about)
            self._offers[offer.key] = offer

    def drop(self, key: str) -> None:
        """Forget code that a user has brought."""
        self._offers.pop(key, None)

    def find(self, key: str) -> Code:
        """Return some code; empty means what is installed.

        Raises:
            DfmError: there is no such code here, and why.
        """
        site, installed = self._site, self._installed
        if key:
            offer = self._offers.get(key)
            if offer is None:
                raise DfmError(f"site {site!r} does not run code that users bring (allow_code in its settings)")
            lanes = offer.lanes or self._options.lanes_for([offer.workers])
            # What the site itself declares counts more than what users do.
            capacity = offer.capacity if installed.shipped is None else installed.capacity
            return Code(
                shipped=offer.shipped,
                workers=offer.workers,
                threads=offer.threads,
                lanes=lanes,
                idle_after=offer.idle_after,
                capacity=capacity,
            )
        if installed.shipped is None:
            raise DfmError(f"site {site!r} offers no operations: {installed.problem or 'no federation is installed'}")
        # What the site itself has installed takes values of classes that its operations name, and of no others.
        return Code(
            shipped=installed.shipped,
            workers=installed.workers,
            threads=installed.threads,
            lanes=self._options.lanes_for([installed.workers]),
            known_only=True,
            capacity=installed.capacity,
            idle_after=installed.idle_after,
        )


# installed code and settings


def read_settings(folder: Path, site: str) -> SiteSettings:
    """Read the settings of a site; without any, it offers nothing.

    Raises:
        DfmError: they are wrong, and how.
    """
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return SiteSettings(site=site)
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), SiteSettings)
    except (yaml.YAMLError, msgspec.ValidationError, ValueError) as error:
        raise DfmError(f"{path}: {error}") from error


def fingerprint(adapter: Adapter) -> str:
    """Return a hash that differs between operations of different arguments."""
    parameters = sorted(adapter.signature.parameters.parameters)
    return hashlib.sha256("\0".join([adapter.operation, *parameters]).encode()).hexdigest()[:16]


def operations_of(adapters: Any) -> dict[str, str]:
    """Return the operations that a site offers, with their fingerprints."""
    return {adapter.operation: fingerprint(adapter) for adapter in adapters}


def load_installed(settings: SiteSettings, folder: Path) -> Installed:
    """Read the federation that is installed at a site. Nothing is imported: workers do that."""
    if settings.federation is None:
        return Installed(operations={}, shipped=None, problem="no federation is installed")
    try:
        federation = Federation.from_yaml(folder / settings.federation, compat=settings.compat)
        site = federation.sites.get(settings.site)
        if site is None and settings.site in (settings.homesite, HUB):  # what needs no operation can run there
            site = Federation(federation.name, compat=settings.compat).site(settings.site)
        if site is None:
            return Installed(
                operations={}, shipped=None, problem=f"its federation {federation.name!r} has no site {settings.site!r}"
            )
        shipped = ship_site(site, settings.homesite).data
        adapters = site.adapters.values()
        check_capacity(site.name, site.capacity, adapters)
        apart = frozenset(adapter.operation for adapter in adapters if adapter.in_process)
        return Installed(
            operations=operations_of(adapters),
            shipped=shipped,
            workers=site.workers,
            threads=site.threads,
            idle_after=site.idle_after,
            own_process=apart,
            capacity=site.capacity,
        )
    except (DfmError, OSError) as error:
        return Installed(operations={}, shipped=None, problem=f"its federation cannot be read: {error}")


def load_user(meta: Path) -> HostJobUser:
    """Return the user of a host job, as FLARE has recorded it for every participant of the job."""
    found = json.loads(meta.read_text())
    return HostJobUser(
        str(found.get("submitter_name", "")),
        str(found.get("submitter_org", "")),
        str(found.get("submitter_role", "")),
        found.get("byoc") is True,
    )


def load_authorizer(settings: SiteSettings) -> PipelineAuthorizer | None:
    """Import and build the authorizer that the settings of a site name.

    Raises:
        LoadingError: it cannot be loaded, or is not an authorizer.
    """
    named = settings.authorizer
    if named is None:
        return None
    loader = Loader(settings.site, SiteConfig())
    kind = loader.load(named.path, "authorizer", _lacks)
    found = kind(**named.args)
    assert isinstance(found, PipelineAuthorizer)  # noqa: S101 - just checked
    return found


def _lacks(kind: type[Any]) -> str | None:
    return None if callable(getattr(kind, "authorize", None)) else "has no method 'authorize'"
