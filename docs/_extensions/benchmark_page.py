"""Insert the stored figures of the benchmarks into a page at ``<!-- figures -->``."""

from pathlib import Path

from sphinx.application import Sphinx

from benchmarks.page import page

MARK = "<!-- figures -->"
RESULTS = Path("benchmarks") / "results.json"


def insert(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the marker; Sphinx rebuilds the page when the figures change."""
    if MARK in source[0]:
        path = Path(app.srcdir) / RESULTS
        app.env.note_dependency(str(path), docname=docname)
        source[0] = source[0].replace(MARK, page(path))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("source-read", insert)
    return {"parallel_read_safe": True}
