"""Packages whose names are loaded when they are first used: workers and programs wait for what they import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, namespace: dict[str, Any], homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: its name.
        namespace: its ``globals()``, with its ``__all__``; what was loaded is kept there.
        homes: the modules, and the names that are defined in them.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(home), name)
        return value

    def names() -> list[str]:
        return [*namespace["__all__"], *(name for name in ("__version__",) if name in home_of)]

    return load, names
