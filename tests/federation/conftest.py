"""What tests of federations share."""

from __future__ import annotations

import pathlib

import pytest

from dfm_async import Federation, Site


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of federation files keep their caches on disk: what one test stores must not be found by another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture
def site() -> Site:
    """A site of an empty federation."""
    return Federation("fresh").site("here")
