"""``dfm-async flare deploy``: files for containers and Kubernetes."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Literal

import typer

from dfm_async.cli.exits import BadInput
from dfm_async.deploy.containers import compose_files, image_files
from dfm_async.deploy.federation_kits import kits_in
from dfm_async.deploy.kubernetes import kubernetes_files
from dfm_async.errors import DeploymentError

__all__ = ["write_files"]


def write_files(
    kits: Path,
    out: Path,
    *,
    image: str,
    kind: Literal["compose", "kubernetes"],
    packages: tuple[str, ...],
    namespace: str,
    as_json: bool,
) -> None:
    """Writes the files, and tells what to do with them.

    Raises:
        BadInput: there are no kits, or containers cannot run them.
    """
    where, target = Path(os.path.abspath(kits)), Path(os.path.abspath(out))
    try:
        found = kits_in(where)
        name = _federation(found[0].start_file())
        files = image_files(packages)
        if kind == "compose":
            files |= compose_files(name, found, image, target)
        else:
            files |= {
                f"kubernetes/{path}": text for path, text in kubernetes_files(name, found, image, namespace).items()
            }
    except DeploymentError as error:
        raise BadInput(str(error)) from error
    for path, text in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text)
    if as_json:
        for path in files:
            typer.echo(json.dumps({"file": str(out / path)}))
        return
    typer.echo(f"written to {out}: {', '.join(files)}")
    for line in _next(out, image, kind, os.path.relpath(found[0].folder.parent)):
        typer.echo(f"next: {line}")


def _federation(start_file: dict[str, object]) -> str:
    servers = start_file.get("servers")
    return str(servers[0]["name"]) if isinstance(servers, list) and servers else "federation"


def _next(out: Path, image: str, kind: str, kits: str) -> list[str]:
    if kind == "compose":
        return [f"DFM_UID=$(id -u) DFM_GID=$(id -g) docker compose --project-directory {out} up --build --detach"]
    return [
        f"docker build --tag {image} {out}",
        f"sh {out}/kubernetes/secrets.sh {shlex.quote(kits)}",
        f"kubectl apply --filename {out}/kubernetes",
    ]
