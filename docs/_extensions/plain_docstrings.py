"""Docstrings of properties and fields are sentences, also if there is a colon in them.

Napoleon takes the words before a colon for a type. We declare types, so its reading is always wrong.
"""

from sphinx.application import Sphinx

KINDS = {"attribute", "data", "property"}
_as_written: dict[str, list[str]] = {}


def keep(_app: Sphinx, what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Remembers a docstring before napoleon has read it."""
    if what in KINDS:
        _as_written[name] = list(lines)


def restore(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Brings it back afterwards."""
    lines[:] = _as_written.pop(name, lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers them with Sphinx: one before napoleon, one after it."""
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    return {"parallel_read_safe": True}
