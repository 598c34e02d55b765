"""Where the packages of federation files are found."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from dfm_async.federation.federation import Federation


def find_package(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Let the package of a federation be imported, if its file is in a folder of the package."""
    package = federation.name.partition(".")[0]
    for folder in Path(path).resolve().parents:
        if folder.name == package:
            search_first(folder.parent)
            break


def search_first(folder: Path) -> None:
    """Search a folder first for modules."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
