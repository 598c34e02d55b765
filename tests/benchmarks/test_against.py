"""The comparison of two checkouts: both run alternately, and their medians are beside each other."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against
from benchmarks import all as every
from benchmarks.common import Figure

BEFORE, AFTER = Path("before"), Path("after")


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line)


def test_checkouts_run_alternately_and_medians_are_compared() -> None:
    order: list[Path] = []
    values = {BEFORE: iter([8.0, 1.0, 4.0]), AFTER: iter([3.0, 2.0, 1.0])}

    def run(root: Path) -> list[dict[str, Any]]:
        order.append(root)
        return [Figure("round trip", "ms", next(values[root])).as_dict("trips")]

    (row,) = against.compare(run, BEFORE, AFTER, 3)
    assert order == [BEFORE, AFTER, AFTER, BEFORE, BEFORE, AFTER]
    assert (row["before"], row["after"], row["ratio"]) == (4.0, 2.0, 0.5)
    header, line = against.table([row]).splitlines()
    assert cells(header) == ["metric", "unit", "before", "after", "after / before", "range before", "range after"]
    assert cells(line) == ["round trip", "ms", "4", "2", "0.5", "1 .. 8", "1 .. 3"]


def test_metrics_of_one_checkout_are_shown_without_a_ratio() -> None:
    def run(root: Path) -> list[dict[str, Any]]:
        return [Figure(f"only {root}", "s", 1.0).as_dict("trips")]

    rows = against.compare(run, BEFORE, AFTER, 1)
    assert [(row["metric"], row["before"], row["after"], row["ratio"]) for row in rows] == [
        ("only before", 1.0, None, None),
        ("only after", None, 1.0, None),
    ]
    assert cells(against.table(rows).splitlines()[1]) == ["only before", "s", "1", "-", "-", "1 .. 1", "-"]


def checkout(folder: Path, value: float) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "__init__.py").touch()
    row = json.dumps(Figure("processor", "%", value).as_dict("idle"))
    (folder / "benchmarks" / "idle.py").write_text(f"print({row!r})\n")
    return folder


def test_the_code_of_each_checkout_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = checkout(tmp_path / "other", 2.0)
    monkeypatch.setattr(every, "ROOT", checkout(tmp_path / "here", 1.0))
    monkeypatch.setattr(sys, "argv", ["all", "idle", "--against", str(other), "--rounds", "1", "--json"])
    every.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["benchmark"], found["before"], found["after"], found["ratio"]) == ("idle", 2.0, 1.0, 0.5)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["all", "--against", str(tmp_path)])
    with pytest.raises(SystemExit):
        every.main()
