"""Serve the documentation to language models: ``llms.txt``, ``llms-full.txt``, and each page as Markdown.

``llms.txt`` lists the pages in the sections of the table of contents, each with its title and a summary. Next to each
``PAGE.html`` there is ``PAGE.md``: the source of the page, with included files; that of the API reference contains the
docstrings. ``llms-full.txt`` contains all pages. Only ``setup`` and its hooks need Sphinx.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^```\{include\} (\S+)\n.*?^```\n", re.MULTILINE | re.DOTALL)
GOAL = re.compile(r"^(?:After (?:reading )?|With )this page,? (?:you (?:can|know) )?")
LISTED_WITH_DOCSTRINGS = "api"
"""The page whose source has only the names of what it describes."""


def sections(index: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the caption and the pages of each table of contents on the first page."""
    for block in TOCTREE.findall(index):
        caption = re.search(r"^:caption: (.+)$", block, re.MULTILINE)
        lines = [line.strip() for line in block.splitlines()]
        yield caption[1].strip('"') if caption else "Pages", [line for line in lines if line and line[0] != ":"]


def markdown(path: Path) -> str:
    """Return a page with the files that it includes, without front matter."""
    text = INCLUDE.sub(lambda found: (path.parent / found[1]).read_text("utf-8"), path.read_text("utf-8"))
    return re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.DOTALL)


def title(text: str) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def summary(text: str) -> str:
    """Return the first sentence of a page as plain text; of "After reading this page you can do it", "Do it"."""
    blocks = [block for block in text.split("\n\n") if re.match(r"\w|\[|\*", block)]
    words = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(blocks[0].split())) if blocks else ""
    sentence = re.split(r"(?<=[\w`)*][.:]) (?=[A-Z*`])", words)[0].rstrip(".:").replace("*", "")
    goal = GOAL.sub("", sentence)
    return goal[:1].upper() + goal[1:]


def listing(folder: Path) -> str:
    """Return ``llms.txt`` for a folder of pages."""
    first = markdown(folder / "index.md")
    tagline = re.search(r"^```\{rst-class\} tagline.*?\n(.*?)^```", first, re.MULTILINE | re.DOTALL)
    lines = [f"# {title(first)}", "", f"> {' '.join((tagline[1] if tagline else '').split())}", ""]
    lines += ["Every page is Markdown. `llms-full.txt` contains all pages in one file."]
    for caption, names in sections(first):
        lines += ["", f"## {caption}", ""]
        for name in names:
            text = markdown(folder / f"{name}.md")
            lines.append(f"- [{title(text)}]({name}.md): {summary(text)}")
    return "\n".join(lines) + "\n"


def source(app: Sphinx, name: str) -> str:
    """Return the Markdown of a page as the other extensions complete it."""
    if name == LISTED_WITH_DOCSTRINGS:
        return with_docstrings(app, name)
    texts = [markdown(Path(app.env.doc2path(name)))]
    app.events.emit("source-read", name, texts)
    return texts[0]


def with_docstrings(app: Sphinx, name: str) -> str:
    """Render a page of autodoc directives as text, below its heading."""
    from sphinx.writers.text import TextTranslator

    document = app.env.get_and_resolve_doctree(name, app.builder)
    translator: Any = TextTranslator(document, app.builder)  # type: ignore[arg-type]
    document.walkabout(translator)
    _, _, body = translator.body.partition("\n\n")
    body = re.sub(r"^(.+)\n=+$", r"## \1", body, flags=re.MULTILINE)
    return f"# {title(markdown(Path(app.env.doc2path(name))))}\n\n{body.lstrip()}"


def link(app: Sphinx, name: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Name the Markdown of a page in the head of its HTML."""
    if name in app.env.found_docs:
        target = f'<link rel="alternate" type="text/markdown" href="{Path(name).name}.md">'
        context["metatags"] = context.get("metatags", "") + target


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write the files next to the built pages."""
    if exception is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    pages = {name: source(app, name) for name in sorted(app.env.found_docs)}
    for name, text in pages.items():
        (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / "llms.txt").write_text(listing(Path(app.srcdir)), encoding="utf-8")
    order = ["index", *(name for _, names in sections(pages["index"]) for name in names)]
    whole = "\n\n".join(f"<!-- {name}.md -->\n\n{pages[name].strip()}" for name in order)
    (out / "llms-full.txt").write_text(whole + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("html-page-context", link)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
