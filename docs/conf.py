"""Sphinx configuration."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "_extensions"))

from dfm_async import __version__

project = "dfm_async"
author = "The dfm_async authors"
copyright = "The dfm_async authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "benchmark_page",
    "drawings",
    "llms",
    "plain_docstrings",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["attrs_block", "colon_fence", "fieldlist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["dfm_async.exchange.filepipe.fobs"]  # needs an extra, and is not documented
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
nitpick_ignore_regex = [
    # Names of other projects, whose inventories are not available during the build.
    (
        r"py:.*",
        r"(asyncio|collections|contextlib|datetime|httpx2|logging|os|pathlib|starlette|threading|typing|upath)\..*|UPath",
    ),
    # Type variables, and fragments of types that Sphinx has split.
    (r"py:.*", r"(.*\.)?[A-Z](_co)?|dict\[.*|.*Literal\[.*"),
    # Internal types in signatures; applications do not use them.
    (r"py:class", r"dfm_async\.(base|engine|exchange|federation|model|results|targets|wire|workers)\..*"),
    (r"py:class", r"SiteWorker|Store|Target"),
]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"dfm_async {release}"
changelog = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
if re.search(r"^## .* - unreleased$|^## \[Unreleased\]\n+[^#\n]", changelog, re.MULTILINE):
    html_title = f"dfm_async after {release} (development version)"  # until the next release
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e6e", "color-brand-content": "#0b6e6e"},
    "dark_css_variables": {"color-brand-primary": "#5ecfc4", "color-brand-content": "#5ecfc4"},
}
