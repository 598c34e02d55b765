"""Sessions of these tests have worker processes."""

from __future__ import annotations

import pytest

from tests.conftest import TargetName


@pytest.fixture
def target() -> TargetName:
    return "local"
