"""A service for the tests that need no other than the default one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.web.rig import Server, new_service, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A service on a real server, and a client for it."""
    async with serving(new_service()) as found:
        yield found
