"""Sessions of the tests in this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dfm_async import Session
from dfm_async.testing import Faults
from tests.conftest import Connect


@pytest.fixture
async def session(connect: Connect, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """A session with the federation ``fed`` of the test module, on each target."""
    async with connect(request.module.fed) as found:
        yield found


@pytest.fixture
def faults(session: Session) -> Faults:
    return Faults(session)
