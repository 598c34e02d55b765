"""Startup kits for the tests of this folder: made once, copied by those who change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.rig import HOST, Made, make


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A federation of two organisations, provisioned. Nobody changes it."""
    return make(tmp_path_factory.mktemp("provisioned"))


@pytest.fixture
def kit(made: Made, tmp_path: Path) -> Callable[[str], Path]:
    """Gives a copy of a kit, to be changed."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(made.kits / (HOST if name == "server" else name), tmp_path / name))

    return copied
