"""Startup kits of a whole federation."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from dfm_async import Federation
from dfm_async.deploy import certificates
from dfm_async.deploy.certificates import forget_ending
from dfm_async.deploy.federation_kits import kits_in
from dfm_async.deploy.kit import Kit
from dfm_async.errors import DeploymentError, FederationError
from dfm_async.flare import User
from tests.deploy.rig import ANN, HOST, Made, provisioned_in


def test_every_participant_gets_a_kit_with_settings_and_private_keys(made: Made) -> None:
    found = {entry.kit.name: entry for entry in made.provisioned.kits}
    assert {name: (entry.kind, entry.certificate.org) for name, entry in found.items()} == {
        HOST: ("server", "dfm"),
        "home": ("client", "dfm"),
        "archive": ("client", "dfm"),
        "lab": ("client", "Uni"),
        "desk": ("client", "dfm"),
        ANN: ("user", "dfm"),
    }
    assert found[ANN].certificate.role == "lead"
    settings = yaml.safe_load((made.kits / "lab" / "local" / "dfm_async.yaml").read_text())
    assert settings == {"site": "lab", "federation": "federation/federation.dfm.yaml"}
    assert yaml.safe_load((made.kits / "desk" / "local" / "dfm_async.yaml").read_text())["allow_code"] is True
    assert Kit(made.kits / "lab").policy()["permissions"]["lead"]["byoc"] == "none"
    assert Kit(made.kits / "desk").policy()["permissions"]["lead"]["byoc"] == "any"
    assert Kit(made.kits / HOST).policy()["permissions"]["lead"]["app_command"] == "n:submitter"
    private = [made.folder / "weather" / "state" / "cert.json", *made.kits.glob("*/startup/*.key")]
    assert len(private) == 7
    assert {path.stat().st_mode & 0o077 for path in private} == {0}
    assert "*" in (made.folder / ".gitignore").read_text().splitlines()


async def test_provisioning_again_keeps_certificates_and_adds_sites(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made.folder, folder)
    file = tmp_path / "federation.dfm.yaml"
    file.write_text((made.example / "weather" / "federation.dfm.yaml").read_text() + "  attic: {}\n")
    again = await provisioned_in(folder, Federation.from_yaml(file), users=[User("bob@example.org")])
    assert {entry.kit.name for entry in again.kits if entry.new} == {"attic", "bob@example.org"}
    assert again.left == (ANN,)
    for name in (HOST, "lab"):
        for part in (Kit(made.kits / name).certificate_file.name, "rootCA.pem"):
            before, now = (where / name / "startup" / part for where in (made.kits, again.folder))
            assert now.read_bytes() == before.read_bytes()
    assert {kit.folder.parent for kit in kits_in(folder)} == {again.folder}, "the newest ones count"
    assert kits_in(folder)[0].name == HOST


def test_expiring_certificates_are_renewed_by_the_same_authority(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "cert.json"
    shutil.copy(made.folder / "weather" / "state" / "cert.json", state)
    before = json.loads(state.read_text())
    forget_ending(state)
    assert json.loads(state.read_text()) == before
    monkeypatch.setattr(certificates, "ENDS_SOON", timedelta(days=400))
    forget_ending(state)
    assert json.loads(state.read_text()) == {name: before[name] for name in ("root_cert", "root_pri_key")}
    assert state.stat().st_mode & 0o077 == 0
    forget_ending(tmp_path / "nothing.json")


async def test_all_problems_are_reported_together(made: Made) -> None:
    users = [User("ann"), User(ANN, "member")]
    with pytest.raises(DeploymentError) as raised:
        await provisioned_in(
            made.folder, made.federation, users=users, orgs={"lab": "Other", "moon": "Uni"}, allow_code=["mars"], port=0
        )
    reported = "\n".join(raised.value.problems)
    for part in ("'ann' must be", "'moon': there is no such", "port 0", "'lab' is of organisation 'Uni', not 'Other'"):
        assert part in reported
    assert "'ann@example.org' is 'lead', not 'member'" in reported
    assert "mars: there is no such site" in reported
    assert len(raised.value.problems) == 6


async def test_federation_without_files_needs_sites_that_allow_code(tmp_path: Path) -> None:
    federation = Federation("weather")
    lab = federation.site("lab")

    @lab.operation
    async def answer() -> int:
        return 42

    with pytest.raises(FederationError, match="is not a class"):
        await provisioned_in(tmp_path, federation, orgs={}, allow_code=["lab"])
    assert not list(tmp_path.iterdir())


def test_a_folder_without_kits_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DeploymentError, match="has no startup kit"):
            kits_in(folder)
