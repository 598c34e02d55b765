"""Fixtures for pytest. Loaded in every run of pytest: so nothing else of the package is imported until it is used."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dfm_async.federation.federation import Federation
    from dfm_async.session.session import Session
    from dfm_async.testing.fakes import Fake
    from dfm_async.testing.faults import Faults

_LEAKS = "dfm_no_leaks"
_WITH_ASYNCIO = "dfm_async_asyncio"
_NOT_RUN = (
    "{name} needs a plugin that runs async tests: install pytest-asyncio 0.24 or newer, or mark the test with "
    "pytest.mark.anyio. Without one, make sessions with dfm_session_factory"
)
_NARROW = (
    "{name} lives as long as the module, and so must the loop that the tests run on; that of this test is made for "
    "each {scope}. Write in the module: pytestmark = pytest.mark.asyncio(loop_scope='module')"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option."""
    parser.addini("dfm_target", "the default target of dfm_session, without a marker", default="inline")


def pytest_configure(config: pytest.Config) -> None:
    """Add the markers, and fixtures for the plugin that runs async tests."""
    config.addinivalue_line(
        "markers", "dfm(target=..., ...): the arguments of the Session that the fixture dfm_session connects"
    )
    config.addinivalue_line("markers", "dfm_no_leaks: the test must leave nothing behind; see the fixture of that name")
    if config.pluginmanager.hasplugin("asyncio"):
        import pytest_asyncio

        if "loop_scope" in inspect.signature(pytest_asyncio.fixture).parameters:  # else it is too old for us
            from dfm_async.testing import asyncio_fixtures

            config.pluginmanager.register(asyncio_fixtures, _WITH_ASYNCIO)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the leak check begin before, and end after, everything else that belongs to a single test."""
    for item in items:
        names: list[str] = getattr(item, "fixturenames", [])
        if _LEAKS in names or item.get_closest_marker(_LEAKS) is not None:
            narrow = [name for name in names if name != _LEAKS and _is_narrow(item, name)]
            names[:] = [name for name in names if name not in narrow and name != _LEAKS]
            names += [_LEAKS, *narrow]


def _is_narrow(item: Any, name: str) -> bool:
    """Return whether a fixture has the scope of one test."""
    known = item._fixtureinfo.name2fixturedefs.get(name)  # noqa: SLF001 - pytest has no public name for it
    return bool(known) and known[-1].scope == "function"


# configuration


@pytest.fixture(scope="session")
def dfm_federation() -> Federation:
    """The federation under test: to be overridden."""
    pytest.fail("write a fixture dfm_federation that returns your Federation, in conftest.py or beside the test")


@pytest.fixture
def dfm_target(request: pytest.FixtureRequest) -> Any:
    """The target of ``dfm_session``: by the marker ``dfm``, else by the ini option ``dfm_target``."""
    return _arguments(request.node).get("target") or request.config.getini("dfm_target")


def _arguments(node: Any) -> dict[str, Any]:
    """Return the markers, the nearest one last."""
    found: dict[str, Any] = {}
    for marker in reversed(list(node.iter_markers("dfm"))):
        if marker.args:
            raise pytest.UsageError(f"pytest.mark.dfm takes its arguments by name, as Session does, not {marker.args}")
        found.update(marker.kwargs)
    return found


# sessions


@pytest.fixture
def dfm_session_factory(
    request: pytest.FixtureRequest, dfm_federation: Federation, dfm_target: Any
) -> Callable[..., Session]:
    """Make sessions for ``async with``; arguments override the marker."""
    return _maker(request.node, dfm_federation, dfm_target)


def _maker(node: Any, federation: Federation, target: Any) -> Callable[..., Session]:
    def make(**arguments: Any) -> Session:
        from dfm_async.session.session import Session

        return Session(**{"federation": federation, **_arguments(node), "target": target, **arguments})

    return make


@pytest.fixture
def _dfm_opening(dfm_session_factory: Callable[..., Session]) -> AbstractAsyncContextManager[Session]:
    return dfm_session_factory()


@pytest.fixture
def dfm_session(request: pytest.FixtureRequest, _dfm_opening: object) -> Session:
    """A connected session of ``dfm_federation``, for one test."""
    return request.getfixturevalue(f"_dfm_session_{_runner(request, 'dfm_session')}")  # type: ignore[no-any-return]


@pytest.fixture
async def _dfm_session_anyio(_dfm_opening: AbstractAsyncContextManager[Session]) -> AsyncIterator[Session]:
    async with _dfm_opening as session:
        yield session


@pytest.fixture(scope="module")
def _dfm_module_opening(
    request: pytest.FixtureRequest, dfm_federation: Federation
) -> AbstractAsyncContextManager[Session]:
    target = _arguments(request.node).get("target") or request.config.getini("dfm_target")
    return _maker(request.node, dfm_federation, target)()


@pytest.fixture(scope="module")
def dfm_module_session(request: pytest.FixtureRequest, _dfm_module_opening: object) -> Session:
    """A connected session for all tests of a module. Their loop and ``dfm_federation`` must live as long."""
    runner = _runner(request, "dfm_module_session")
    if runner in ("function", "class"):
        pytest.fail(_NARROW.format(name="dfm_module_session", scope=runner))
    return request.getfixturevalue(f"_dfm_module_session_{runner}")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
async def _dfm_module_session_anyio(
    _dfm_module_opening: AbstractAsyncContextManager[Session],
) -> AsyncIterator[Session]:
    async with _dfm_module_opening as session:
        yield session


def _runner(request: pytest.FixtureRequest, name: str) -> str:
    """Return the runner of the test: ``anyio``, or pytest-asyncio with the scope of its loop."""
    marker = request.node.get_closest_marker("asyncio")
    with_asyncio = request.config.pluginmanager.hasplugin(_WITH_ASYNCIO)
    if not (with_asyncio and marker is not None) and "anyio_backend" in request.fixturenames:
        backend = request.getfixturevalue("anyio_backend")
        if (backend if isinstance(backend, str) else backend[0]) != "asyncio":
            pytest.fail(f"{name} needs asyncio: write a fixture anyio_backend that returns 'asyncio', not {backend!r}")
        return "anyio"
    if not with_asyncio:
        pytest.fail(_NOT_RUN.format(name=name))
    scope = marker and (marker.kwargs.get("loop_scope") or marker.kwargs.get("scope"))
    return str(scope or _default_loop_scope(request.config))


def _default_loop_scope(config: pytest.Config) -> str:
    try:
        return config.getini("asyncio_default_test_loop_scope") or "function"
    except (KeyError, ValueError):  # a version without this option
        return "function"


# fakes and faults


@pytest.fixture
def dfm_override(dfm_federation: Federation) -> Iterator[Callable[..., Fake]]:
    """``dfm_override(operation, fake, site=None, provider=None)``: a fake for the rest of the test."""
    from dfm_async.testing.board import override

    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(override(dfm_federation, *args, **kwargs))


@pytest.fixture
def dfm_faults(dfm_session: Session) -> Iterator[Faults]:
    """The faults of ``dfm_session``."""
    from dfm_async.testing.faults import Faults

    with Faults(dfm_session) as faults:
        yield faults


# leaks


@pytest.fixture
def _dfm_nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    from dfm_async.testing.leaks import ResourceSnapshot, leak_report

    runner = _runner(request, _LEAKS) if _is_async(request) else "function"
    if runner not in ("anyio", "function"):
        request.getfixturevalue(f"_dfm_loop_{runner}")  # a loop that outlives the test is no leak of it
    elif runner == "function" and _is_async(request):
        _make_current_loop()
    before = ResourceSnapshot()
    yield
    left = before.leaks()
    if left:
        pytest.fail(leak_report(request.node.nodeid, left), pytrace=False)


def _make_current_loop() -> None:
    """Make the current loop, as pytest-asyncio before 1.4 does for the first test, which it outlives."""
    import asyncio
    import warnings
    from importlib.metadata import version

    if tuple(map(int, version("pytest-asyncio").split(".")[:2])) < (1, 4):
        with warnings.catch_warnings(), suppress(RuntimeError):  # there is none, and it will not be made
            warnings.simplefilter("ignore", DeprecationWarning)
            asyncio.get_event_loop()


@pytest.fixture
def dfm_no_leaks(request: pytest.FixtureRequest, _dfm_nothing_left: None) -> None:
    """The test leaves no task, thread, child process, descriptor, socket or shared memory behind."""
    if _is_async(request):
        request.getfixturevalue(f"_dfm_no_task_left_{_runner(request, _LEAKS)}")


def _is_async(request: pytest.FixtureRequest) -> bool:
    return inspect.iscoroutinefunction(getattr(request.node, "obj", None))


@pytest.fixture
async def _dfm_no_task_left_anyio(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    from dfm_async.testing.task_leaks import no_task_left

    async with no_task_left(request.node.nodeid):
        yield
