"""Fixtures for all tests: sessions on both targets, stores, and checks for leaks."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hypothesis
import pytest

from dfm_async import Federation, Session
from dfm_async.base import redaction
from dfm_async.workers.fork_server import ForkServer
from tests.federations import PACKAGES, ROOT
from tests.support.sessions import SHORT

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
# The same examples in every run that decides about a change; other runs search for new ones.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def _use_own_temporary_folder(name: str) -> None:
    """Have tests check the temporary files of their own process, and of those that it starts, not of other runs."""
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=f"{name}-")
    # After multiprocessing's own clean-up, which deletes what it has in there.
    Finalize(None, shutil.rmtree, (tempfile.tempdir,), {"ignore_errors": True}, exitpriority=-200)


beside = os.environ.get("PYTEST_XDIST_WORKER")


def pytest_configure() -> None:
    """Prepare this process. Processes that tests start import this module as well."""
    if beside:
        _use_own_temporary_folder(beside)


TargetName = Literal["inline", "local", "flare"]
Connect = Callable[..., AbstractAsyncContextManager[Session]]
Open = Callable[..., Session]


_HEAVY = ("pytest", "hypothesis", "numpy", "tests.conftest")
"""Modules that modules of tests import: loaded once, instead of in every worker."""


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the fork server between tests; each would start its own otherwise."""
    if not beside:
        tmp_path_factory.getbasetemp()  # the folders of tests stay where they are, and are kept
        _use_own_temporary_folder("tests")
    server = ForkServer.acquire(_HEAVY)
    server.warm()
    yield
    server.release()


@pytest.fixture(params=["inline", "local"])
def target(request: pytest.FixtureRequest) -> TargetName:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def connect(target: TargetName) -> Connect:
    """Connect a session on the target under test."""

    @asynccontextmanager
    async def connect(federation: Federation, **options: Any) -> AsyncIterator[Session]:
        async with Session(federation, target=target, **options) as session:
            yield session

    return connect


@pytest.fixture
async def session(connect: Connect, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """A session of the federation ``fed`` of the test's module, on the target under test."""
    async with connect(request.module.fed) as session:
        yield session


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """The path of a store."""
    return tmp_path / "jobs.db"


@pytest.fixture
def store_url(store_path: Path) -> str:
    """The URL of a store."""
    return f"sqlite:///{store_path}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, which starts with the first test that needs it."""
    from tests.support.postgres import running_server  # here: the workers of sites import this module, too

    with running_server() as server:
        yield server


def _opener(request: pytest.FixtureRequest, store_url: str, target: TargetName) -> Open:
    def opens(federation: Federation | None = None, **options: Any) -> Session:
        common = {"target": target, "store": store_url, "options": SHORT}
        return Session(federation or request.module.fed, **{**common, **options})

    return opens


@pytest.fixture
def opens(request: pytest.FixtureRequest, store_url: str, target: TargetName) -> Open:
    """Makes sessions of the federation ``fed`` of the test's module, on the target under test, with one store."""
    return _opener(request, store_url, target)


@pytest.fixture
def opens_inline(request: pytest.FixtureRequest, store_url: str) -> Open:
    """Makes sessions with the same store where the target does not matter."""
    return _opener(request, store_url, "inline")


@pytest.fixture
def adapter_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the packages of ``tests/federations`` importable, here and in workers, and unload them afterwards."""
    monkeypatch.syspath_prepend(ROOT)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def no_folders_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget where federation files have modules: those of another test have the same names."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget secrets: a process remembers them for good, but the secrets of one test are plain words in another."""
    monkeypatch.setattr(redaction, "_secrets", type(redaction._secrets)(redaction._secrets.limit))
    monkeypatch.setattr(redaction, "_hidden", ())


@pytest.fixture(autouse=True)
async def nothing_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Check that no task and no thread of ours outlives a test."""
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
    gc.freeze()  # objects that still live are not garbage soon: the next collection skips them
