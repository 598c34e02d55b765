"""Federations as DFM's users have them: files, and packages of adapters that they name.

This folder is the root that their packages are imported from: ``examplefed.lib.GreetMe`` and so on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent
NAMES: Final = ("examplefed", "minifed", "myfed")
FROM_ROOT: Final = "skyfed"
"""The federation whose references begin at this folder, so that it can be read only by a program that runs here."""
PACKAGES: Final = (*NAMES, FROM_ROOT, "skylib")


def file_of(name: str) -> Path:
    """The file of a federation."""
    return ROOT / name / "configs" / "federation.dfm.yaml"
