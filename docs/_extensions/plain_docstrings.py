"""Keep docstrings of properties and fields as sentences, even if they contain a colon.

Napoleon interprets the words before a colon as a type. Types are declared here, so that interpretation is always wrong.
"""

from sphinx.application import Sphinx

KINDS = {"attribute", "data", "property"}
_as_written: dict[str, list[str]] = {}


def keep(_app: Sphinx, what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Save a docstring before napoleon processes it."""
    if what in KINDS:
        _as_written[name] = list(lines)


def restore(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Restore the saved docstring."""
    lines[:] = _as_written.pop(name, lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both hooks with Sphinx, one before and one after napoleon."""
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    return {"parallel_read_safe": True}
