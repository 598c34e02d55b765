"""What the package promises: names, documentation, errors, types."""

from __future__ import annotations

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
from dfm_async import deploy, discovery, drawing, errors, exchange, site, telemetry, testing, web
from dfm_async.base.installation import install_hint
from dfm_async.errors import FileProblem, Problem
from dfm_async.exchange import sync
from dfm_async.exchange.filepipe.gate import FilePipeGate

REQUIRED = {
    "Federation", "Site", "Pipeline", "PlaceParam", "Yield", "ForEach", "Repeat", "If", "TryFromCache", "BestOf",
    "collect", "Session", "Job", "JobStatus", "Plan", "Result", "RetryPolicy", "ResultLimits", "LocalOptions",
    "DfmError", "PipelineError", "ParameterError", "JobFailed", "JobAborted", "JobNotFound", "OperationFailed",
    "WorkerLost", "EncodingError", "ResultsExpired", "SessionClosed", "FlareAgent", "LauncherExecutor", "Program",
    "SubprocessLauncher", "FlareOptions", "LocalFlare", "FlareError", "PipelineDenied", "DeploymentError",
}  # fmt: skip
PACKAGES = [dfm_async, deploy, discovery, drawing, exchange, site, telemetry, testing, web]
EVERYTHING = {
    **{name: getattr(dfm_async, name) for name in dfm_async.__all__},
    **{f"deploy.{name}": getattr(deploy, name) for name in deploy.__all__},
    **{f"exchange.{name}": getattr(exchange, name) for name in exchange.__all__},
    **{f"sync.{name}": getattr(sync, name) for name in sync.__all__},
    **{f"testing.{name}": getattr(testing, name) for name in testing.__all__},
    "FilePipeGate": FilePipeGate,
    **{f"discovery.{name}": getattr(discovery, name) for name in discovery.__all__},
    **{f"drawing.{name}": getattr(drawing, name) for name in drawing.__all__},
    **{f"site.{name}": getattr(site, name) for name in site.__all__},
    **{f"telemetry.{name}": getattr(telemetry, name) for name in telemetry.__all__},
    **{f"web.{name}": getattr(web, name) for name in web.__all__ if name != "Action"},
}


# names


_of_each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda found: found.__name__)


def test_all_has_what_is_required() -> None:
    assert set(dfm_async.__all__) >= REQUIRED


@_of_each_package
def test_all_is_sorted_without_repetition(package: types.ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__))


@_of_each_package
def test_every_public_name_can_be_imported(package: types.ModuleType) -> None:
    names: dict[str, Any] = {}
    exec(f"from {package.__name__} import *", names)
    assert set(package.__all__) <= names.keys()


@_of_each_package
def test_the_package_shows_what_it_lists_and_nothing_else(package: types.ModuleType) -> None:
    """Also before a name was used for the first time: names are loaded lazily."""
    code = f"import {package.__name__} as it; print(*[name for name in dir(it) if not name.startswith('_')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == package.__all__


@_of_each_package
def test_a_name_that_does_not_exist_is_an_attribute_error(package: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing  # noqa: B018 - the access is the test


def test_a_name_in_both_packages_is_the_same_thing() -> None:
    both = set(dfm_async.__all__) & set(exchange.__all__)
    assert both == {"FlareAgent", "LauncherExecutor", "Program", "SubprocessLauncher"}
    assert all(getattr(dfm_async, name) is getattr(exchange, name) for name in both)
    assert set(dfm_async.__all__) & set(deploy.__all__) == {"LocalFlare"}
    assert dfm_async.LocalFlare is deploy.LocalFlare


def test_whoever_stays_on_one_machine_loads_nothing_of_flare() -> None:
    code = "import sys; from dfm_async import FlareOptions, Session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "dfm_async.session.session" in loaded
    assert [
        name for name in loaded if name.startswith(("nvflare", "dfm_async.targets.flare", "dfm_async.deploy"))
    ] == []


def test_a_program_does_not_load_what_only_a_site_needs() -> None:
    """It waits for its imports before it says hello."""
    code = "import sys; from dfm_async.exchange import Model, sync; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "dfm_async.exchange.agent" in loaded
    assert not loaded & {"dfm_async.exchange.executor", "dfm_async.session.session", "pydantic", "numpy"}


def test_an_extra_that_is_missing_is_named() -> None:
    code = "import sys; sys.modules['msgpack'] = None; import dfm_async.exchange.filepipe.gate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(f"need an extra here: {install_hint('filepipe')}")


def test_the_extra_for_web_services_is_named() -> None:
    code = "import sys; sys.modules['starlette'] = None; import dfm_async.web"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(install_hint("web"))


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined <= set(dfm_async.__all__)
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

"""

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
    "an operation that does not exist": "site.operatoin(plain)",
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
