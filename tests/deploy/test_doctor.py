"""``dfm-async flare doctor``: what it finds out about a startup kit."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import cloudpickle
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dfm_async import Federation
from dfm_async.deploy import doctor
from dfm_async.deploy.certificates import Certificate
from dfm_async.deploy.doctor import diagnose
from dfm_async.deploy.federation_file import FederationFile
from dfm_async.deploy.kit import Kit
from dfm_async.errors import DeploymentError
from dfm_async.model.findings import Finding
from dfm_async.targets.flare.site_code import load_installed, read_settings
from tests.deploy.rig import ANN, Made

Copied = Callable[[str], Path]


async def found(folder: Path, *, offline: bool = True) -> dict[str, Finding]:
    return {finding.name: finding async for finding in diagnose(Kit(folder), offline=offline)}


def states(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.state for name, finding in findings.items() if finding.state != "ok"}


def change(path: Path, **changes: object) -> None:
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**data, **changes}))


async def test_provisioned_kit_has_no_problems(
    kit: Copied, made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(made.example))
    monkeypatch.setenv("HOME", str(tmp_path))
    lab = await found(kit("lab"))
    assert states(lab) == {}
    assert lab["federation"].detail == "'weather' has site 'lab', which offers 1 operation"
    assert lab["code"].detail == "none may come"
    server = await found(kit("server"))
    assert {"commands", "job store"} < server.keys()
    assert states(server).keys() <= {"job store"}, "temporary folders of tests are no place for it"
    assert states(await found(kit(ANN))) == {}


async def test_missing_parts_of_a_site_are_reported_with_advice(kit: Copied) -> None:
    desk = kit("desk")
    change(desk / "local" / "dfm_async.yaml", authorizer={"path": "nowhere.Policy"}, audit="startup")
    resources = json.loads((desk / "local" / "resources.json").read_text())
    resources["class_allow_list"].remove("dfm_async.targets.flare.components.SiteExecutor")
    (desk / "local" / "resources.json").write_text(json.dumps(resources))
    (desk / "local" / "authorization.json").write_text(json.dumps({"permissions": {"lead": {"byoc": "none"}}}))
    (desk / "startup" / "client.key").chmod(0o644)
    findings = await found(desk)
    assert states(findings) == {
        "private key": "warn",
        "components": "bad",
        "code": "warn",
        "audit log": "bad",
        "adapters": "bad",
        "authorizer": "bad",
    }
    assert "there is no module 'weather'" in findings["adapters"].detail
    assert findings["private key"].advice == f"chmod 600 {desk / 'startup' / 'client.key'}"
    assert "class_allow_list" in findings["components"].advice
    assert "there is no module 'nowhere'" in findings["authorizer"].detail
    assert all(findings[name].advice for name in states(findings))


async def test_unreadable_or_foreign_settings_are_reported(kit: Copied) -> None:
    lab = kit("lab")
    settings = lab / "local" / "dfm_async.yaml"
    change(settings, site="attic", federation="federation/nothing.yaml")
    findings = await found(lab)
    assert all(name in findings["settings"].detail for name in ("'attic'", "'lab'"))
    assert findings["federation"].state == "bad"
    change(settings, allow_cod=True)
    findings = await found(lab)
    assert "allow_cod" in findings["settings"].detail
    assert "adapters" not in findings
    settings.unlink()
    assert states(await found(lab)) == {"settings": "bad"}


async def test_server_without_app_commands_is_reported(kit: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    server = kit("server")
    policy = Kit(server).policy()
    del policy["permissions"]["lead"]["app_command"]
    (server / "local" / "authorization.json").write_text(json.dumps(policy))
    findings = await found(server)
    assert states(findings) == {"commands": "bad", "job store": "bad"}
    assert '"app_command": "n:submitter"' in findings["commands"].advice
    assert "HOME is not set" in findings["job store"].detail


async def test_certificates_are_checked(kit: Copied, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    user = kit(ANN)
    monkeypatch.setattr(doctor, "ENDS_SOON", timedelta(days=400))
    assert states(await found(user)) == {"certificate": "warn"}
    monkeypatch.setattr(Certificate, "left", lambda _: timedelta(days=-1))
    findings = await found(user)
    assert states(findings) == {"certificate": "bad", "federation's": "bad"}
    assert "it has expired" in findings["certificate"].detail
    monkeypatch.undo()
    (user / "startup" / "client.key").write_bytes((made.kits / "lab" / "startup" / "client.key").read_bytes())
    (user / "startup" / "rootCA.pem").write_bytes((made.kits / "lab" / "startup" / "client.crt").read_bytes())
    assert states(await found(user)) == {"signature": "bad", "private key": "bad"}
    (user / "startup" / "client.crt").unlink()
    assert states(await found(user)) == {"files": "bad"}


async def test_folder_that_is_not_a_kit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="not a startup kit"):
        await found(tmp_path)


# the server, from here


@asynccontextmanager
async def listening(context: ssl.SSLContext | None) -> AsyncIterator[int]:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS\n")
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def context_of(kit: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Kit(kit).certificate_file, Kit(kit).key_file)
    context.load_verify_locations(kit / "startup" / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def connection(folder: Path, port: int, host: str = "localhost") -> dict[str, Finding]:
    path = folder / "startup" / "fed_client.json"
    data = json.loads(path.read_text())
    data["servers"][0]["service"]["target"] = f"{host}:{port}"
    path.write_text(json.dumps(data))
    (folder / "local" / "dfm_async.yaml").unlink(missing_ok=True)  # what it says is not the question here
    return await found(folder, offline=False)


async def test_server_must_have_a_certificate_of_the_federation(kit: Copied, made: Made) -> None:
    lab = kit("lab")
    async with listening(context_of(made.kits / "flare-server")) as port:
        answered = await connection(lab, port)
    assert answered["connection"].state == "ok"
    assert "a certificate of this federation" in answered["connection"].detail
    refused = await connection(lab, port)
    assert (refused["connection"].state, refused["connection"].detail) == (
        "bad",
        f"localhost port {port}: Connection refused",
    )
    async with listening(None) as port:
        plain = await connection(lab, port)
    assert "does not use TLS" in plain["connection"].detail
    nowhere = await connection(lab, port, "nowhere.invalid")
    assert nowhere["server"].state == "bad"
    assert "connection" not in nowhere


def stranger(folder: Path) -> ssl.SSLContext:
    """Somebody with a certificate of their own."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "flare-server")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "stranger.pem").write_bytes(
        pem + dated.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "stranger.pem")
    return context


