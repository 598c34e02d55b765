r"""Drawings inside of a page, rather than behind a link, so that they have its colours: light and dark.

``drawing`` shows an SVG of the folder ``drawings``. Such a file holds shapes with classes and no colours;
``_static/pages.css`` has those. ``pipeline`` draws a pipeline that the code on the page above it has made, over the
sites of its federation; so the drawing cannot say anything else than the code.
"""

import ast
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from dfm_async import Federation
from dfm_async.drawing import graph_of, svg
from dfm_async.planner.plan import prepare

ARROW = (
    '<defs><marker id="{id}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
)
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def figure(directive: Directive, kind: str, image: str) -> list[nodes.Node]:
    """An SVG, with the content of the directive as its caption."""
    made = nodes.container(classes=[kind])
    made += nodes.raw("", image, format="html")
    caption = nodes.container(classes=["caption"])
    directive.state.nested_parse(directive.content, directive.content_offset, caption)
    if caption.children:
        made += caption
    return [made]


class Drawing(Directive):
    """Shows ``drawings/NAME.svg``."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Gives the figure."""
        return figure(self, "drawing", self.image(self.arguments[0]))

    def image(self, name: str) -> str:
        """Reads it, and gives its arrows an end, and an id of their own."""
        environment = self.state.document.settings.env
        path = Path(environment.srcdir) / "drawings" / f"{name}.svg"
        environment.note_dependency(str(path))
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        opened = re.search(r"<svg[^>]*>", source)
        if opened is None:
            raise self.error(f"there is no drawing {path.name}")
        arrow = f"arrow-{name}"
        drawn = source[: opened.end()] + ARROW.format(id=arrow) + source[opened.end() :]
        return re.sub(r'class="(arrow[^"]*)"', rf'class="\1" marker-end="url(#{arrow})"', drawn)


class PipelineDrawing(Directive):
    """Draws the pipeline that the page has under a name."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Gives the figure."""
        return figure(self, "pipeline", self.image(self.arguments[0]))

    def image(self, name: str) -> str:
        """Runs what the page defines, and draws it."""
        page = Path(self.state.document.current_source)
        above = page.read_text(encoding="utf-8").splitlines(keepends=True)[: self.lineno]
        made = defined("".join(above), str(page), name)
        if name not in made:
            raise self.error(f"the code above makes no {name!r}")
        federation = next(value for value in made.values() if isinstance(value, Federation))
        return svg(graph_of(prepare(made[name], federation, "home")))


def defined(text: str, page: str, name: str) -> dict[str, Any]:
    """Runs what the code of a page needs to make a value, and nothing else; gives all that it has made."""
    statements = [statement for code in CODE.findall(text) for statement in parsed(code, page)]
    needed, taken = {name}, []
    for statement in reversed(statements):
        if needed & (made := bound(statement)):
            needed = needed - made | loaded(statement)
            taken.append(statement)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    module = ast.Module(body=taken[::-1], type_ignores=[])
    exec(compile(module, page, "exec", dont_inherit=True), namespace)  # noqa: S102 - the pages are our own
    return namespace


def parsed(code: str, page: str) -> list[ast.stmt]:
    """The statements of a block, which may use ``await`` on its top level."""
    return compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST).body


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement defines; none if it is no definition."""
    match statement:
        case ast.Import(names) | ast.ImportFrom(names=names):
            return {found.asname or found.name for found in names}
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Assign() | ast.With():
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            return {found.id for found in names if isinstance(found.ctx, ast.Store)}
    return set()


def loaded(statement: ast.stmt) -> set[str]:
    """The names that a statement uses."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers them with Sphinx."""
    app.add_directive("drawing", Drawing)
    app.add_directive("pipeline", PipelineDrawing)
    return {"parallel_read_safe": True}
