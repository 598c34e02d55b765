"""``dfm-async flare provision`` and ``deploy``: startup kits, and files for containers that run them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import typer
from rich.text import Text
from rich.tree import Tree

from dfm_async.cli.command_runner import BadInput, Exit
from dfm_async.cli.terminal import StandardOutput, terminal
from dfm_async.deploy.container_files import compose_files, image_files, kubernetes_files
from dfm_async.deploy.federation_kits import FederationKit, Provisioned, kits_in, provision_federation
from dfm_async.deploy.project import Project, User
from dfm_async.errors import DeploymentError, FederationError
from dfm_async.federation.federation import Federation

_SUBMIT: Final = ("lead", "project_admin")
"""The roles that may run pipelines."""


async def provision_kits(
    federation: Federation,
    project: Project,
    out: Path | None,
    *,
    homesite: str,
    allow_code: Sequence[str],
    as_json: bool,
) -> int:
    """Make the kits of a federation, and show who gets which. Return the exit code."""
    folder = Path.cwd() / (out or project.name)
    try:
        made = await provision_federation(federation, project, folder, homesite=homesite, allow_code=allow_code)
    except DeploymentError as error:
        raise BadInput(str(error)) from error
    except FederationError as error:
        if federation.files:
            raise
        raise BadInput(
            f"{error}\nIf all sites trust your users, --allow-code '*' lets them send code instead"
        ) from error
    if as_json:
        output = StandardOutput()
        for kit in made.kits:
            await output.line(msgspec.json.encode(_line(kit)).decode())
    else:
        terminal().print(_tree(made))
    return Exit.SUCCESS


def parse_user(text: str) -> User:
    """Return the user that ``EMAIL`` or ``EMAIL=ROLE`` describes."""
    name, separator, role = text.rpartition("=")
    return User(name, role) if separator else User(text)


def parse_organisations(texts: Iterable[str]) -> dict[str, str]:
    """Return the organisations of participants, each written as ``NAME=ORG``."""
    found = {}
    for text in texts:
        name, separator, org = text.rpartition("=")
        if not separator or not name or not org:
            raise BadInput(f"--org-of {text}: write NAME=ORG, such as lab=University")
        found[name] = org
    return found


def _line(found: FederationKit) -> dict[str, Any]:
    certificate = found.certificate
    return {
        "participant": found.kit.name,
        "kind": found.kind,
        "site": found.site,
        "org": certificate.org,
        "role": certificate.role,
        "kit": str(found.kit.folder),
        "new": found.new,
        "valid_until": certificate.ends.isoformat(),
    }


def _tree(made: Provisioned) -> Tree:
    tree = Tree(Text.assemble((made.project.name, "bold"), f"  {made.folder}"))
    titles = {"server": "the server", "client": "sites", "user": "users"}
    for kind, title in titles.items():
        branch = tree.add(Text(title))
        for found in made.kits:
            if found.kind == kind:
                _add(branch, found, made)
    if made.left:
        tree.add(Text(f"removed, but their certificates stay valid: {', '.join(made.left)}", "yellow"))
    tree.add(Text("send each kit only to its participant, over a secure channel: it contains a private key", "bold"))
    tree.add(Text(f"keep {made.project_file.parent} secret: it contains the key that signs all certificates", "bold"))
    return tree


def _add(branch: Tree, found: FederationKit, made: Provisioned) -> None:
    certificate = found.certificate
    name = found.kit.name
    words = [certificate.org, *([certificate.role] if found.kind == "user" else [])]
    line = Text.assemble((name, "bold"), f"  {', '.join(words)}; valid until {certificate.ends:%Y-%m-%d}")
    if not found.new:
        line.append("; unchanged", "dim")
    node = branch.add(line)
    if found.kind == "user":
        node.add(Text(f"$ dfm-async flare doctor {name}"))
        if certificate.role in _SUBMIT:
            node.add(Text(f"$ dfm-async run FEDERATION PIPELINE --flare {name}"))
        return
    node.add(Text(f"$ dfm-async flare doctor {name}"))
    node.add(Text(f"$ dfm-async flare start {name}"))
    if found.kind == "server":
        project = made.project
        node.add(Text(f"accepts connections at {project.server}, ports {project.port} and {project.admin_port}"))


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
    """Write the files for containers, and show what to do with them."""
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
