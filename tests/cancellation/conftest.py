"""Sessions with and without a store, and how often a call is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dfm_async import Session
from tests.cancellation.rig import fed, works
from tests.conftest import TargetName
from tests.support.sessions import SHORT


@pytest.fixture(params=[False, True], ids=["memory", "store"])
def store(request: pytest.FixtureRequest, store_url: str) -> str | None:
    return store_url if request.param else None


@pytest.fixture(params=[1, 2, 3], ids=["once", "twice", "thrice"])
def times(request: pytest.FixtureRequest) -> int:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def session(target: TargetName, store: str | None) -> AsyncIterator[Session]:
    async with Session(fed, target=target, options=SHORT, store=store) as session:
        await works(session)
        yield session
