"""How things show themselves: as drawings, as HTML in notebooks, live while they change.

Pipelines, plans, federations, jobs, results and errors can be shown. That needs drawings, HTML and IPython, of which
they know nothing: they ask the renderer, and the root of the package says which one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

__all__ = ["Renderer", "Shown", "provide", "renderer"]


class Renderer(Protocol):
    """What can show the things of this library."""

    def svg(self, thing: Any) -> str:
        """Draws a pipeline or a plan."""
        ...

    def html(self, thing: Any) -> str:
        """Shows something as a part of a page."""
        ...

    async def show(self, job: Any) -> None:
        """Shows a job while it runs."""
        ...


_provided: list[Callable[[], Renderer]] = []


def provide(load: Callable[[], Renderer]) -> Callable[[], Renderer]:
    """Says who shows things. It is loaded when the first thing is to be shown."""
    _provided[:] = [load]
    return load


@cache
def renderer() -> Renderer:
    """Finds who shows things."""
    return _provided[0]()


class Shown:
    """Something that notebooks show as more than text."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return renderer().html(self)
