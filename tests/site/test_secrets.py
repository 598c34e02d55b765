"""Secrets: where they come from, when they are asked for, and that they are nowhere else."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import secrets
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import keyring
import pytest
from keyring.backend import KeyringBackend
from keyring.backends.fail import Keyring as NoKeyring

from dfm_async import (
    DfmError,
    Federation,
    JobAborted,
    JobFailed,
    OperationContext,
    OperationFailed,
    Pipeline,
    Session,
    SessionClosed,
    Yield,
    current_context,
)
from dfm_async.engine.engine import Engine
from dfm_async.errors import SecretError
from dfm_async.federation import ClassPath, ExposedParameter, FromParam, FromSecrets, VaultConfig
from dfm_async.federation.bindings import Binding
from dfm_async.runtime.site_runtime import SiteRuntime
from dfm_async.site import EnvironmentVault, FileVault, KeyringVault
from dfm_async.web import AllowAnyone, Service
from tests.conftest import Connect, TargetName
from tests.site.adapters import StuckVault
from tests.support.pipelines import pipeline_of
from tests.support.sessions import first_value
from tests.support.waiting import PROMPT

HERE = "tests.site.adapters"


@pytest.fixture
def secret() -> str:
    """One of the kind that is easy to miss: it looks different in a repr, in JSON and in a URL."""
    return f'{secrets.token_hex(8)}"\\ä &{secrets.token_hex(4)}'


def of_how(how: str) -> int: ...  # type: ignore[empty-body]


def told(vault: Any, key: str | FromSecrets = "api_key") -> Federation:
    """Return a federation whose operation ``tell`` gets a secret of its site, and returns its length."""
    fed = Federation("vaulted")
    fed.declare("tell", of_how)
    secret = FromSecrets(key) if isinstance(key, str) else key
    bind: dict[str, Binding] = {"key": secret, "how": FromParam("how")}
    fed.site("lab", vault=vault).adapt("tell", ClassPath(f"{HERE}.Teller"), bind=bind)
    return fed


def telling(fed: Federation) -> Pipeline:
    return pipeline_of(fed.operations.tell, "how", name="telling")


async def length(session: Session, fed: Federation, how: str = "") -> Any:
    return await first_value(session, telling(fed), {"how": how})


async def inline_length(fed: Federation) -> Any:
    async with Session(fed, target="inline") as session:
        return await length(session, fed)


# where they come from


async def test_a_secret_is_in_the_environment_of_the_site_by_default(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("DFM_SECRET_API_KEY", secret)
    fed = told(None)
    async with connect(fed) as session:
        assert await length(session, fed) == len(secret)


async def test_a_secret_is_asked_for_anew_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = told(EnvironmentVault("TEAM_"))
    async with Session(fed, target="inline") as session:
        for size in (9, 14):
            monkeypatch.setenv("TEAM_API_KEY", secrets.token_hex(size))
            assert await length(session, fed) == 2 * size


@pytest.mark.parametrize("suffix", ["json", "yaml", "directory"])
async def test_a_secret_can_be_in_a_file(tmp_path: Path, secret: str, suffix: str) -> None:
    path = tmp_path / f"vault.{suffix}"
    if suffix == "directory":
        path.mkdir(mode=0o700)
        (path / "api_key").write_text(f"{secret}\n")
        (path / "api_key").chmod(0o600)
    else:
        path.write_text(json.dumps({"api_key": secret}))
        path.chmod(0o640)
    assert await inline_length(told(VaultConfig(path="file", args={"path": str(path)}))) == len(secret)


class _Ring(KeyringBackend):
    """A keyring in memory."""

    priority = 1

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # of keyring
        self.kept: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.kept[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.kept[service, username]


@pytest.fixture
def ring() -> Iterator[_Ring]:
    before, ring = keyring.get_keyring(), _Ring()
    keyring.set_keyring(ring)
    yield ring
    keyring.set_keyring(before)


async def test_a_machine_without_a_keyring_is_reported(ring: _Ring) -> None:
    keyring.set_keyring(NoKeyring())  # type: ignore[no-untyped-call] # what keyring takes if there is none
    with pytest.raises(SecretError, match="the site has no keyring: install a backend"):
        KeyringVault("weather").secret_for_key("key")


async def test_a_secret_can_be_in_the_keyring(ring: _Ring, secret: str) -> None:
    ring.set_password("weather", "api_key", secret)
    assert await inline_length(told(VaultConfig(path="keyring", args={"service": "weather"}))) == len(secret)
    with pytest.raises(SecretError, match="keyring set SERVICE other"):
        KeyringVault("weather").secret_for_key("other")


@pytest.mark.parametrize("name", ["ColdVault", "RemoteVault"])
async def test_a_vault_can_be_a_class_of_your_own_that_blocks_or_is_asynchronous(
    connect: Connect, name: str, secret: str
) -> None:
    args: dict[str, Any] = {"secrets": {"api_key": secret}} if name == "ColdVault" else {"value": secret}
    fed = told(VaultConfig(path=f"{HERE}.{name}", args=args))
    async with connect(fed) as session:
        assert await length(session, fed) == len(secret)


async def test_a_vault_that_the_site_has_built_is_closed_with_it(tmp_path: Path) -> None:
    fed = told(VaultConfig(path=f"{HERE}.ClosingVault", args={"folder": str(tmp_path)}))
    async with Session(fed, target="inline") as session:
        assert await length(session, fed) == len("from a vault with an end")
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()


async def test_a_value_for_an_exposed_parameter_spares_the_vault(connect: Connect) -> None:
    fed = told(None, FromSecrets("missing", ExposedParameter(param="token", type="string")))
    with Pipeline() as pipeline:
        Yield(fed.operations.tell("", token=""), place="none")
        Yield(fed.operations.tell("", token="own"), place="own")
    async with connect(fed) as session:
        results = await (await session.execute(pipeline)).collect()
    assert {result.place: result.value for result in results} == {"none": 0, "own": 3}


async def test_operations_ask_by_their_context(connect: Connect, secret: str) -> None:
    fed = Federation("asking")
    lab = fed.site("lab", vault=VaultConfig(path=f"{HERE}.RemoteVault", args={"value": secret}))

    @lab.operation
    async def ask() -> int:
        return len(await current_context().secret("any"))

    @lab.operation
    def ask_in_thread() -> int:
        context = current_context()
        return len(context.wait(context.secret("any")))

    with Pipeline() as pipeline:
        Yield(ask(), place="loop")
        Yield(ask_in_thread(), place="thread")
    async with connect(fed) as session:
        job = await session.execute(pipeline)
        assert [result.value for result in await job.collect()] == [len(secret)] * 2


def of_key(key: str) -> int: ...  # type: ignore[empty-body]


async def _asked_by_adapter(name: str, key: str, vault: VaultConfig | None = None) -> Any:
    """Return what an adapter gets that asks its site object, in a thread or on the loop."""
    fed = Federation("asking")
    fed.declare("ask", of_key)
    fed.site("lab", vault=vault).adapt("ask", ClassPath(f"{HERE}.{name}"), is_async=name == "AsksOnLoop")
    async with Session(fed, target="inline") as session:
        return await first_value(session, pipeline_of(fed.operations.ask, key=key))


@pytest.mark.parametrize("name", ["AsksItself", "AsksOnLoop"])
async def test_an_adapter_can_ask_its_site_object(monkeypatch: pytest.MonkeyPatch, secret: str, name: str) -> None:
    monkeypatch.setenv("DFM_SECRET_MINE", secret)
    assert await _asked_by_adapter(name, "mine") == len(secret)
    with pytest.raises(JobFailed, match="DFM_SECRET_OTHER is not set") as caught:
        await _asked_by_adapter(name, "other")
    assert isinstance(caught.value.errors[0].__cause__, ValueError)  # as adapters for DFM expect it


async def test_only_a_thread_can_ask_an_asynchronous_vault(secret: str) -> None:
    vault = VaultConfig(path=f"{HERE}.RemoteVault", args={"value": secret})
    assert await _asked_by_adapter("AsksItself", "any", vault) == len(secret)
    with pytest.raises(JobFailed, match="its vault is asynchronous: bind it with from-secrets"):
        await _asked_by_adapter("AsksOnLoop", "any", vault)


# what goes wrong


async def test_a_secret_that_is_not_there_fails_the_call_with_its_name(connect: Connect) -> None:
    fed = told(None, "missing")
    async with connect(fed) as session:
        with pytest.raises(JobFailed, match="secret 'missing' of site 'lab': the environment variable DFM_SECRET_MISS"):
            await length(session, fed)


async def test_a_vault_that_cannot_be_built_stops_the_site_and_shows_no_configuration(
    connect: Connect, target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, secret: str
) -> None:
    monkeypatch.setenv("DFM_SECRET_API_KEY", "the environment is not asked")
    args = {"secrets": {"api_key": secret}, "fail": secret}
    fed = told(VaultConfig(path=f"{HERE}.ColdVault", args=args))
    with pytest.raises(DfmError) as caught:
        async with connect(fed) as session:
            await length(session, fed)
    error = caught.value.__cause__ if isinstance(caught.value, JobAborted) else caught.value
    assert isinstance(error, SecretError if target == "inline" else DfmError)
    assert "the vault of site 'lab': tests.site.adapters.ColdVault cannot be built: ValueError was raised" in str(error)
    assert "adapters.py:" in str(error)
    assert "ended with" not in caplog.text  # it is reported once
    assert_absent(secret, *_texts_of(caught.value), caplog.text)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (VaultConfig(path="safe"), "class 'safe' is not one of environment, file, keyring, nor the path of a class"),
        (VaultConfig(path="subprocess.Popen"), "belongs to the standard library"),
        (VaultConfig(path=f"{HERE}.Echo"), "is not a vault: it has no secret_for_key"),
        (VaultConfig(args={"prefx": "A_"}), "environment cannot be built with its args: got an unexpected keyword"),
        (
            VaultConfig(path="file", args={"path": "/nowhere/vault.json"}),
            "'vault.json' cannot be read: No such file or directory (expected in /nowhere)",
        ),
        (object(), "an object of object has no secret_for_key"),
    ],
)
async def test_a_vault_that_is_none_is_refused_with_a_reason(config: Any, expected: str) -> None:
    with pytest.raises(DfmError, match="the vault of site 'lab'") as caught:
        async with Session(told(config), target="inline"):
            pass
    assert expected in str(caught.value)


async def test_a_homesite_whose_vault_does_not_work_opens_no_session(connect: Connect) -> None:
    fed = told(VaultConfig(path="file", args={"path": "/nowhere/vault.json"}))
    with pytest.raises(SecretError, match=r"'vault.json' cannot be read"):
        async with connect(fed, homesite="lab"):
            pass


async def test_what_a_vault_raises_is_reported_without_its_text(secret: str) -> None:
    fed = told(VaultConfig(path=f"{HERE}.RemoteVault", args={"value": secret}), "none")
    with pytest.raises(JobFailed, match=r"the vault \(RemoteVault\): KeyError was raised") as caught:
        await inline_length(fed)
    assert_absent(secret, *_texts_of(caught.value))


async def test_a_secret_that_is_missing_shows_the_code_that_asks_and_none_of_ours() -> None:
    fed = Federation("asking")
    lab = fed.site("lab")

    class Bound:
        async def body(self, key: str) -> str:
            return key

    @lab.operation
    async def asks(context: OperationContext) -> str:
        return str(await context.secret("nobody_has_it"))

    fed.declare("bound", lambda: None)
    lab.adapt("bound", Bound, bind={"key": FromSecrets("nobody_has_it")})
    texts = []
    async with Session(fed, target="inline") as session:
        for operation in ("asks", "bound"):
            with pytest.raises(JobFailed, match="DFM_SECRET_NOBODY_HAS_IT is not set") as caught:
                await first_value(session, pipeline_of(fed.operations[operation]))
            (error,) = caught.value.errors
            assert isinstance(error, OperationFailed)
            texts.append(error.remote_traceback)
    assert ["in asks" in text for text in texts] == [True, False]
    assert "File " not in texts[1]


async def test_a_vault_that_cannot_be_pickled_is_reported_when_the_session_opens(secret: str) -> None:
    class Stuck:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def secret_for_key(self, key: str) -> str:
            return secret

    with pytest.raises(SecretError, match=r"Stuck cannot be sent to a worker process \(TypeError\)"):
        async with Session(told(Stuck()), target="local"):
            pass


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_session_that_waits_for_a_vault_ends_at_once(target: TargetName, how: str) -> None:
    begun, may_be = StuckVault.begun, StuckVault.may_be
    begun.clear()
    may_be.clear()
    fed = told(VaultConfig(path=f"{HERE}.StuckVault"))
    session = Session(fed, target=target, homesite="lab")
    connecting = asyncio.create_task(session.connect())
    try:
        await asyncio.to_thread(begun.wait)
        if how == "cancelled":
            connecting.cancel()
        else:
            await asyncio.wait_for(asyncio.gather(session.close(), session.close()), PROMPT)
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else SessionClosed):
            await asyncio.wait_for(connecting, PROMPT)
    finally:
        may_be.set()


async def test_a_job_that_waits_for_a_vault_is_cancelled_at_once() -> None:
    asked, answer = threading.Event(), threading.Event()

    class Slow:
        def secret_for_key(self, key: str) -> str:
            asked.set()
            answer.wait()
            return "much too late"

    fed = told(Slow())
    async with Session(fed, target="inline") as session:
        job = await session.execute(telling(fed), {"how": ""})
        await asyncio.to_thread(asked.wait)
        await asyncio.wait_for(job.cancel(), PROMPT)
        with pytest.raises(JobAborted):
            await job
        answer.set()


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602])
def test_a_file_that_everybody_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "vault.json"
    path.write_text('{"api_key": "open"}')
    path.chmod(mode)
    with pytest.raises(SecretError, match="chmod o-rwx"):
        FileVault(path)
    path.chmod(0o600)
    vault = FileVault(path)
    assert vault.secret_for_key("api_key") == "open"
    path.chmod(mode)
    with pytest.raises(SecretError, match="chmod o-rwx"):
        vault.secret_for_key("api_key")


@pytest.mark.parametrize("text", ["[1, 2", '["a"]', '{"a": "unfinished', "\udcff"])
def test_a_file_that_is_no_mapping_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "vault.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(SecretError) as caught:
        FileVault(path)
    assert "unfinished" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", ["../secret", "", ".", "..", "a/b", "a\0b"])
def test_a_key_does_not_lead_out_of_the_directory(tmp_path: Path, key: str) -> None:
    (tmp_path / "secret").write_text("outside")
    inside = tmp_path / "vault"
    inside.mkdir(mode=0o700)
    with pytest.raises(SecretError):
        FileVault(inside).secret_for_key(key)


# nowhere else


def looks(secret: str) -> list[str]:
    return [secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], secret.split('"')[0], secret.rpartition("&")[2]]


def assert_absent(secret: str, *texts: str) -> None:
    for text in texts:
        for look in looks(secret):
            assert look not in text


def _texts_of(error: BaseException | None) -> Iterator[str]:
    """Everything that can be read off an exception."""
    if error is None:
        return
    yield from (str(error), repr(error), "".join(traceback.format_exception(error)), repr(vars(error)))
    for inner in (*getattr(error, "errors", ()), error.__cause__):
        yield from _texts_of(inner)


def _files(folder: Path) -> list[str]:
    return [file.read_bytes().decode("utf-8", "replace") for file in folder.iterdir()]


def _overheard(receive: Any, seen: list[str]) -> Any:
    def overhear(self: Any, message: Any) -> None:
        seen.append(repr(message))
        receive(self, message)

    return overhear


WAYS = ["log", "print", "span", "raise", "trace", "url"]


async def test_a_secret_is_in_no_text_that_leaves_the_site(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, secret: str
) -> None:
    monkeypatch.setenv("DFM_SECRET_API_KEY", secret)
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    for kind in (SiteRuntime, Engine):  # what the processes tell each other, as far as it comes here
        monkeypatch.setattr(kind, "receive", _overheard(kind.receive, seen))
    fed = told(None)
    lab = fed.sites["lab"]

    @lab.operation
    async def speak() -> int:
        context = current_context()
        key = await context.secret("api_key")
        context.progress(1, note=f"with {key}")
        context.metrics({"used": key, f"of {key}": 1})
        with context.span("speaking", key=key):
            pass
        return 1

    speaking = pipeline_of(speak, name="speaking")
    pipeline, store = telling(fed), tmp_path / "jobs.db"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    told_of: list[str] = []
    try:
        async with connect(fed, trace=tmp_path / "spans", store=f"sqlite:///{store}") as session:
            plan = await session.prepare(pipeline)
            jobs = [await session.execute(pipeline, {"how": how}, watch=True) for how in WAYS]
            jobs.append(await session.execute(speaking, watch=True))
            for job in jobs:
                try:
                    await job
                except JobFailed as error:
                    told_of.extend(_texts_of(error))
                told_of.extend([repr(event) async for event in job.events()])
                told_of.append(repr(job))
            told_of.extend([repr(session), plan.to_json().decode(), str(plan.explain()), repr(plan)])
    finally:
        logging.getLogger().removeHandler(handler)
    told_of.extend([repr(fed), repr(lab), repr(lab.config("home")), repr(lab.adapters), repr(pipeline), str(pipeline)])
    written = _files(tmp_path)
    logs = [record.getMessage() for record in caplog.records] + [str(record.exc_text) for record in caplog.records]
    assert_absent(secret, *told_of, *written, *logs, *seen, caplog.text, stream.getvalue())
    # They were told all the same, without it.
    assert sum("the key is ***" in text for text in logs) == 1
    assert sum("once more: {'key': '***'}" in text for text in logs) == 1
    assert any("refused: '***'" in text for text in told_of)
    assert any("with ***" in text for text in told_of)
    assert any("refused: '***'" in text for text in written)
    assert any('"again":"***"' in text.replace(" ", "") for text in written)


async def test_a_secret_is_in_no_answer_of_a_web_service(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("DFM_SECRET_API_KEY", secret)
    fed = told(None)
    service = Service(
        session=Session(fed, target="inline"), pipelines={"telling": telling(fed)}, authorizer=AllowAnyone()
    )
    transport = httpx2.ASGITransport(service.app)
    async with service.lifespan(), httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        made = await client.post("/pipelines/telling/jobs", json={"params": {"how": "raise"}})
        job = f"/jobs/{made.json()['job_id']}"
        answers = [(await client.get(path)).text for path in (f"{job}/stream", job, f"{job}/events", f"{job}/graph")]
    assert_absent(secret, made.text, *answers)
    assert "refused: '***'" in answers[0]


async def test_output_of_a_worker_is_logged_without_the_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = "\n".join(["-----BEGIN KEY-----", *(secrets.token_hex(16) for _ in range(3)), "-----END KEY-----"])
    monkeypatch.setenv("DFM_SECRET_API_KEY", key)
    caplog.set_level(logging.INFO)
    fed = told(None)
    async with Session(fed, target="local") as session:
        assert await length(session, fed, "print") == len(key)
    printed = [record.getMessage() for record in caplog.records if getattr(record, "origin", "") == "stdout"]
    assert printed[0] == "printed ***"
    assert set(printed[1:]) == {"***"}


@dataclass
class _Open:
    """A vault that shows what it keeps."""

    secret: str

    def secret_for_key(self, key: str) -> str:
        return self.secret


def test_no_repr_shows_what_a_vault_or_a_cache_is_configured_with(secret: str) -> None:
    config = VaultConfig(path="file", args={"path": secret, "token": secret})
    assert repr(config) == "VaultConfig(path='file', args=<path, token>)"
    fed = told(_Open(secret))
    assert_absent(secret, repr(fed), repr(fed.sites["lab"]), repr(fed.sites["lab"].config("home")))
    fed = told(config)
    assert_absent(secret, repr(fed), repr(fed.sites["lab"]), repr(fed.sites["lab"].config("home")))
    assert "SECRET" not in repr(EnvironmentVault("MY_SECRET_"))
