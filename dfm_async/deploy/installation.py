"""The federation as its sites have it: its file, with every file that it refers to."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dfm_async.errors import FederationError, FileProblem
from dfm_async.federation.federation import Federation

__all__ = ["FederationFiles"]

_ROOT: Final = "federation.dfm.yaml"


@dataclass(frozen=True, slots=True)
class FederationFiles:
    """The files of a federation, to be installed at its sites.

    Attributes:
        root: the path of its own file, from the folder of all of them.
        contents: what is in each, by its path.
    """

    root: str
    contents: dict[str, bytes]

    @classmethod
    def of(cls, federation: Federation) -> FederationFiles:
        """Gives the files that a federation was read from; of one that was made in Python, the one it would have.

        Raises:
            FederationError: it cannot be written to a file, or its files find each other only where they are now.
        """
        if not federation.files:
            return cls(_ROOT, {_ROOT: federation.to_yaml().encode()})
        shared = os.path.commonpath([os.path.dirname(path) for path in federation.files])
        root, *others = (Path(os.path.relpath(path, shared)).as_posix() for path in federation.files)
        contents = {name: Path(path).read_bytes() for name, path in zip((root, *others), federation.files, strict=True)}
        found = cls(root, contents)
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

    def write(self, folder: Path) -> None:
        """Writes all of them."""
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
