"""What tests of commands with a store share."""

from __future__ import annotations

import pytest


@pytest.fixture
def store(store_url: str) -> list[str]:
    """The options of commands that use a store."""
    return ["--store", store_url]
