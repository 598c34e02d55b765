r"""The directive ``drawing``: an SVG of the folder ``drawings``, inside of the page, with its caption.

It stands in the page itself, rather than behind a link, so that it has the colours of the page: light and dark. The
files hold shapes with classes and no colours; ``_static/pages.css`` has those.
"""

import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

ARROW = (
    '<defs><marker id="{id}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
)


class Drawing(Directive):
    """Shows ``drawings/NAME.svg``."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {}

    def run(self) -> list[nodes.Node]:
        """Gives a figure: the drawing, and the content as its caption."""
        environment = self.state.document.settings.env
        name = self.arguments[0]
        path = Path(environment.srcdir) / "drawings" / f"{name}.svg"
        if not path.is_file():
            raise self.error(f"there is no drawing {path.name}")
        environment.note_dependency(str(path))
        figure = nodes.container(classes=["drawing"])
        figure += nodes.raw("", inline(name, path.read_text(encoding="utf-8")), format="html")
        caption = nodes.container(classes=["drawing-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        if caption.children:
            figure += caption
        return [figure]


def inline(name: str, source: str) -> str:
    """A drawing for the inside of a page: its arrows have an end, and ids of their own."""
    opened = re.search(r"<svg[^>]*>", source)
    if opened is None:
        raise ValueError(f"{name} is no SVG")
    arrow = f"arrow-{name}"
    drawn = source[: opened.end()] + ARROW.format(id=arrow) + source[opened.end() :]
    drawn = re.sub(r'class="(arrow[^"]*)"', rf'class="\1" marker-end="url(#{arrow})"', drawn)
    return re.sub(r"\n\s*\n", "\n", drawn)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers it with Sphinx."""
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True}
