"""Fixtures that tests of external programs share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dfm_async.exchange.endpoint import PipeTraits
from dfm_async.exchange.memory_pipe import MemoryPipe


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections in memory count as ones that can lose or damage data."""
    monkeypatch.setattr(MemoryPipe, "traits", PipeTraits(reliable=False))


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe at which a program waits until the test writes to it."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path
