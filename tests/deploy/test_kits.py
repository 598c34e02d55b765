"""Startup kits, as FLARE makes them and we complete them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from dfm_async import Federation
from dfm_async.deploy.federation_file import FederationFile
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.project import provision
from dfm_async.flare import Project, User
from dfm_async.model.flare import SETTINGS_FILE


async def test_only_their_owner_reads_kits_and_their_keys(tmp_path: Path) -> None:
    project = Project(
        name="rivers", sites=("home", "lab"), users=(User("ann@example.org"),), server="localhost", scheme="tcp"
    )
    (tmp_path / "rivers" / "state").mkdir(parents=True)
    (tmp_path / "rivers" / "state" / "old.key").write_text("of an earlier time")
    (tmp_path / "rivers" / "state" / "old.key").chmod(0o644)
    kits = await provision(project, tmp_path)
    made = list((tmp_path / "rivers").rglob("*"))
    assert any(path.suffix == ".key" for path in made)
    assert [path for path in (tmp_path / "rivers", *made) if path.stat().st_mode & 0o077] == []

    federation = Federation("rivers", api_version="1.0.0")
    federation.site("lab")
    kit = Kit(kits / "lab")
    kit.become_site("lab", FederationFile.of(federation), homesite="home", allow_code=False)
    federation_file = kit.local / "federation" / "federation.dfm.yaml"
    written = [kit.local / SETTINGS_FILE, kit.local / "resources.json", federation_file, federation_file.parent]
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def test_jobs_build_two_components_of_ours_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    authorizer = importlib.import_module("nvflare.app_common.widgets.component_path_authorizer").ComponentPathAuthorizer
    local = tmp_path / "lab" / "local"
    local.mkdir(parents=True)
    (local / "resources.json.default").write_text(json.dumps({"class_allow_list": ["nvflare.app_common."]}))
    (local / "authorization.json.default").write_text(json.dumps({"permissions": {}}))
    kit = Kit(tmp_path / "lab")
    for _ in range(2):
        kit.become_site("lab", None, homesite="home", allow_code=False)
    allowed = kit.resources()["class_allow_list"]
    ours = "dfm_async.targets.flare."
    assert allowed == ["nvflare.app_common.", f"{ours}components.HubController", f"{ours}components.SiteExecutor"]
    refused = ("installed.load_authorizer", "components.Hub", "components.SiteExecutorX", "slots.Slots", "components")
    for name in refused:
        assert not any(authorizer._path_matches_prefix(ours + name, prefix) for prefix in allowed)
