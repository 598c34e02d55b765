"""Adapters that are written for nv_dfm_core run where it is not installed, if the federation asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, JobFailed, Pipeline, PlaceParam, Session, Yield
from dfm_async.federation import ClassPath, FromParam, FromProvider, FromSite, VaultConfig
from dfm_async.federation.bindings import Binding
from dfm_async.site import shim
from tests.conftest import Connect
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value

WRITTEN_FOR_DFM = """
from typing import TYPE_CHECKING, Any

import nv_dfm_core.exec
from nv_dfm_core.exec import FsspecConfig, Provider, SecretsVault, SecretsVaultConfig, Site
from nv_dfm_core.api.pydantic import PolymorphicBaseModel
from nv_dfm_core.telemetry import SpanBuilder


class Model(PolymorphicBaseModel):
    name: str


class Station(Site):
    def __init__(self, dfm_context, cache_config: FsspecConfig, secrets_vault_config: SecretsVaultConfig, height=0):
        super().__init__(dfm_context, cache_config, secrets_vault_config)
        self.height = height


class Sensor(Provider):
    def __init__(self, site: Site, unit: str):
        super().__init__(site)
        self.unit = unit


class Vault(SecretsVault):
    def __init__(self, token: str, **kwargs: Any):
        super().__init__(**kwargs)
        self._token = token

    def secret_for_key(self, key: str) -> str:
        return f"{key}:{self._token}"


class Measure:
    def __init__(self, site: nv_dfm_core.exec.Site, provider: Provider | None, scale: int):
        self._site = site
        self._provider = provider
        self._scale = scale

    async def body(self, x: int, unit: str, height: int) -> dict:
        with self._site.telemetry_span("measuring", {"x": x}) as span:
            if span:
                span.set_attribute("scale", self._scale)
                span.set_ok()
        self._site.dfm_context.logger.info("measured %s", x)
        return {
            "x": x * self._scale,
            "unit": unit,
            "height": height,
            "same": self._provider.site is self._site,
            "secret": len(self._site.secret_for_key("key")),
            "model": Model(name="m").model_dump(),
            "base": nv_dfm_core.exec.Site.__module__,
        }
"""


def measured(x: int) -> Any: ...


def stations(*, compat: bool = True) -> Federation:
    fed = Federation("stations", compat=compat)
    fed.declare("measure", measured)
    vault = VaultConfig(path="stations_lib.Vault", args={"token": "t-o-k-e-n"}) if compat else None
    lab = fed.site("lab", impl=ClassPath("stations_lib.Station", {"height": 12}), vault=vault)
    lab.provider("sensor", ClassPath("stations_lib.Sensor", {"unit": "K"}))
    bind: dict[str, Binding] = {
        "x": FromParam("x"),
        "unit": FromProvider("sensor", "unit"),
        "height": FromSite("height"),
    }
    lab.adapt("measure", ClassPath("stations_lib.Measure", {"scale": 2}), provider="sensor", bind=bind)
    return fed


def _forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("nv_dfm_core", "stations_lib"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def written_for_dfm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with adapters that are written for DFM; what it leaves in this process is removed."""
    (tmp_path / "stations_lib.py").write_text(WRITTEN_FOR_DFM)
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    yield
    _forget()


def measuring(fed: Federation) -> Pipeline:
    return pipeline_of(fed.operations.measure, x=21)


async def failure(code: str, tmp_path: Path) -> str:
    """Return the error of a job whose adapters are in this module."""
    (tmp_path / "stations_lib.py").write_text(code)
    fed = stations()
    fed.sites["lab"].vault = VaultConfig()
    async with Session(fed, target="inline") as session:
        with pytest.raises(JobFailed) as caught:
            await first_value(session, measuring(fed))
    return str(caught.value.errors[0])


async def test_an_adapter_for_dfm_runs_unmodified(connect: Connect) -> None:
    fed = stations()
    async with connect(fed) as session:
        found = await first_value(session, measuring(fed))
    assert found == {
        "x": 42,
        "unit": "K",
        "height": 12,
        "same": True,
        "secret": len("key:t-o-k-e-n"),
        "model": {"name": "m"},
        "base": "dfm_async.site.objects",
    }


SENDS = """
from nv_dfm_core.exec import Frame, Site


class Send:
    def __init__(self, site: Site):
        self._site = site

    async def body(self, job: str) -> None:
        context = self._site.dfm_context
        await context.send_to_place(
            to_job=job, to_site="lab", to_place="x", is_yield=False, frame=Frame.start_frame(0), data=42
        )
"""


async def test_an_adapter_that_sends_gives_a_frame_as_dfm_wants_it(tmp_path: Path) -> None:
    (tmp_path / "stations_lib.py").write_text(SENDS)
    fed = Federation("sending", compat=True)
    fed.declare("send", lambda job: None)
    fed.site("lab").adapt("send", ClassPath("stations_lib.Send"))
    with Pipeline() as receiver:
        Yield(PlaceParam("x"))
    with Pipeline() as sender:
        fed.operations.send(PlaceParam("job"))
    async with Session(fed, target="inline") as session:
        other = await session.execute(receiver, [], autostop=False)
        await (await session.execute(sender, {"job": other.job_id}))
        await other.send_stop_frame()
        assert [result.value for result in await other.collect()] == [42]


