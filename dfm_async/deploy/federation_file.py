"""A federation as a file for each of its sites."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

from dfm_async.errors import FederationError
from dfm_async.federation.federation import Federation
from dfm_async.federation.site import Site
from dfm_async.model.resources import CacheConfig, VaultConfig


@dataclass(frozen=True, slots=True)
class FederationFile:
    """A federation that can be written to a file, as each of its sites gets it: one file, without references.

    Files that the federation's own file refers to, wherever they are on this machine, are merged into it.
    """

    federation: Federation

    @classmethod
    def of(cls, federation: Federation) -> FederationFile:
        """Return the file of a federation. Raises ``FederationError`` if there can be none."""
        federation.to_yaml()
        return cls(federation)

    def for_site(self, site: str) -> str:
        """Return the text that a site needs: all operations, its own configuration, and the names of other sites.

        The configuration of a site is private: the locations of its vault and its cache and how they are opened, the
        constants of its adapters. It is not sent to other sites.
        """
        alone = copy.copy(self.federation)
        alone.sites = {name: _bare(found) for name, found in self.federation.sites.items()}
        alone.provision = {}  # how all of it is deployed
        if site in self.federation.sites:
            alone.sites[site] = _movable(self.federation.sites[site])
        return alone.to_yaml()


def _bare(site: Site) -> Site:
    """Return a site of which nothing but its name is known."""
    bare = Site(site.federation, site.name)
    bare.cache = CacheConfig()
    return bare


def _movable(site: Site) -> Site:
    """Return a site for another folder: a vault beside the federation's files here is beside them there, too."""
    vault, files = site.vault, site.federation.files
    path = vault.args.get("path") if isinstance(vault, VaultConfig) and vault.path == "file" else None
    if not files or not isinstance(path, str) or not os.path.isabs(path):
        return site
    shared = os.path.commonpath([os.path.dirname(file) for file in files])
    if shared == os.path.dirname(shared) or os.path.commonpath([path, shared]) != shared:
        return site  # it is elsewhere, or the files have no folder in common
    found = copy.copy(site)
    beside = os.path.relpath(path, os.path.dirname(files[0]))
    found.vault = VaultConfig(path="file", args={**vault.args, "path": beside})
    return found


def file_of(federation: Federation, *, required: bool) -> FederationFile | None:
    """Return the file of a federation; None if it cannot be written to one and need not be: its code travels."""
    try:
        return FederationFile.of(federation)
    except FederationError:
        if federation.files or required:
            raise
        return None
