"""Fixtures that pytest-asyncio runs: one for each scope that a loop can have, since a session lives on one loop.

Registered only where pytest-asyncio is installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dfm_async.testing.task_leaks import no_task_left


def _session(loop_scope: Any, scope: Any, prefix: str) -> Any:
    @pytest_asyncio.fixture(loop_scope=loop_scope, scope=scope, name=f"{prefix}_session_{loop_scope}")
    async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
        async with request.getfixturevalue(f"{prefix}_opening") as session:
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


for _scope in ("function", "class", "module", "package", "session"):
    globals()[f"loop_per_{_scope}"] = _loop(_scope)
    globals()[f"no_task_left_on_a_loop_per_{_scope}"] = _without_leaks(_scope)
    globals()[f"session_on_a_loop_per_{_scope}"] = _session(_scope, "function", "_dfm")
for _scope in ("module", "package", "session"):
    globals()[f"module_session_on_a_loop_per_{_scope}"] = _session(_scope, "module", "_dfm_module")
