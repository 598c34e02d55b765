"""The fixtures for pytest, in runs of their own: with each plugin that runs async tests, in each of its modes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

FEDERATION = """
import asyncio
import pytest
from dfm_async import Federation, JobFailed, LocalOptions, Pipeline, PlaceParam, Session, Yield
from dfm_async.testing import returns

fed = Federation("numbers")
lab = fed.site("lab")

@lab.operation
async def square(x: int) -> int:
    return x * x

with Pipeline("squares") as squares:
    Yield(square(PlaceParam("x")))

@pytest.fixture(scope="session")
def dfm_federation():
    return fed

async def run(session, x=3):
    assert session._running_loop is asyncio.get_running_loop()
    return (await (await session.execute(squares, {"x": x})).first()).value
"""


@pytest.fixture(autouse=True)
def only_what_is_needed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other plugins take longer to load than these runs take."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:schemathesis -p no:xdist -p no:hypothesispytest")


STRICT = "[pytest]\nasyncio_mode = strict\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
AUTO = STRICT.replace("strict", "auto")


def runs(pytester: pytest.Pytester, ini: str, test: str, *arguments: str) -> pytest.RunResult:
    """Runs tests of that federation in another process."""
    pytester.makeini(ini)
    pytester.makepyfile(FEDERATION + test)
    return pytester.runpytest_subprocess("--strict-markers", "-p", "no:cacheprovider", *arguments, timeout=60)


EACH_SCOPE = """
@pytest.mark.asyncio
async def test_default(dfm_session):
    assert await run(dfm_session) == 9

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.asyncio(loop_scope="SCOPE")
async def test_scope(dfm_session, n):
    assert await run(dfm_session, n) == n * n

class TestInAClass:
    @pytest.mark.asyncio(loop_scope="SCOPE")
    async def test_method(self, dfm_session):
        assert await run(dfm_session) == 9
"""


ONE_CLASS = """
@pytest.mark.asyncio(loop_scope="class")
class TestTogether:
    loops = set()

    async def test_one(self, dfm_session):
        self.loops.add(dfm_session._running_loop)
        assert await run(dfm_session) == 9

    async def test_two(self, dfm_session):
        assert self.loops == {dfm_session._running_loop}
        assert await run(dfm_session) == 9
"""


@pytest.mark.parametrize("mode", [STRICT, AUTO], ids=["strict", "auto"])
def test_session_runs_on_the_loop_of_its_test(pytester: pytest.Pytester, mode: str) -> None:
    scopes = ["function", "module", "package", "session"]  # a class has a loop for its own tests only
    files = {f"test_{scope}": FEDERATION + EACH_SCOPE.replace("SCOPE", scope) for scope in scopes}
    pytester.makeini(mode)
    pytester.makepyfile(test_class=FEDERATION + ONE_CLASS, **files)
    done = pytester.runpytest_subprocess("--strict-markers", timeout=60)
    done.assert_outcomes(passed=4 * len(scopes) + 2)


def test_in_auto_mode_nothing_needs_a_mark(pytester: pytest.Pytester) -> None:
    ini = AUTO + "asyncio_default_test_loop_scope = session\n"
    done = runs(
        pytester,
        ini,
        """
@pytest.fixture
async def nine(dfm_session):
    return await run(dfm_session)

async def test_a_fixture_can_use_the_session(dfm_session, nine):
    assert nine == 9
""",
        "-o",
        "asyncio_default_fixture_loop_scope=session",
    )
    done.assert_outcomes(passed=1)


ANYIO = """
@pytest.fixture
async def nine(dfm_session):
    return await run(dfm_session)

@pytest.mark.anyio
async def test_with_anyio(dfm_session, nine):
    assert await run(dfm_session) == nine == 9

@pytest.mark.anyio
@pytest.mark.dfm_no_leaks
@pytest.mark.dfm(target="local")
async def test_with_workers(dfm_session, dfm_faults):
    dfm_faults.fail_operation("square", OSError)
    with pytest.raises(JobFailed):
        await run(dfm_session)

@pytest.mark.anyio
async def test_one(dfm_module_session):
    dfm_module_session.seen = 1
    assert await run(dfm_module_session) == 9

@pytest.mark.anyio
async def test_two(dfm_module_session):
    assert dfm_module_session.seen == 1
    assert await run(dfm_module_session) == 9
