r"""Directives that embed drawings in a page, so that they follow its light and dark colours.

``drawing`` shows an SVG from the folder ``drawings``. Such a file contains shapes with classes and no colours;
``_static/pages.css`` defines the colours. ``pipeline`` draws a pipeline that the code above it on the page defines,
with the sites of its federation, so that the drawing always matches the code.
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
from dfm_async.planning.prepare import prepare

ARROW = (
    '<defs><marker id="{id}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
)
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def figure(directive: Directive, kind: str, image: str) -> list[nodes.Node]:
    """Return an SVG with the content of the directive as its caption."""
    made = nodes.container(classes=[kind])
    made += nodes.raw("", image, format="html")
    caption = nodes.container(classes=["caption"])
    directive.state.nested_parse(directive.content, directive.content_offset, caption)
    if caption.children:
        made += caption
    return [made]


class Drawing(Directive):
    """Show ``drawings/NAME.svg``."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the figure."""
        return figure(self, "drawing", self.image(self.arguments[0]))

    def image(self, name: str) -> str:
        """Read the SVG, and give its arrows heads with a unique id."""
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
    """Draw the pipeline that the page defines under a name."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the figure."""
        return figure(self, "pipeline", self.image(self.arguments[0]))

    def image(self, name: str) -> str:
        """Run the definitions of the page, and draw the pipeline."""
        page = Path(self.state.document.current_source)
        above = page.read_text(encoding="utf-8").splitlines(keepends=True)[: self.lineno]
        made = defined("".join(above), str(page), name)
        if name not in made:
            raise self.error(f"the code above makes no {name!r}")
        federation = next(value for value in made.values() if isinstance(value, Federation))
        return svg(graph_of(prepare(made[name], federation, "home")))


def defined(text: str, page: str, name: str) -> dict[str, Any]:
    """Run only the code of a page that a value depends on, and return its namespace."""
    statements = [statement for code in CODE.findall(text) for statement in parsed(code, page)]
    needed, taken = {name}, []
    for statement in reversed(statements):
        if isinstance(statement, ast.ImportFrom) and f"# {statement.module}.py\n" in text:
            continue  # the page itself defines what is imported
        if needed & (made := bound(statement)):
            needed = needed - made | loaded(statement)
            taken.append(statement)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    module = ast.Module(body=taken[::-1], type_ignores=[])
    exec(compile(module, page, "exec", dont_inherit=True), namespace)  # noqa: S102 - our own pages
    return namespace


def parsed(code: str, page: str) -> list[ast.stmt]:
    """Return the statements of a block, which may use ``await`` at its top level."""
    return compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST).body


def bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines; none if it is not a definition."""
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
    """Return the names that a statement uses."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_directive("drawing", Drawing)
    app.add_directive("pipeline", PipelineDrawing)
    return {"parallel_read_safe": True}
