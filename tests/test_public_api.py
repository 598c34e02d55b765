"""What the package promises: names, documentation, errors, types."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import dfm_async
from dfm_async import _MOVED, deploy, errors
from dfm_async.base.text import install_hint
from dfm_async.errors import FileProblem, Problem
from tests.public import PUBLIC_MODULES, public_names

EVERYTHING = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in PUBLIC_MODULES
    for name in public_names(module)
    if name != "Action"
}
ROOT = public_names(dfm_async)


# names


_of_each_module = pytest.mark.parametrize("module", PUBLIC_MODULES, ids=lambda found: found.__name__)


def _output(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_root_has_the_names_that_most_programs_use() -> None:
    assert 35 <= len(ROOT) <= 45


@_of_each_module
def test_no_public_name_is_listed_twice(module: types.ModuleType) -> None:
    assert len(public_names(module)) == len(set(public_names(module)))


@_of_each_module
def test_every_public_name_can_be_imported(module: types.ModuleType) -> None:
    names: dict[str, Any] = {}
    exec(f"from {module.__name__} import *", names)
    assert set(public_names(module)) <= names.keys()


def _lazy() -> list[types.ModuleType]:
    return [module for module in PUBLIC_MODULES if hasattr(module, "__dir__") and "__getattr__" in vars(module)]


@pytest.mark.parametrize("module", _lazy(), ids=lambda found: found.__name__)
def test_dir_shows_the_listed_names_before_they_are_loaded(module: types.ModuleType) -> None:
    code = f"import {module.__name__} as it; print(*[name for name in dir(it) if not name.startswith('_')])"
    assert _output(code) == public_names(module)


@_of_each_module
def test_a_name_that_does_not_exist_is_an_attribute_error(module: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        module.Nothing  # noqa: B018 - the access is the test


def test_a_name_that_cannot_be_loaded_reports_why(tmp_path: Path) -> None:
    # "from package import name" replaces every AttributeError by "cannot import name".
    script = "import os; del os.register_at_fork; from dfm_async import Session"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ImportError: cannot load 'Session' of dfm_async: AttributeError: " in done.stderr
    assert "register_at_fork" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ROOT)
def test_a_name_is_the_same_object_in_every_module_that_has_it(name: str) -> None:
    if name == "Site":  # dfm_async.site.Site is what adapters see of their site
        return
    value = getattr(dfm_async, name)
    assert all(getattr(module, name) is value for module in PUBLIC_MODULES if name in public_names(module))


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in _MOVED.items() for name in names.split()])
def test_a_moved_name_warns_and_names_its_new_module(home: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"dfm_async\.{name} is deprecated: import it from {home}$") as caught:
        value = getattr(dfm_async, name)
    assert value is getattr(importlib.import_module(home), name)
    assert caught[0].filename == __file__
    assert name not in ROOT


@pytest.mark.parametrize("name", ["LocalFlare", "Project", "SiteSettings", "User"])
def test_a_name_moved_out_of_deploy_warns(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="import it from dfm_async.flare"):
        getattr(deploy, name)


# what importing loads


def test_importing_the_package_loads_nothing_of_it_but_utilities() -> None:
    code = "import sys; before = set(sys.modules); import dfm_async; print(*(set(sys.modules) - before))"
    loaded = {name for name in _output(code) if name.startswith("dfm_async")}
    assert loaded == {"dfm_async", "dfm_async.base", "dfm_async.base.lazy", "dfm_async.base.rendering"}


def test_a_session_on_one_machine_loads_nothing_of_flare() -> None:
    loaded = _output("import sys; from dfm_async import FlareOptions, Session; print(*sys.modules)")
    assert "dfm_async.session.session" in loaded
    of_flare = ("nvflare", "dfm_async.targets.flare", "dfm_async.deploy")
    assert [name for name in loaded if name.startswith(of_flare)] == []


def test_a_program_does_not_load_what_only_a_site_needs() -> None:
    loaded = set(_output("import sys; from dfm_async.exchange import Model, sync; print(*sys.modules)"))
    assert "dfm_async.exchange.agent" in loaded
    assert not loaded & {"dfm_async.exchange.executor", "dfm_async.session.session", "pydantic", "numpy"}


def test_an_extra_that_is_missing_is_named() -> None:
    code = "import sys; sys.modules['msgpack'] = None; import dfm_async.exchange.filepipe.transport"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(f"need an extra here: {install_hint('filepipe')}")


@pytest.mark.parametrize(("package", "missing"), [("web", "starlette"), ("client", "httpx"), ("client", "httpx_sse")])
def test_the_extra_of_a_package_is_named_if_it_is_missing(package: str, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import dfm_async.{package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(install_hint(package))


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined <= set(errors.__all__)


def test_the_version_is_a_version() -> None:
    assert all(part.isdigit() for part in dfm_async.__version__.split(".")[:2])
    try:
        installed = importlib.metadata.version("dfm-async")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == dfm_async.__version__


# documentation


def _undocumented(value: Any, name: str) -> list[str]:
    missing = [] if (value.__doc__ or "").strip() else [name]
    if isinstance(value, type):
        for cls in value.__mro__:
            if not cls.__module__.startswith("dfm_async"):
                continue
            for key, member in list(vars(cls).items()):
                found = member.fget if isinstance(member, property) else getattr(member, "func", member)
                found = getattr(found, "__func__", found)
                if not key.startswith("_") and inspect.isroutine(found) and not (found.__doc__ or "").strip():
                    missing.append(f"{name}.{key}")
    return missing


def test_every_public_name_and_method_is_documented() -> None:
    missing = [found for name, value in EVERYTHING.items() for found in _undocumented(value, name)]
    assert not missing


def test_docstrings_begin_with_a_sentence() -> None:
    wrong = []
    for name, value in EVERYTHING.items():
        if not isinstance(value, type) and not inspect.isroutine(value):
            continue
        first = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        if not first.endswith((".", ".``", ":")):
            wrong.append((name, first))
    assert not wrong


# errors

_failed = errors.OperationFailed("s", "op", "op#1", (0, 2), 2, "ValueError", "no", "Traceback ...\nValueError: no")
ERRORS: list[errors.DfmError] = [
    errors.DfmError("plain"),
    errors.PipelineError("p", [Problem("a#1", "is wrong"), Problem("", "is empty")]),
    errors.PipelineError(None, [Problem("a#1", "is wrong")]),
    errors.PlaceholderError("p", [Problem("n0", "cannot become a part of a text")]),
    errors.FederationError(
        "f", [FileProblem("f.yaml", 2, 3, "sites.a", "is wrong"), FileProblem("g.yaml", 0, 0, "", "is gone")]
    ),
    errors.DeploymentError("weather", ["site 'a b' is wrong"]),
    errors.DeploymentError("weather", ["site 'a b' is wrong", "there is no user"]),
    errors.FlareError("the federation cannot be reached", "Ask the doctor"),
    errors.FlareError("the federation cannot be reached", ""),
    errors.PipelineDenied("lab", "no rule of this site is for ann"),
    errors.PartialError("city", "Rome"),
    errors.ParameterError(["x is missing", "y is unknown"]),
    errors.JobExists("order-17"),
    errors.NotEnoughReplies(1, 2, ("train#1 at west: OSError: no signal",)),
    errors.DecodingError("op#1", "module 'm' is not loaded here"),
    errors.EncodingError("function", "value[0]", "it cannot be pickled"),
    errors.FobsError("it has no encoding", "fractions.Fraction"),
    errors.FobsError("it is cut off"),
    errors.ShippingError("op", "s", "it cannot be pickled"),
    errors.LoadingError("lab", "operation 'op'", "pkg.Class", "is not there"),
    errors.SecretError("lab", "key", "is not there"),
    errors.StreamOverrun("op#1", 1000),
    _failed,
    errors.WorkerLost("s", -9),
    errors.WorkerLost("s", 3, "said goodbye"),
    errors.WorkerLost("s", -9, "", ["one", "two"], out_of_memory=True),
    errors.WorkerLost("s", None),
    errors.JobFailed("j", [_failed], 1),
    errors.JobFailed("j", [_failed, errors.WorkerLost("s", 1)], 7),
    errors.JobFailed("j", [], 1),
    errors.JobAborted("j", "cancelled"),
    errors.JobNotFound("j"),
    errors.QueueFull(10_000),
    errors.JobOwned("j", 17, "here"),
    errors.JobInterrupted("j", "its application has ended"),
    errors.ResultsExpired("j", 1, 5),
    errors.ResultsUnread("j", 1000),
    errors.SessionClosed("closed"),
    errors.StoreError("jobs.db", "the disk is full", "Make room"),
    errors.ServiceError("http://127.0.0.1:8000", "too many jobs wait", 429, "queue"),
    errors.ServiceError("http://127.0.0.1:8000", "cannot be reached"),
    errors.ExchangeError("plain"),
    errors.HandshakeRefused("its token was used already"),
    errors.HttpCallFailed("pets.Get", "GET", "/pets/{id}", 404, "Not Found", "no such pet"),
    errors.HttpCallFailed("pets.Get", "GET", "/pets/{id}", None, "no answer within 30 s"),
    errors.AgentClosed("ended"),
    errors.AgentClosed("peer gone", "the connection was closed"),
    errors.CallStateError("get_task", "the last task is not answered"),
    errors.ConversionError("result", "train 1", "ValueError: no"),
    errors.ResultNotDelivered("1", "failed", "the receiver has gone"),
    errors.TransferFailed("1", "site", "it stalled"),
    errors.BadTask("tran", "it is unknown"),
    errors.BadResult("validate", "it has no metrics"),
    errors.TaskRejected("train", "16 tasks are waiting already"),
    errors.TaskAborted("train", "the site stops"),
    errors.PeerGone("the connection was closed"),
    errors.PeerGone("the connection was closed", ["one", "two"]),
    errors.LaunchFailed("train", "there is no such file"),
    errors.LaunchFailed("train", "it ended with exit code 3", 3, ["one", "two"]),
    errors.ProgramExited("train", -9, ["one", "two"]),
    errors.ProgramExited("train", 3),
    errors.ProgramFailed("train", "EXECUTION_EXCEPTION", "ValueError: no", ["one"]),
    errors.ProgramFailed("train", "BAD_TASK_DATA", ""),
]


def test_the_list_of_errors_below_is_complete() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {type(error) for error in ERRORS}


def test_every_error_derives_from_the_root() -> None:
    for error in ERRORS:
        assert isinstance(error, dfm_async.DfmError)
        assert not isinstance(error, (OSError, ValueError, KeyError))


def _data(error: BaseException) -> dict[str, Any]:
    return {name: repr(value) for name, value in vars(error).items() if not name.startswith("__")}


def test_every_error_survives_pickle_with_its_text_and_data() -> None:
    for error in ERRORS:
        for dumps in (pickle.dumps, cloudpickle.dumps):
            arrived = pickle.loads(dumps(error))
            assert type(arrived) is type(error)
            assert str(arrived) == str(error)
            assert repr(arrived) == repr(error)
            assert _data(arrived) == _data(error)


def test_every_error_says_something_with_its_data_in_it() -> None:
    for error in ERRORS[1:]:
        text = str(error)
        assert text
        assert "None" not in text
        for value in vars(error).values():
            if isinstance(value, str) and value:
                assert value.split("\n")[0] in text or isinstance(error, errors.OperationFailed)


def test_a_failed_job_has_its_errors_as_its_cause() -> None:
    one = pickle.loads(pickle.dumps(errors.JobFailed("j", [_failed], 1)))
    assert isinstance(one.__cause__, errors.OperationFailed)
    several = pickle.loads(pickle.dumps(errors.JobFailed("j", [_failed, errors.WorkerLost("s", 1)], 7)))
    assert isinstance(several.__cause__, ExceptionGroup)
    assert [type(e) for e in several.__cause__.exceptions] == [errors.OperationFailed, errors.WorkerLost]
    assert "7 errors" in str(several)


# types

_HEAD = """
from collections.abc import AsyncIterator, Iterator
from typing import Any
from dfm_async import *
from dfm_async import BestOf, Federation, ForEach, Pipeline, PlaceParam, RetryPolicy, Session, Yield

