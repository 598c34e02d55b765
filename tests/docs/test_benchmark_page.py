"""The page about the benchmarks is made from stored figures, and says what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import Figure, Target
from benchmarks.page import MISSING, markdown, page
from benchmarks.report import document, load, save
from tests.docs.pages import DOCS


def report(*figures: Figure, note: str = "", name: str = "idle") -> dict[str, Any]:
    rows = {name: [figure.as_dict(name) for figure in figures]}
    return document(rows, quick=True, before=load(), note=note)


def test_what_is_saved_is_what_the_page_shows(tmp_path: Path) -> None:
    path = tmp_path / "made" / "results.json"
    save(path, report(Figure("processor", "%", 0.05, {"pool": 0.5}, Target(0.1)), note="It was noisy."))
    shown = page(path)
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]
    for words in ("Nothing polls", "processor", "0.05 %", "0.5 %", "0.1 x pool", "It was noisy.", "1 of 1 targets"):
        assert words in shown


def test_a_target_that_was_missed_is_told_at_the_top_and_at_its_figure() -> None:
    slow = Figure("round trip", "ms", 3.0, {"pool": 1.0}, Target(2, "pool"))
    fast = Figure("other trip", "ms", 1.0, {"pool": 1.0}, Target(2, "pool"))
    shown = markdown(report(slow, fast))
    assert "**1 of 2 targets were met in this run.**" in shown
    assert "In this run 1 of 2 targets were met." in shown
    assert "| [idle](#idle) | round trip | 3 ms | at most 2 x pool |" in shown
    assert shown.count('<strong class="missed">') == shown.count('<strong class="met">') == 1


def test_a_target_whose_peer_was_not_measured_is_not_judged() -> None:
    shown = markdown(report(Figure("round trip", "ms", 3.0, {}, Target(2, "ray"))))
    assert "0 of 0 targets" in shown
    assert "not judged" in shown


def test_a_benchmark_that_did_not_run_is_named() -> None:
    assert "Not run: `idle`." in markdown(report())


def test_names_of_figures_are_text() -> None:
    shown = markdown(report(Figure("<b>&", "<i>", 1.0, {"<script>": 1.0})))
    assert "<script>" not in shown
    assert "&lt;b&gt;&amp;" in shown


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"format": 0}'], ids=["no", "empty", "torn", "list", "old"])
def test_without_figures_that_can_be_read_the_page_says_how_to_make_some(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert page(path) == MISSING


def test_the_stored_figures_can_be_shown() -> None:
    path = DOCS / "benchmarks" / "results.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["machine"]["cores"] >= 1
    assert all(f"({found['name']})=" in page(path) for found in stored["benchmarks"])
