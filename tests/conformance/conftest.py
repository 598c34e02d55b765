"""What must hold wherever jobs run: on this loop, in processes, and in a real federation on FLARE."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dfm_async import Federation, LocalOptions, Session
from dfm_async.model.flare import FlareOptions
from tests.conftest import Connect, TargetName
from tests.flare.shared import Shared, acquire

GATEWAY: Any = os.environ.get("DFM_FLARE_GATEWAY", "auto")
"""``never`` has all that is tested on FLARE go by app commands."""

NewSession = Callable[..., Session]


def flare_options(shared: Shared, **given: Any) -> FlareOptions:
    """Options of a session in the federation of this test run."""
    common = {"startup_kit": shared.startup_kit, "user": shared.user, "code": "travels", "gateway": GATEWAY}
    return FlareOptions(**{**common, "linger": 600, **given})


@pytest.fixture(scope="package")  # it is not idle: other tests are faster without it
def flare() -> Iterator[Shared]:
    """The federation of this test run."""
    found = acquire(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())))
    yield found
    found.hold.close()


@pytest.fixture(params=["inline", "local", "flare"])
def target(request: pytest.FixtureRequest) -> TargetName:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def new_session(target: TargetName, request: pytest.FixtureRequest) -> NewSession:
    """Makes a session on the target under test, which is not connected yet."""

    def new_session(federation: Federation, **options: Any) -> Session:
        if target == "flare":
            local = options.pop("options", None) or LocalOptions()
            options["options"] = flare_options(request.getfixturevalue("flare"), local=local)
        return Session(federation, target=target, **options)

    return new_session


@pytest.fixture
def connect(new_session: NewSession, target: TargetName) -> Connect:
    """Connects a session on the target under test."""

    @asynccontextmanager
    async def connect(federation: Federation, **options: Any) -> AsyncIterator[Session]:
        async with new_session(federation, **options) as session:
            try:
                yield session
            finally:
                if target == "flare" and session.connected:  # the federation would remember them for other tests
                    for job in session.jobs():
                        await job.cancel(grace=1)
                        await session._target.forget(job.job_id)

    return connect
