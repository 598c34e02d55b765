"""Files for containers: they fit their schemas, and no key gets into them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dfm_async.deploy.container_files import PLACE, compose_files, image_files, kubernetes_files, label
from dfm_async.deploy.federation_kits import kits_in
from dfm_async.errors import DeploymentError
from tests.deploy.rig import HOST, Made

PARTICIPANTS = {"server", "home", "archive", "lab", "desk"}


def compose(made: Made, out: Path) -> dict[str, Any]:
    text = compose_files("weather", kits_in(made.folder), "site:1", out)["compose.yaml"]
    out.mkdir(exist_ok=True)
    (out / "compose.yaml").write_text(text)
    return dict(yaml.safe_load(text))


def manifests(made: Made) -> dict[str, list[dict[str, Any]]]:
    files = kubernetes_files("weather", kits_in(made.folder), "site:1", "default")
    return {name: list(yaml.safe_load_all(text)) for name, text in files.items() if name.endswith(".yaml")}


def test_compose_file_fits_its_schema_and_mounts_existing_folders(made: Made, tmp_path: Path) -> None:
    data = compose(made, tmp_path / "deploy")
    checker = str(Path(sys.executable).parent / "check-jsonschema")
    checked = subprocess.run(
        [checker, "--builtin-schema", "vendor.compose-spec", str(tmp_path / "deploy" / "compose.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
    assert data["services"].keys() == PARTICIPANTS, "users run nothing"
    for service in data["services"].values():
        for volume in service["volumes"]:
            assert (tmp_path / "deploy" / volume["source"]).resolve().is_dir()
        assert [volume.get("read_only", False) for volume in service["volumes"]] == [False, True, True]
        assert service["read_only"] is True
        assert service["healthcheck"]["test"][-1] == PLACE
    assert data["services"]["server"]["networks"]["federation"]["aliases"] == [HOST]
    assert data["services"]["lab"]["depends_on"] == {"server": {"condition": "service_healthy"}}


def test_manifests_fit_the_schemas_of_kubernetes(made: Made) -> None:
    found = manifests(made)
    assert found.keys() == {f"weather-{name}.yaml" for name in PARTICIPANTS}
    for documents in found.values():
        for document in documents:
            kubernetes_validate.validate(document, "1.33", strict=True)
    kinds = {name: [document["kind"] for document in documents] for name, documents in found.items()}
    assert kinds["weather-server.yaml"] == ["ConfigMap", "StatefulSet", "Service"]
    assert kinds["weather-lab.yaml"] == ["ConfigMap", "StatefulSet"]
    service = found["weather-server.yaml"][2]
    assert service["metadata"]["name"] == HOST, "the name that stands in all kits"


def test_pod_mounts_every_file_of_its_kit(made: Made) -> None:
    local, workload = manifests(made)["weather-lab.yaml"]
    volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
    placed = {item["path"]: local["data"][item["key"]] for item in volumes["local"]["configMap"]["items"]}
    folder = made.kits / "lab" / "local"
    for name in ("dfm_async.yaml", "resources.json", "authorization.json", "federation/federation.dfm.yaml"):
        assert placed[name] == (folder / name).read_text()
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"workspace": PLACE, "startup": f"{PLACE}/startup", "local": f"{PLACE}/local", "tmp": "/tmp"}
    assert "livenessProbe" not in container, "a client waits for its server, and is not restarted for that"


def test_no_key_is_in_any_file(made: Made, tmp_path: Path) -> None:
    kits = kits_in(made.folder)
    files = {**image_files([]), **compose_files("weather", kits, "site:1", tmp_path)}
    files |= kubernetes_files("weather", kits, "site:1", "default")
    secret = [line for path in made.kits.glob("*/startup/*") if path.suffix in (".key", ".crt", ".pem")
              for line in path.read_text().splitlines() if not line.startswith("-----")]  # fmt: skip
    assert len(secret) > 100
    everything = "\n".join(files.values())
    assert not any(line in everything for line in secret)
    assert "BEGIN" not in everything
    assert files[".dockerignore"].splitlines()[1] == "*", "nothing but what is named goes to the builder"
    copied = re.findall(r"^COPY (\S+)", files["Dockerfile"], re.MULTILINE)
    assert copied == ["requirements.txt", "wheels/"]


def test_secrets_script_contains_the_files_that_pods_need(made: Made, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kubectl").write_text('#!/bin/sh\ncat > /dev/null < /dev/null\necho "$@" >> "$TOLD"\n')
    (tools / "kubectl").chmod(0o755)
    (tmp_path / "secrets.sh").write_text(kubernetes_files("weather", kits_in(made.folder), "site:1", "x")["secrets.sh"])
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "TOLD": str(tmp_path / "reported")}
    subprocess.run(["sh", str(tmp_path / "secrets.sh"), str(made.kits)], check=True, timeout=60, env=env)
    reported = [shlex.split(line) for line in (tmp_path / "reported").read_text().splitlines()]
    created = {words[3]: [word.partition("=")[2] for word in words if word.startswith("--from-file=")]
               for words in reported if words[0] == "create"}  # fmt: skip
    assert created.keys() == {f"weather-{name}-startup" for name in PARTICIPANTS}
    assert all(Path(path).is_file() for paths in created.values() for path in paths)
    names = {Path(path).name for path in created["weather-lab-startup"]}
    assert names == {"client.crt", "client.key", "fed_client.json", "rootCA.pem"}


def test_kits_with_a_local_server_name_are_refused(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    folder.mkdir()
    for part in ("startup", "local"):
        (folder / part).mkdir()
    text = (made.kits / "lab" / "startup" / "fed_client.json").read_text()
    (folder / "startup" / "fed_client.json").write_text(text.replace(f"{HOST}:", "localhost:"))
    with pytest.raises(DeploymentError, match="--server flare-server"):
        compose_files("weather", kits_in(tmp_path), "site:1", tmp_path)


@pytest.mark.parametrize(("name", "made_of_it"), [("Lab_2", "lab-2"), ("--", "site"), ("x" * 80, "x" * 50)])
def test_site_names_are_valid_in_kubernetes(name: str, made_of_it: str) -> None:
    assert label(name) == made_of_it
