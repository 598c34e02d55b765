"""The federation as its sites have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfm_async import Federation
from dfm_async.deploy.federation_file import FederationFile

ROOT = """
dfm: 1.0.0
info: {api-version: 1.0.0, code-package: rivers}
operations: {$ref: ["../shared/operations.yaml#/operations"]}
sites: {lab: {}}
"""
OPERATIONS = """
operations:
  gauges.Read: {parameters: {river: {type: string}}, returns: float}
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def sites_of(file: FederationFile, folder: Path) -> dict[str, Federation]:
    """Read the file of each site where nothing else is."""
    found = {}
    for site in (*file.federation.sites, "home"):
        (folder / site).mkdir()
        path = folder / site / "federation.dfm.yaml"
        path.write_text(file.for_site(site))
        found[site] = Federation.from_yaml(path)
    return found


def test_site_gets_one_file_with_all_that_is_referred_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "here", {"rivers/federation.dfm.yaml": ROOT, "shared/operations.yaml": OPERATIONS})
    elsewhere = ROOT.replace("../shared/operations.yaml", str(tmp_path / "here" / "shared" / "operations.yaml"))
    write(tmp_path / "absolute", {"federation.dfm.yaml": elsewhere})
    write(tmp_path / "repository" / "rivers", {"federation.dfm.yaml": ROOT.replace("../shared", "shared")})
    monkeypatch.chdir(tmp_path / "here")
    for name in ("here/rivers", "absolute", "repository/rivers"):
        file = FederationFile.of(Federation.from_yaml(tmp_path / name / "federation.dfm.yaml"))
        for found in sites_of(file, tmp_path / name).values():
            assert list(found.operations) == ["gauges.Read"]
            assert len(found.files) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"], "only where it is read, not at sites"


def test_a_federation_made_in_python_gets_a_file() -> None:
    federation = Federation("rivers", api_version="1.0.0")
    federation.site("lab")
    assert "lab" in FederationFile.of(federation).for_site("home")


SECRETIVE = """
dfm: 1.0.0
info: {api-version: 1.0.0, code-package: rivers}
provision: {password: of-all}
operations:
  gauges.Read: {parameters: {river: {type: string}}, returns: float}
sites:
  lab:
    impl: {path: rivers.Lab, args: {token: of-lab-1}}
    secrets_vault: {path: file, args: {path: secrets/lab.json, key: of-lab-2}}
    cache_config: {protocol: s3, base_path: bucket/x, storage_options: {key: of-lab-3}}
    send_cost: {archive: {fixed_time: 1.5}}
    providers:
      sensors:
        impl: {path: rivers.Sensors, args: {token: of-lab-4}}
        interface:
          "#/operations/gauges.Read":
            adapter: rivers.Read
            args: {river: {from-param: river}, token: {const: of-lab-5}}
  archive:
    secrets_vault: {path: rivers.Vault, args: {key: of-archive}}
    interface:
      "#/operations/gauges.Read": {adapter: rivers.Read, in-process: true, args: from-operation}
"""


def test_site_gets_no_configuration_of_another_site(tmp_path: Path) -> None:
    write(tmp_path / "here", {"federation.dfm.yaml": SECRETIVE})
    federation = Federation.from_yaml(tmp_path / "here" / "federation.dfm.yaml")
    file = FederationFile.of(federation)
    found = sites_of(file, tmp_path)
    for site in ("lab", "archive", "home"):
        text = file.for_site(site)
        assert sorted({part for part in ("of-all", "of-lab", "of-archive") if part in text}) == [
            part for part in ("of-archive", "of-lab") if part == f"of-{site}"
        ]
        assert list(found[site].sites) == ["lab", "archive"]
        assert list(found[site].operations) == ["gauges.Read"]
    lab, before = found["lab"].sites["lab"], federation.sites["lab"]
    assert lab.adapters == before.adapters
    assert (lab.impl, lab.providers, lab.cache, lab.send_cost) == (
        before.impl,
        before.providers,
        before.cache,
        before.send_cost,
    )
    assert lab.vault.args == {"path": str(tmp_path / "lab" / "secrets" / "lab.json"), "key": "of-lab-2"}
    assert not found["lab"].sites["archive"].adapters
    assert next(iter(found["archive"].sites["archive"].adapters.values())).in_process
