"""The federation as its sites have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfm_async import Federation
from dfm_async.deploy.federation_kits import FederationFiles
from dfm_async.errors import FederationError

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


def test_referenced_files_are_installed_too(tmp_path: Path) -> None:
    write(tmp_path / "here", {"rivers/federation.dfm.yaml": ROOT, "shared/operations.yaml": OPERATIONS})
    federation = Federation.from_yaml(tmp_path / "here" / "rivers" / "federation.dfm.yaml")
    files = FederationFiles.of(federation)
    assert files.root == "rivers/federation.dfm.yaml"
    assert sorted(files.contents) == ["rivers/federation.dfm.yaml", "shared/operations.yaml"]
    files.write(tmp_path / "there")
    assert "gauges.Read" in Federation.from_yaml(tmp_path / "there" / files.root).operations


def test_a_file_that_only_this_machine_has_is_refused(tmp_path: Path) -> None:
    root = ROOT.replace("../shared/operations.yaml", str(tmp_path / "elsewhere" / "operations.yaml"))
    write(tmp_path, {"rivers/federation.dfm.yaml": root, "elsewhere/operations.yaml": OPERATIONS})
    federation = Federation.from_yaml(tmp_path / "rivers" / "federation.dfm.yaml")
    with pytest.raises(FederationError, match="a site will not find it"):
        FederationFiles.of(federation)


def test_a_federation_made_in_python_gets_a_file() -> None:
    federation = Federation("rivers", api_version="1.0.0")
    federation.site("lab")
    files = FederationFiles.of(federation)
    assert files.root == "federation.dfm.yaml"
    assert b"lab" in files.contents[files.root]


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
    files = FederationFiles.of(federation)
    found = {}
    for site in ("lab", "archive", "home"):
        alone = files.for_site(site)
        alone.write(tmp_path / site)
        assert list(alone.contents) == [alone.root]
        text = (tmp_path / site / alone.root).read_text()
        assert sorted({part for part in ("of-all", "of-lab", "of-archive") if part in text}) == [
            part for part in ("of-archive", "of-lab") if part == f"of-{site}"
        ]
        found[site] = Federation.from_yaml(tmp_path / site / alone.root)
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


def test_only_their_owner_reads_the_files_of_a_site(tmp_path: Path) -> None:
    write(tmp_path / "here", {"federation.dfm.yaml": SECRETIVE})
    files = FederationFiles.of(Federation.from_yaml(tmp_path / "here" / "federation.dfm.yaml")).for_site("lab")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / files.root).write_text("old, and open to all")
    (tmp_path / "there" / files.root).chmod(0o644)
    files.write(tmp_path / "there")
    files.write(tmp_path / "fresh")
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o700
    for folder in ("there", "fresh"):
        assert (tmp_path / folder / files.root).stat().st_mode & 0o777 == 0o600