"""


@pytest.mark.parametrize("asyncio_too", [True, False], ids=["beside pytest-asyncio", "alone"])
def test_tests_can_be_run_by_anyio(pytester: pytest.Pytester, asyncio_too: bool) -> None:
    backend = "\n@pytest.fixture(scope='module')\ndef anyio_backend():\n    return 'asyncio'\n"
    ini, arguments = (STRICT, []) if asyncio_too else ("[pytest]\nfilterwarnings = error\n", ["-p", "no:asyncio"])
    done = runs(pytester, ini, backend + ANYIO, *arguments)
    done.assert_outcomes(passed=4)


def test_another_backend_than_asyncio_is_refused(pytester: pytest.Pytester) -> None:
    backend = "\n@pytest.fixture\ndef anyio_backend():\n    return 'trio'\n"
    done = runs(pytester, STRICT, backend + ANYIO.partition("@pytest.mark.anyio\n@pytest.mark.dfm_no_leaks")[0])
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*dfm_session needs asyncio: write a fixture anyio_backend that returns 'asyncio'*"])


def test_without_any_plugin_there_is_the_factory(pytester: pytest.Pytester) -> None:
    done = runs(
        pytester,
        "[pytest]\nfilterwarnings = error\n",
        """
def test_factory(dfm_session_factory, dfm_override):
    async def main():
        async with dfm_session_factory() as session:
            dfm_override("square", returns(7))
            return await run(session)
    assert asyncio.run(main()) == 7

def test_session(dfm_session):
    pass
""",
        "-p",
        "no:asyncio",
        "-p",
        "no:anyio",
    )
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["*dfm_session needs a plugin that runs async tests: install pytest-asyncio 0.24*"])


def test_old_pytest_asyncio_fails_only_when_it_is_needed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        older="""
import pytest, pytest_asyncio

def fixture(fixture_function=None, **options):
    return pytest.fixture(fixture_function, **options)

pytest_asyncio.fixture = fixture
"""
    )
    test = "\nasync def test_session(dfm_session): pass\n\nasync def test_other(): pass\n"
    done = runs(pytester, AUTO, test, "-p", "older")
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["*install pytest-asyncio 0.24 or newer*"])


TARGETS = """
@pytest.mark.asyncio
async def test_default(dfm_session):
    assert type(dfm_session.target).__name__ == "InlineTarget"

@pytest.mark.asyncio
@pytest.mark.dfm(target="local", options=LocalOptions(lanes=2), homesite="office")
async def test_marked(dfm_session, dfm_target):
    assert (dfm_target, type(dfm_session.target).__name__) == ("local", "FederationRunner")
    assert (dfm_session.options.lanes, dfm_session.homesite) == (2, "office")

@pytest.mark.dfm(target="local", homesite="office")
class TestMarkedTwice:
    @pytest.mark.asyncio
    @pytest.mark.dfm(target="inline")
    async def test_inner(self, dfm_session):
        assert type(dfm_session.target).__name__ == "InlineTarget"
        assert dfm_session.homesite == "office"

class TestOverridden:
    @pytest.fixture(params=["inline", "local"])
    def dfm_target(self, request):
        return request.param

    @pytest.mark.asyncio
    async def test_both(self, dfm_session):
        assert await run(dfm_session) == 9

@pytest.mark.asyncio
async def test_factory(dfm_session_factory):
    async with dfm_session_factory(homesite="here") as one, dfm_session_factory(target="inline") as two:
        assert (one.homesite, await run(two)) == ("here", 9)
"""


def test_markers_and_fixtures_choose_the_target(pytester: pytest.Pytester) -> None:
    done = runs(pytester, STRICT, TARGETS)
    done.assert_outcomes(passed=6)


def test_the_ini_option_chooses_the_target_and_fakes_end_with_their_test(pytester: pytest.Pytester) -> None:
    test = """
async def test_faked(dfm_session, dfm_override):
    assert type(dfm_session.target).__name__ == "FederationRunner"
    fake = dfm_override("square", returns(7))
    assert await run(dfm_session) == 7
    assert fake.calls[0].arguments == {"x": 3}

async def test_not_faked(dfm_session):
    assert await run(dfm_session) == 9
