"""The federation as its sites have it: its file, with every file that it refers to."""

from __future__ import annotations

import copy
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dfm_async.errors import FederationError, FileProblem
from dfm_async.federation.federation import Federation
from dfm_async.federation.site import Site
from dfm_async.model.resources import CacheConfig, VaultConfig

__all__ = ["FederationFiles"]

_ROOT: Final = "federation.dfm.yaml"


@dataclass(frozen=True, slots=True)
class FederationFiles:
    """The files of a federation, to be installed at its sites.

    Attributes:
        root: the path of its own file, from the folder of all of them.
        contents: what is in each, by its path.
        federation: the federation.
    """

    root: str
    contents: dict[str, bytes] = field(repr=False)
    federation: Federation = field(repr=False)

    @classmethod
    def of(cls, federation: Federation) -> FederationFiles:
        """Gives the files that a federation was read from; of one that was made in Python, the one it would have.

        Raises:
            FederationError: it cannot be written to a file, or its files find each other only where they are now.
        """
        if not federation.files:
            return cls(_ROOT, {_ROOT: federation.to_yaml().encode()}, federation)
        shared = os.path.commonpath([os.path.dirname(path) for path in federation.files])
        root, *others = (Path(os.path.relpath(path, shared)).as_posix() for path in federation.files)
        contents = {name: Path(path).read_bytes() for name, path in zip((root, *others), federation.files, strict=True)}
        found = cls(root, contents, federation)
        found._check(federation)
        return found

    def _check(self, federation: Federation) -> None:
        """Reads them somewhere else, where nothing but these files is: as the sites will."""
        with tempfile.TemporaryDirectory(prefix="dfm-") as elsewhere:
            self.write(Path(elsewhere))
            path = os.path.join(elsewhere, self.root)
            read = Federation.from_yaml(path, packages=federation.packages, compat=federation.compat)
            outside = [file for file in read.files if os.path.commonpath([file, elsewhere]) != elsewhere]
        if outside:
            told = "a site will not find it: refer to files by paths that begin at the file that names them"
            raise FederationError(federation.files[0], [FileProblem(file, 0, 0, "", told) for file in outside])

    def for_site(self, site: str) -> FederationFiles:
        """Gives the one file that a site needs: all operations, what the site itself has, and the names of the others.

        What a site has besides its name is its own affair: where its vault and its cache are and how they are opened,
        the constants of its adapters. Nothing of it is sent to others.

        Raises:
            FederationError: it cannot be written to a file.
        """
        alone = copy.copy(self.federation)
        alone.sites = {name: _bare(found) for name, found in self.federation.sites.items()}
        alone.provision = {}  # how all of it is deployed
        if site in self.federation.sites:
            alone.sites[site] = _movable(self.federation.sites[site])
        return FederationFiles(_ROOT, {_ROOT: alone.to_yaml().encode()}, alone)

    def write(self, folder: Path) -> None:
        """Writes all of them, for nobody but their owner."""
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.chmod(0o600)
            path.write_bytes(content)


def _bare(site: Site) -> Site:
    """A site of which nothing but its name is known."""
    bare = Site(site.federation, site.name, workers=None, threads=8)
    bare.cache = CacheConfig()
    return bare


def _movable(site: Site) -> Site:
    """A site as its file will say it elsewhere: a vault that is beside the federation's files here is so there, too."""
    vault, files = site.vault, site.federation.files
    path = vault.args.get("path") if isinstance(vault, VaultConfig) and vault.path == "file" else None
    if not files or not isinstance(path, str) or not os.path.isabs(path):
        return site
    shared = os.path.commonpath([os.path.dirname(file) for file in files])
    if os.path.commonpath([path, shared]) != shared:
        return site
    found = copy.copy(site)
    beside = os.path.relpath(path, os.path.dirname(files[0]))
    found.vault = VaultConfig(path="file", args={**vault.args, "path": beside})
    return found
