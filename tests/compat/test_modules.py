"""The modules of a federation that are made on import, and the sessions that applications get from them."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import JobStatus
from dfm_async.compat import install
from dfm_async.compat.__main__ import main
from dfm_async.compat.session import FEDERATIONS, DfmSession
from tests.federations import NAMES, file_of
from tests.support.waiting import PROMPT

OURS = (*NAMES, "nv_dfm_core", "small")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test installs in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def forget() -> None:
        FEDERATIONS.clear()
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]

    forget()
    yield
    forget()


@pytest.fixture
def session() -> Iterator[DfmSession]:
    install(file_of("examplefed"))
    from examplefed.fed.runtime.concierge import get_session

    with get_session(target="inline") as session:
        yield session


class Received:
    """A callback that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []

    def __call__(self, site: str, node: str | None, frame: Any, place: str, data: Any) -> None:
        self.got.append((place, data if isinstance(data, str) else type(data).__name__))


STOPS = [("_dfm_status_", "StopToken")] * 2

# modules


def test_operations_sites_schemas_and_versions_can_be_imported() -> None:
    fed = install(file_of("minifed"))
    api = importlib.import_module("minifed.fed.api.math")
    assert repr(api.Square) == repr(fed.operations.math.Square)
    assert repr(importlib.import_module("minifed.fed.site.alpha.math").Square).endswith("at 'alpha'>")
    assert importlib.import_module("minifed.fed.schema.states").State is fed.schemas.states.State
    assert importlib.import_module("minifed.fed.runtime.alpha").API_VERSION == "0.1.0"
    assert importlib.import_module("minifed.lib.numbers").__file__.startswith(str(file_of("minifed").parents[1]))  # type: ignore[union-attr]
    assert install(file_of("minifed")) is fed


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("examplefed.fed.api.nobody", r"no operation 'nobody' there \(it has: users.GreetMe\)"),
        ("examplefed.fed.site.concierge.nobody", "no operation 'nobody'"),
        ("examplefed.fed.site.cellar.users", r"no site 'cellar' \(it has: concierge, server, reception\)"),
        ("examplefed.fed.runtime.cellar", "no site 'cellar'"),
        ("examplefed.fed.apis", r"no 'apis' \(it has: api, runtime, schema, site\)"),
    ],
)
def test_module_that_the_federation_lacks_is_reported(module: str, message: str) -> None:
    install(file_of("examplefed"))
    with pytest.raises(ModuleNotFoundError, match=message):
        importlib.import_module(module)


SMALL = """\
dfm: 1.0.0
info: {api-version: 1.2.3, code-package: small}
operations:
  Same: {parameters: {x: {type: number}}, required: [x], returns: number}
sites:
  lab: {interface: {"#/operations/Same": {adapter: small_lib.Same, args: from-operation}}}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "federation.dfm.yaml"
    path.write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_generated_code_and_installed_nv_dfm_core_are_not_used(small: Path) -> None:
    for package in ("small", "small/fed", "small/fed/api", "nv_dfm_core"):
        (small.parent / package).mkdir()
        (small.parent / package / "__init__.py").write_text("generated = True\n")
    install(small)
    for name in ("small", "small.fed.api", "nv_dfm_core"):
        assert hasattr(importlib.import_module(name), "generated") is (name == "small")


def test_federation_needs_no_package_of_its_own(small: Path) -> None:
    install(small)
    assert hasattr(importlib.import_module("small.fed.api"), "Same")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("small.lib")


def test_install_refuses_what_would_not_work(small: Path, tmp_path: Path) -> None:
    install(small)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "federation.dfm.yaml"
    other.write_text(SMALL)
    with pytest.raises(ValueError, match="was installed before, from "):
        install(other)
    FEDERATIONS.clear()
    sys.modules["nv_dfm_core"] = type(sys)("nv_dfm_core")
    with pytest.raises(ImportError, match="nv_dfm_core was imported before"):
        install(small)


# sessions


def test_job_delivers_results_and_tokens(session: DfmSession) -> None:
    from examplefed.fed.api.users import GreetMe
    from nv_dfm_core.api import Pipeline, PlaceParam, Yield

    with Pipeline() as pipeline:
        first = GreetMe(name=PlaceParam(place="name", multiuse=True), site="server")
        second = GreetMe(name=first.fieldref(4), site="server", dfm_after=first.dfm_node_id)
        Yield(value=second, place="letter", dfm_after=first.dfm_node_id)
    prepared, default, letters = session.prepare(pipeline), Received(), Received()
    job = session.execute(prepared, None, autostop=False, default_callback=default, place_callbacks={"letter": letters})
    job.send_input_params(input_params={"name": "Ann"})
    job.send_stop_frame()
    assert job.wait_until_finished(timeout=PROMPT)
    assert (letters.got, default.got) == ([("letter", "The server says good evening, s!")], STOPS)
    again = Received()
    other = session.reattach(job.job_id, default_callback=again)
    assert other.wait_until_finished()
    assert again.got == [*letters.got, *STOPS]
    assert session.reattach(job.job_id).wait_until_finished()
    assert not session.reattach("nothing").was_found


def test_failed_job_is_finished_and_its_error_reported(session: DfmSession, caplog: pytest.LogCaptureFixture) -> None:
    from examplefed.fed.site.concierge.users import GreetMe
    from nv_dfm_core.api import Pipeline, Yield

    with Pipeline() as pipeline:
        Yield(value=GreetMe(name="Ann", greeting="{nobody}"))
    got = Received()
    job = session.execute(session.prepare(pipeline), place_callbacks={"yield": got})
    assert job.wait_until_finished()
    assert job.get_status() is JobStatus.FINISHED
    assert got.got == [("yield", "ErrorToken")]
    assert [record.levelno for record in caplog.records if "raised KeyError" in record.message] == [logging.ERROR]


def test_callback_may_raise_and_detach_its_job(session: DfmSession, caplog: pytest.LogCaptureFixture) -> None:
    from examplefed.fed.api.users import GreetMe
    from nv_dfm_core.api import Pipeline, Yield

    with Pipeline() as pipeline:
        Yield(value=GreetMe(name="Ann", site="server"))
    called, started = [], threading.Event()

    def callback(*args: Any) -> None:
        called.append(args[3])
        assert started.wait(PROMPT)
        job.detach()
        raise LookupError("not mine")

    job = session.execute(session.prepare(pipeline), default_callback=callback)
    started.set()
    assert job.wait_until_finished(PROMPT)
    assert called == ["yield"]
    assert "a callback of job" in caplog.text
    assert session._session.jobs()[0].wait() is JobStatus.FINISHED


def test_session_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"'examplefed' is not installed: call dfm_async.compat.install\(path\)"):
        DfmSession("examplefed", "concierge")
    install(file_of("examplefed"))
    from examplefed.fed.runtime.concierge import get_session

    with pytest.raises(TypeError, match="needs user=, and admin_package="):
        get_session()
    with pytest.raises(TypeError, match="workers"):
        get_session(target="local", workers=3)
    with pytest.raises(TypeError, match="leave callback_dispatcher= out"):
        get_session(target="local", callback_dispatcher=object())


# the program


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m dfm_async.compat FEDERATION.yaml APP.py"),
        (["federation.dfm.yaml", "-m"], "usage: "),
        (["nowhere.yaml", "app.py"], "cannot read nowhere.yaml: "),
        ([str(file_of("myfed")), "nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_wrong_arguments_of_the_program_are_reported(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (capsys.readouterr().err or str(ended.value.code)).startswith(message)
