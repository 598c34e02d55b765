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
from dfm_async import _MOVED, deploy, errors, site, sync
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
    assert 35 <= len(ROOT) <= 50


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
    modules = [module for module in PUBLIC_MODULES if module is not sync]  # which has the blocking ones
    assert all(getattr(module, name) is value for module in modules if name in public_names(module))


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


def test_the_old_name_of_the_authorizer_of_sites_warns() -> None:
    found = r"^dfm_async\.site\.Authorizer is deprecated: import PipelineAuthorizer from dfm_async\.site$"
    with pytest.warns(DeprecationWarning, match=found) as caught:
        authorizer = getattr(site, "Authorizer")  # noqa: B009 - type checkers do not know it
    assert authorizer is site.PipelineAuthorizer
    assert caught[0].filename == __file__
    assert "Authorizer" not in public_names(site)


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


@pytest.mark.parametrize(("package", "missing"), [("web", "starlette"), ("client", "httpx2")])
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
    errors.PlaceholderError("p", [Problem("n0", "cannot be formatted as text")]),
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
    errors.EventsFull(["event 'go' cannot be kept: parameter set 0 has 1,000 events that were not taken"]),
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
    errors.ResultsUnread("j", 254, "max_items=50, which each site may exceed by window=256"),
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


def test_a_failed_job_names_the_reason_of_its_first_error() -> None:
    too_few = str(errors.NotEnoughReplies(1, 2, ("train#1 at west: OSError: no signal", "train#2 at east: late")))
    failed = errors.OperationFailed("hub", "gather", "gather#3", (0,), 1, "NotEnoughReplies", too_few, "")
    reason = "raised NotEnoughReplies: 1 of 3 calls succeeded, 2 needed: train#1 at west: OSError: no signal"
    assert str(errors.JobFailed("j", [failed], 1)).endswith(f"gather#3 at site 'hub' (frame (0,)) {reason}")


def test_a_remote_traceback_without_frames_is_not_repeated() -> None:
    message = "it ended with exit code 3\nlast lines:\n  hi"
    traceback = f"LaunchFailed: {message}\n"
    failed = errors.OperationFailed("lab", "fit", "fit#0", (0,), 1, "LaunchFailed", message, traceback)
    assert str(failed) == f"fit#0 at site 'lab' (frame (0,)) raised LaunchFailed: {message}"


def test_the_package_ships_its_types() -> None:
    assert (Path(dfm_async.__file__).parent / "py.typed").exists()
