"""The list of pages for language models, which the build of the documentation writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import DOCS


@pytest.fixture(scope="module")
def llms() -> ModuleType:
    """The Sphinx extension; this part of it needs no Sphinx."""
    spec = importlib.util.spec_from_file_location("llms", DOCS / "_extensions" / "llms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_names_every_page_with_its_title_and_a_summary(llms: ModuleType) -> None:
    rows = re.findall(r"^- \[(.+)\]\((.+)\.md\): (.+)$", llms.listing(DOCS), re.MULTILINE)
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert sorted(name for _, name, _ in rows) == sorted(pages)
    for title, name, summary in rows:
        assert title, name
        assert 20 < len(summary) < 300, f"{name}: {summary!r}"
        assert "](" not in summary, f"{name}: {summary!r}"


def test_the_list_has_the_sections_of_the_table_of_contents(llms: ModuleType) -> None:
    captions = [caption for caption, _ in llms.sections((DOCS / "index.md").read_text(encoding="utf-8"))]
    assert re.findall(r"^## (.+)$", llms.listing(DOCS), re.MULTILINE) == captions
    assert {"Get started", "Concepts", "Production", "Migration", "Reference", "Contributing"} <= set(captions)


def test_a_page_contains_the_files_that_it_includes(llms: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "part.md").write_text("# Part\n\nWith words.\n")
    (tmp_path / "page.md").write_text("---\nhide-toc: true\n---\n\n```{include} part.md\n:option: value\n```\n")
    text = llms.markdown(tmp_path / "page.md")
    assert text == "# Part\n\nWith words.\n"
    assert (llms.title(text), llms.summary(text)) == ("Part", "With words")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A\n\nAfter reading this page you can test your [own](x.md) code. Then more.", "Test your own code"),
        ("# A\n\n(label)=\n\nUse `a.b`, or write it. See below.", "Use `a.b`, or write it"),
        ("# A\n\n```text\nNo.\n```\n\nAfter this page you know why: it is so.", "Why: it is so"),
    ],
)
def test_a_summary_is_the_first_sentence(llms: ModuleType, text: str, expected: str) -> None:
    assert llms.summary(text) == expected
