"""How parts of this package that are not always installed can be had."""

from __future__ import annotations

__all__ = ["install_hint"]


def install_hint(name: str) -> str:
    """Return the command that installs an extra of this package, for error messages."""
    return f"pip install '.[{name}]' in a checkout of dfm_async"
