"""Fixtures for all tests: sessions on both targets, and a watch on what tests leave behind."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.util import Finalize
from typing import Any, Literal

import hypothesis
import pytest

from dfm_async import Federation, Session, redaction
from dfm_async.workers.fork_server import ForkServer
from tests.federations import NAMES, ROOT

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
# The same examples in every run that decides about a change; others look for new ones.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))

if beside := os.environ.get("PYTEST_XDIST_WORKER"):
    # Tests that run beside others look for the temporary files of their own process, and of those that it starts.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=f"{beside}-")
    # After multiprocessing's own clean-up, which deletes what it has in there.
    Finalize(None, shutil.rmtree, (tempfile.tempdir,), {"ignore_errors": True}, exitpriority=-200)

TargetName = Literal["inline", "local", "flare"]
Connect = Callable[..., AbstractAsyncContextManager[Session]]


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    """Keeps the fork server between tests; each would start its own otherwise."""
    server = ForkServer.acquire(())
    yield
    server.release()


@pytest.fixture(params=["inline", "local"])
def target(request: pytest.FixtureRequest) -> TargetName:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def connect(target: TargetName) -> Connect:
    """Connects a session on the target under test."""

    @asynccontextmanager
    async def connect(federation: Federation, **options: Any) -> AsyncIterator[Session]:
        async with Session(federation, target=target, **options) as session:
            yield session

    return connect


@pytest.fixture
def adapter_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the packages of ``tests/federations`` importable, here and in workers, and forgets them afterwards."""
    monkeypatch.syspath_prepend(ROOT)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process remembers its secrets for good; words that are some in one test are plain words in another."""
    monkeypatch.setattr(redaction, "_secrets", type(redaction._secrets)())
    monkeypatch.setattr(redaction, "_hidden", ())


@pytest.fixture(autouse=True)
async def nothing_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """No task and no thread of ours outlives a test."""
    before = asyncio.all_tasks()
    threads = set(threading.enumerate())
    yield
    if request.node.get_closest_marker("shared_session") is None:
        left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
        assert not left, f"tasks left behind: {left}"
        for thread in set(threading.enumerate()) - threads:
            if thread.name.startswith("dfm-"):
                thread.join(5)
                assert not thread.is_alive(), f"thread left behind: {thread}"
    gc.collect()
    gc.freeze()  # whatever still lives will not be garbage soon: the next collection need not look at it
