"""Rendering of pipelines, plans, federations, jobs, results and errors: as drawings, as HTML, live while they change.

These objects do not depend on drawings, HTML or IPython: they use the renderer, which the root of the package sets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol


class Renderer(Protocol):
    """Renders the objects of this library."""

    def svg(self, thing: Any) -> str:
        """Draw a pipeline or a plan."""
        ...

    def html(self, thing: Any) -> str:
        """Render an object as a part of a page."""
        ...

    async def show(self, job: Any) -> None:
        """Show a job while it runs."""
        ...


_provided: list[Callable[[], Renderer]] = []


def provide(load: Callable[[], Renderer]) -> Callable[[], Renderer]:
    """Set the renderer. It is loaded when the first object is rendered."""
    _provided[:] = [load]
    return load


@cache
def renderer() -> Renderer:
    """Return the renderer."""
    return _provided[0]()


class Shown:
    """An object that notebooks show as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return renderer().html(self)
