"""Fixtures that pytest-asyncio runs: one for each scope that a loop can have, since a session lives on one loop.

Registered only where pytest-asyncio is installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio

from dfm_async.testing.plugin import no_task_left

_SCOPES = ("function", "class", "module", "package", "session")


def _for_a_test(scope: Any) -> Any:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_dfm_session_{scope}")
    async def opened(_dfm_opening: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        async with _dfm_opening as session:
            yield session

    return opened


def _for_a_module(scope: Any) -> Any:
    @pytest_asyncio.fixture(loop_scope=scope, scope="module", name=f"_dfm_module_session_{scope}")
    async def opened(_dfm_module_opening: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        async with _dfm_module_opening as session:
            yield session

    return opened


def _loop(scope: Any) -> Any:
    @pytest_asyncio.fixture(loop_scope=scope, scope=scope, name=f"_dfm_loop_{scope}")
    async def loop() -> None:
        """Is only there so that its loop is."""

    return loop


def _without_leaks(scope: Any) -> Any:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_dfm_no_task_left_{scope}")
    async def watched(request: pytest.FixtureRequest) -> AsyncIterator[None]:
        async with no_task_left(request.node.nodeid):
            yield

    return watched


for _scope in _SCOPES:
    globals()[f"loop_per_{_scope}"] = _loop(_scope)
    globals()[f"no_task_left_on_a_loop_per_{_scope}"] = _without_leaks(_scope)
    globals()[f"session_on_a_loop_per_{_scope}"] = _for_a_test(_scope)
for _scope in ("module", "package", "session"):
    globals()[f"module_session_on_a_loop_per_{_scope}"] = _for_a_module(_scope)