"""
    runs(pytester, f"{AUTO}dfm_target = local\n", test).assert_outcomes(passed=2)


def test_wrong_markers_and_missing_fixtures_are_reported_with_advice(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_without="async def test_it(dfm_session): pass")
    done = runs(pytester, AUTO, "\n@pytest.mark.dfm('local')\nasync def test_it(dfm_session): pass\n")
    done.assert_outcomes(errors=2)
    done.stdout.fnmatch_lines_random(
        [
            "*pytest.mark.dfm takes its arguments by name*",
            "*write a fixture dfm_federation that returns your Federation*",
        ]
    )


def test_the_session_of_a_module_is_shared_and_needs_one_loop(pytester: pytest.Pytester) -> None:
    shared = """
pytestmark = pytest.mark.asyncio(loop_scope="LOOP")
seen = []

async def test_one(dfm_module_session):
    seen.append(dfm_module_session)
    assert await run(dfm_module_session) == 9

async def test_two(dfm_module_session):
    assert seen == [dfm_module_session]
    assert await run(dfm_module_session) == 9
"""
    loops = ("module", "session", "function")
    pytester.makeini(STRICT)
    pytester.makepyfile(**{f"test_{loop}": FEDERATION + shared.replace("LOOP", loop) for loop in loops})
    done = pytester.runpytest_subprocess(timeout=60)
    done.assert_outcomes(passed=4, errors=2)
    done.stdout.fnmatch_lines(["*dfm_module_session lives as long as the module*loop_scope='module'*"])


LEAKS = """
import os, socket, subprocess, sys, threading
kept = []

@pytest.mark.dfm_no_leaks
@pytest.mark.dfm(target="local")
async def test_tidy(dfm_session, dfm_override):
    dfm_override("square", returns(7))
    assert await run(dfm_session) == 7

@pytest.mark.dfm_no_leaks
async def test_task():
    kept.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))

@pytest.mark.dfm_no_leaks
def test_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

async def test_socket(dfm_session, dfm_no_leaks):
    kept.append(socket.create_server(("127.0.0.1", 0)))

@pytest.fixture
def stubborn():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    kept.append(process)

@pytest.mark.dfm_no_leaks
async def test_process(stubborn):
    pass

@pytest.fixture(scope="module")
def wide():
    with open(os.devnull) as file:
        yield file

@pytest.mark.usefixtures("dfm_no_leaks")
def test_resources_of_wider_scopes_are_not_leaks(wide):
    pass
"""


@pytest.mark.parametrize("scope", ["function", "module"])
def test_leak_of_a_test_is_reported_by_name(pytester: pytest.Pytester, scope: str) -> None:
    ini = f"{AUTO}asyncio_default_test_loop_scope = {scope}\n".replace("filterwarnings = error\n", "")
    done = runs(pytester, ini, LEAKS)
    done.assert_outcomes(passed=6, errors=4)
    done.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_task*",
            "test_*::test_task left these open; close or cancel them:",
            "  task 'forgotten' of Event.wait*",
            "  thread 'forgotten'",
            "  socket, descriptor *: AF_INET ('127.0.0.1', *)",
            "  process *: *-c input()",
        ]
    )


def test_the_example_of_the_guide_passes(pytester: pytest.Pytester) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    python = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    files = {found[1]: text for text in python if (found := re.match(r"# (\w+)\.py\n", text))}
    federation = next(text for text in python if "fed = Federation(" in text)
    pytester.makeini(STRICT)
    pytester.makepyfile(**files, weather=federation)
    pytester.runpytest_subprocess(timeout=60).assert_outcomes(passed=2)


def test_a_run_that_needs_nothing_loads_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it():
            ours = {name for name in sys.modules if name.startswith("dfm_async")}
            assert len(ours) <= 6, ours  # the packages, what makes their names lazy, and the plugin
        """
    )
    pytester.runpytest_subprocess("-p", "no:asyncio", timeout=60).assert_outcomes(passed=1)


def test_loading_the_plugin_loads_hardly_anything() -> None:
    code = """
import pytest, sys
before = set(sys.modules)
import dfm_async.testing.plugin
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tiny = ["dfm_async.base", "dfm_async.base.lazy", "dfm_async.base.rendering"]
    assert done.stdout.split() == ["dfm_async", *tiny, "dfm_async.testing", "dfm_async.testing.plugin"]
