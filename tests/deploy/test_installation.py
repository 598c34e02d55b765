"""The federation as its sites have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfm_async import Federation, FederationError
from dfm_async.deploy.installation import FederationFiles

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


def test_what_a_file_refers_to_is_installed_with_it(tmp_path: Path) -> None:
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
