"""What is installed at a site: its settings, its federation, and whose jobs come."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dfm_async.errors import DfmError
from dfm_async.federation.federation import Federation
from dfm_async.federation.operation import Adapter
from dfm_async.model.flare import SETTINGS_FILE, SiteSettings
from dfm_async.model.resources import SiteConfig
from dfm_async.site.authorizing import Authorizer
from dfm_async.site.loading import Loader
from dfm_async.targets.flare.admission import User
from dfm_async.targets.flare.crews import Installed
from dfm_async.targets.flare.node import HUB
from dfm_async.workers.shipping import ship_site

__all__ = ["fingerprint", "load_authorizer", "load_installed", "load_user", "read_settings"]


def read_settings(folder: Path, site: str) -> SiteSettings:
    """Reads the settings of a site; without any, it offers nothing.

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
    """Tells operations apart that take different arguments."""
    parameters = sorted(adapter.signature.parameters.parameters)
    return hashlib.sha256("\0".join([adapter.operation, *parameters]).encode()).hexdigest()[:16]


def operations_of(adapters: Any) -> dict[str, str]:
    """What a site offers, and the fingerprint of each."""
    return {adapter.operation: fingerprint(adapter) for adapter in adapters}


def load_installed(settings: SiteSettings, folder: Path) -> Installed:
    """Reads the federation that is installed at a site. Nothing is imported: workers do that."""
    if settings.federation is None:
        return Installed({}, None, problem="no federation is installed there")
    try:
        federation = Federation.from_yaml(folder / settings.federation, compat=settings.compat)
        site = federation.sites.get(settings.site)
        if site is None and settings.site in (settings.homesite, HUB):
            site = Federation(federation.name, compat=settings.compat).site(
                settings.site
            )  # what needs no operation can run there
        if site is None:
            return Installed({}, None, problem=f"its federation {federation.name!r} has no site {settings.site!r}")
        shipped = ship_site(site, settings.homesite).data
        adapters = site.adapters.values()
        apart = frozenset(adapter.operation for adapter in adapters if adapter.in_process)
        return Installed(operations_of(adapters), shipped, site.workers, site.threads, own_process=apart)
    except (DfmError, OSError) as error:
        return Installed({}, None, problem=f"its federation cannot be read: {error}")


def load_user(meta: Path) -> User:
    """Whose jobs a carrier carries: FLARE writes it down, for every participant that the job is sent to."""
    found = json.loads(meta.read_text())
    return User(
        str(found.get("submitter_name", "")),
        str(found.get("submitter_org", "")),
        str(found.get("submitter_role", "")),
        found.get("byoc") is True,
    )


def load_authorizer(settings: SiteSettings) -> Authorizer | None:
    """Imports and builds the authorizer of a site: the site itself names it.

    Raises:
        LoadingError: it cannot be loaded, or is none.
    """
    named = settings.authorizer
    if named is None:
        return None
    loader = Loader(settings.site, SiteConfig())
    kind = loader.load(named.path, "authorizer", _lacks)
    found = kind(**named.args)
    assert isinstance(found, Authorizer)  # noqa: S101 - just checked
    return found


def _lacks(kind: type[Any]) -> str | None:
    return None if callable(getattr(kind, "authorize", None)) else "has no method 'authorize'"