fed = Federation("typed")
site = fed.site("here")

@site.operation
def plain(x: int, text: str = "") -> float:
    return float(x)

@site.operation(deadline=2.0)
def optioned(x: int) -> int:
    return x

@site.operation
async def later(x: int) -> int:
    return x

@site.operation
def some(n: int) -> Iterator[int]:
    yield from range(n)

@site.operation
def total(values: list[int]) -> int:
    return sum(values)

@site.operation
class Adder:
    def body(self, x: int) -> int:
        return x

@fed.pipeline
def report(day: int, base: float = 1.0) -> float:
    return plain(day)

@fed.pipeline(name="other")
def silent(day: int) -> None:
    plain(day)

session = Session(fed)

"""


def _in_async(*lines: str) -> str:
    return "async def f() -> None:\n" + "\n".join("    " + line for line in lines)


_GOOD = {
    "a plain call": "plain(1)",
    "a call with a keyword": "plain(1, text='x')",
    "the declared result": "y: float = plain(1)",
    "a decorator with options": "z: int = optioned(1)",
    "a call with a site": "plain(1, site='here')",
    "a call with a site object": "plain(1, site=site)",
    "a call with a choice of sites": "plain(1, site=BestOf(['here']))",
    "a call with retry": "plain(1, retry=RetryPolicy(attempts=2))",
    "a call with a deadline and an order": "plain(1, deadline=2.0, after=plain(2))",
    "a parameter": "plain(PlaceParam('x'))",
    "an operation passed on": "optioned(optioned(1))",
    "a yield of a node": "Yield(plain(1), place='p')",
    "an awaited coroutine": "async def f() -> int:\n    value: int = await later(1)\n    return value",
    "a session": "async def g() -> None:\n    async with Session(fed) as s:\n"
    "        job = await s.execute(Pipeline('p'))\n"
    "        async for result in job:\n            place: str = result.place",
    "an async operation's value used by another": "with Pipeline('p'):\n    optioned(later(1))",
    "a generator's value used by another": "with Pipeline('p'):\n    total(some(3))",
    "results and failures": _in_async(
        "job = await session.execute(report, {'day': 1})",
        "async for item in job.results(errors='yield'):",
        "    if isinstance(item, Failure):",
        "        error: DfmError = item.error",
        "    else:",
        "        place: str = item.place",
    ),
    "a direct call": _in_async(
        "x: float = await session.call(plain, 1, text='x')", "print(await session.call(plain, 1))"
    ),
    "a direct call of a coroutine": _in_async("x: int = await session.call(later, 1)"),
    "a direct call with options": _in_async("x: float = await session.call(plain, 1, site=site, deadline=2)"),
    "a direct call of a class": _in_async("await session.call(Adder, 1)"),
    "a direct call of a generator": _in_async("x: list[int] = await session.call(some, 1)"),
    "a map": _in_async("async for x in session.map(plain, [1, 2], concurrency=2):", "    y: float = x"),
    "a map of a coroutine": _in_async("x: list[int] = [y async for y in session.map(later, range(3), site='here')]"),
    "a map with errors": _in_async(
        "async for x in session.map(plain, [1], errors='yield', ordered=False):",
        "    n: int = x.index",
        "    y: float = x.value",
        "    e: Exception | None = x.error",
    ),
    "a block of a map": _in_async(
        "async with session.map(plain, [1]) as values:", "    x: float = await anext(values)"
    ),
    "a call at each site": _in_async(
        "async for reply in session.each(later, 1, at_least=1, within=2):",
        "    name: str = reply.site",
        "    y: int = reply.value",
    ),
    "a run": _in_async("x: float = await session.run(report, 1, base=2.0)", "print(await session.run(report, day=1))"),
    "a run without a result": _in_async("await session.run(silent, 1)"),
    "an execution of a function": _in_async("await session.execute(report, [{'day': 1}])"),
    "a type of an operation": "x: Operation[[int], int] = optioned\ny: Pipeline = report",
    "a name of a public module": "from dfm_async.stats import LaneStats\nn: int = LaneStats(jobs=1, alive=True).jobs",
}
_BAD = {
    "a wrong type": "plain('one')",
    "a wrong keyword": "plain(1, txt='x')",
    "a missing argument": "plain()",
    "too many arguments": "plain(1, 'x', 2)",
    "a wrong result": "n: str = plain(1)",
    "a wrong type with options": "optioned('one')",
    "a retry that is none": "plain(1, retry=3)",
    "a deadline that is none": "plain(1, deadline='soon')",
    "a failure used as a result": _in_async(
        "job = await session.execute(report, {'day': 1})",
        "print([item.value async for item in job.results(errors='yield')])",
    ),
    "a direct call with a wrong type": _in_async("await session.call(plain, 'one')"),
    "a direct call without an argument": _in_async("await session.call(plain)"),
    "a direct call with a wrong keyword": _in_async("await session.call(plain, 1, txt='x')"),
    "a direct call with a wrong result": _in_async("x: str = await session.call(later, 1)"),
    "a direct call of a function": _in_async("await session.call(len, [])"),
    "a direct call with a wrong option": _in_async("await session.call(plain, 1, retry=3)"),
    "a map with a wrong result": _in_async("x: list[str] = [y async for y in session.map(plain, [1])]"),
    "a map with wrong errors": _in_async("session.map(plain, [1], errors='skip')"),
    "a map over no iterable": _in_async("session.map(plain, 1)"),
    "a map of wrong inputs": _in_async("session.map(plain, ['one'])"),
    "a reply with a wrong value": _in_async("async for r in session.each(later, 1):", "    x: str = r.value"),
    "a run with a wrong type": _in_async("await session.run(report, 'one')"),
    "a run with a wrong keyword": _in_async("await session.run(report, 1, bas=2.0)"),
    "a run with a wrong result": _in_async("x: str = await session.run(report, 1)"),
    "an operation that does not exist": "site.operatoin(plain)",
    "a name that does not exist": "import dfm_async\ndfm_async.Sesion",
    "a name that does not exist in a public module": "from dfm_async.stats import LaneStat",
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says about each of the snippets."""
    folder: Path = tmp_path_factory.mktemp("typed")
    lines = _HEAD.splitlines()
    owner: dict[int, str] = {}
    for index, (name, code) in enumerate({**_GOOD, **_BAD}.items()):
        body = [f"def snippet_{index}() -> None:", *("    " + line for line in code.splitlines())]
        for line in body:
            lines.append(line)
            owner[len(lines)] = name
    path = folder / "snippets.py"
    path.write_text("\n".join(lines) + "\n")
    root = Path(dfm_async.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {name: [] for name in {**_GOOD, **_BAD}}
    for line in done.stdout.splitlines():
        file, number, kind, *_ = line.split(":")
        if Path(file).name == "snippets.py" and kind.strip() == "error":
            found.setdefault(owner.get(int(number), "head"), []).append(line)
    return found


def test_the_definitions_of_operations_pass_type_checking(complaints: dict[str, list[str]]) -> None:
    assert complaints.get("head", []) == []


def test_correct_code_passes_type_checking(complaints: dict[str, list[str]]) -> None:
    assert {name: complaints[name] for name in _GOOD if complaints[name]} == {}


def test_wrong_code_fails_type_checking(complaints: dict[str, list[str]]) -> None:
    assert [name for name in _BAD if not complaints[name]] == []


def test_the_package_ships_its_types() -> None:
    assert (Path(dfm_async.__file__).parent / "py.typed").exists()