async def test_nothing_stands_in_for_dfm_unless_the_federation_asks() -> None:
    fed = stations(compat=False)
    async with Session(fed, target="inline") as session:
        with pytest.raises(JobFailed, match=r"Set compat=True for the federation \(--compat; .* install nv-dfm-core"):
            await first_value(session, measuring(fed))
    assert "nv_dfm_core" not in sys.modules


async def test_a_name_that_is_missing_says_so(tmp_path: Path) -> None:
    found = await failure("from nv_dfm_core.exec import NetRunner\n", tmp_path)
    assert "cannot import name 'NetRunner' from 'nv_dfm_core.exec'" in found
    assert "lacks this name: install nv-dfm-core" in found
    with pytest.raises(
        AttributeError, match=r"has no nv_dfm_core.exec.NetRunner \(it has: DfmContext, .*Install nv-dfm"
    ):
        sys.modules["nv_dfm_core.exec"].NetRunner  # noqa: B018 - the access is the test


async def test_a_module_that_is_missing_says_so(tmp_path: Path) -> None:
    found = await failure("import nv_dfm_core.targets.local\n", tmp_path)
    assert "stands in for nv_dfm_core (compat=True), but not for nv_dfm_core.targets: install nv-dfm-core" in found
    assert "set compat=True" not in found


async def test_a_module_that_an_installed_dfm_lacks_needs_another_version(tmp_path: Path) -> None:
    (tmp_path / "nv_dfm_core").mkdir()
    (tmp_path / "nv_dfm_core" / "__init__.py").touch()
    found = await failure("import nv_dfm_core.targets\n", tmp_path)
    assert "does not have nv_dfm_core.targets: install another version" in found


CACHES = """
from nv_dfm_core.exec import Site


class Measure:
    def __init__(self, site: Site):
        self._site = site

    async def body(self, x: int) -> list:
        path = self._site.cache_storage("maps")
        (path / "one.txt").write_text(str(x))
        return [path.protocol, path.as_posix(), (path / "one.txt").as_posix()]
"""


async def test_cached_files_are_where_dfm_has_them(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stations_lib.py").write_text(CACHES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fed = Federation("stations", compat=True)
    fed.declare("measure", measured)
    for site in ("lab", "yard"):
        fed.site(site).adapt("measure", ClassPath("stations_lib.Measure"), bind={"x": FromParam("x")})
    with Pipeline() as pipeline:
        for site in ("lab", "yard"):
            Yield(fed.operations.measure(3, site=site), place=site)
    async with connect(fed) as session:
        found = {result.place: result.value for result in await (await session.execute(pipeline)).collect()}
    maps = tmp_path / "cache" / "stations" / "maps"
    assert found["lab"] == found["yard"] == ["file", f"file://{maps}", f"file://{maps}/one.txt"]
    assert (maps / "one.txt").read_text() == "3"


async def test_callbacks_may_name_places_that_the_pipeline_lacks(connect: Connect) -> None:
    assert shim.install()
    from nv_dfm_core.api import DISCOVERY_PLACE_NAME, STATUS_PLACE_NAME

    fed, got = stations(), []
    callbacks = {name: lambda *args: got.append(args[3]) for name in (STATUS_PLACE_NAME, DISCOVERY_PLACE_NAME, "yield")}
    async with connect(fed) as session:
        job = await session.execute(measuring(fed), place_callbacks=callbacks)
        await job
        assert got == ["yield"]
        await (await session.reattach(job.job_id, place_callbacks=callbacks)).wait_until_finished()


def test_conditions_and_tokens_have_the_names_and_arguments_of_dfm() -> None:
    assert shim.install()
    from nv_dfm_core import __version__
    from nv_dfm_core.api import And, Equal, ErrorToken, GreaterThan, Not, Or, StopToken, well_known_id
    from nv_dfm_core.exec import Frame, PanicError

    with Pipeline():
        a = PlaceParam("a")
        ours = ((a == 3) & ~(a > 5)) | (a == 7)
        both = And(exp=[Equal(left=a, right=3), Not(exp=GreaterThan(left=a, right=5))])
        assert repr(Or(exp=[both, Equal(left=a, right=7)])) == repr(ours)
    assert __version__.startswith("3.")
    assert (well_known_id("x").ident, well_known_id(1).ident) == ("x", "wkid1")
    assert [error.message for error in ErrorToken.from_exception(ValueError("bad")).errors] == ["bad"]
    assert str(PanicError(ValueError("bad"))) == "bad"
    assert Frame.stop_frame().is_stop_frame()
    assert not Frame.start_frame(1).is_stop_frame()
    assert StopToken() == StopToken()


def test_what_is_installed_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "nv_dfm_core").mkdir()
    (tmp_path / "nv_dfm_core" / "__init__.py").write_text("real = True\n")
    assert not shim.install()
    import nv_dfm_core

    assert nv_dfm_core.real
    assert not shim.install()


def test_all_names_can_be_loaded() -> None:
    assert shim.install()
    assert shim.install()  # twice is once
    loaded = {
        name: [getattr(module, found) for found in module.__all__]
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "nv_dfm_core"
    }
    assert len(loaded["nv_dfm_core.exec"]) == 9
    assert len(loaded["nv_dfm_core.exec.discovery"]) == 10
    plain = {"_dfm_status_", "_dfm_discovery_"}
    assert all(
        found.__module__.startswith("dfm_async")
        for names in loaded.values()
        for found in names
        if not (isinstance(found, str) and found in plain)
    )
