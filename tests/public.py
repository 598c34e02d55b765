"""The public modules of the package and their names."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

_THEMES: Final = """
    callbacks client codecs compat discovery drawing errors events exchange exchange.sync federation flare planning
    session site stats store sync targets telemetry testing web
"""
PUBLIC_MODULES: Final[list[ModuleType]] = [
    importlib.import_module(name) for name in ["dfm_async", *(f"dfm_async.{theme}" for theme in _THEMES.split())]
]


def public_names(module: ModuleType) -> list[str]:
    """Return what a module lists as public."""
    names: list[str] = vars(module)["__all__"]
    return names