async def test_server_of_another_authority_is_reported(kit: Copied, tmp_path: Path) -> None:
    async with listening(stranger(tmp_path)) as port:
        reported = await connection(kit("lab"), port)
    assert reported["connection"].state == "bad"
    assert "certificate of another authority" in reported["connection"].detail


@pytest.mark.parametrize("compat", [True, False])
async def test_adapters_for_dfm_can_be_installed_at_a_site(
    kit: Copied, compat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dfm_adapters.py").write_text(
        "from nv_dfm_core.exec import Site\n\n\n"
        "class Greet:\n    async def body(self) -> str:\n        return 'hello'\n"
    )
    file = tmp_path / "dfm.yaml"
    file.write_text(
        "dfm: 1.0.0\ninfo: {api-version: 1.0.0, code-package: dfm_lab}\n"
        "operations:\n  lab.Greet: {parameters: {}, returns: string}\n"
        "sites:\n  lab:\n    interface:\n"
        '      "#/operations/lab.Greet": {adapter: dfm_adapters.Greet, args: from-operation}\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lab = Kit(kit("lab"))
    shipped_file = FederationFile.of(Federation.from_yaml(file, compat=compat))
    lab.become_site("lab", shipped_file, homesite="home", allow_code=False)
    settings = read_settings(lab.local, "lab")
    assert settings.compat is compat
    findings = await found(lab.folder)
    assert (findings["adapters"].state == "ok") is compat
    assert compat or "'compat: true' in the settings of a site" in findings["adapters"].detail
    shipped = load_installed(settings, lab.local).shipped
    assert shipped is not None
    assert cloudpickle.loads(shipped)[0] is compat, "workers read it before they import anything"
