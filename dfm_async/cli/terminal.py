"""The terminal: what is written there is text, and nothing in it is markup."""

from __future__ import annotations

from typing import Final

from rich.console import Console

__all__ = ["terminal"]

_WIDE: Final = 10_000


def terminal(*, stderr: bool = False, width: int = _WIDE) -> Console:
    """Gives the terminal, or what stands in its place.

    Args:
        stderr: whether it is standard error.
        width: how many columns there are if it is no terminal; whoever reads lines wants them whole.
    """
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.file.isatty():  # also if colours are wanted there
        console.width = width
    return console
