"""The benchmarks of stores: their contenders do what is measured, and peers that are absent are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import durable_store, open_store
from benchmarks.common import table


async def test_a_store_is_filled_with_jobs_that_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    await open_store.fill(url, 5)
    monkeypatch.setattr(open_store, "LISTED", 5)
    found = await open_store.opened(url)
    assert 0 < found["connected"] <= found["listed"]
    monkeypatch.setattr(open_store, "LISTED", 6)
    with pytest.raises(RuntimeError, match="5 of 6 jobs"):
        await open_store.opened(url)


def test_targets_beside_a_peer_that_is_absent_are_not_judged() -> None:
    found = {f"{store} {what}": 1.0 for store in ("memory", "sqlite") for what in ("job", "at once", "results")}
    rows = [
        figure.as_dict("durable_store")
        for figure in durable_store._figures("sqlite", {**found, "commit": 1.0, "rows": 1.0})
    ]
    _, trip, beside_memory, beside_dbos, results = (re.split(r" {2,}", line) for line in table(rows).splitlines())
    assert beside_memory[-2:] == ["at least 0.7 x memory", "ok"]
    assert beside_dbos[-2:] == ["at least 3 x dbos", "not judged"]
    assert trip[-1] == results[-1] == "-"
