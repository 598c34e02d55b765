"""``dfm-async flare provision``: startup kits of a federation, and who gets which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.text import Text
from rich.tree import Tree

from dfm_async.cli.exits import BadInput, Exit
from dfm_async.cli.references import find_federation
from dfm_async.cli.streams import StandardOutput
from dfm_async.cli.terminal import terminal
from dfm_async.deploy.federation_kits import FederationKit, Provisioned, project_of, provision_federation
from dfm_async.deploy.project import User
from dfm_async.errors import DeploymentError, FederationError

__all__ = ["Wanted", "provision_kits"]

_SUBMIT: Final = ("lead", "project_admin")
"""The roles that run pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asks for, as it was written."""

    federation: str
    out: Path | None
    server: str
    port: int
    admin_port: int
    users: tuple[str, ...]
    homesite: str
    org: str
    orgs: tuple[str, ...]
    scheme: str
    allow_code: tuple[str, ...]
    compat: bool


async def provision_kits(wanted: Wanted, *, as_json: bool) -> int:
    """Makes the kits, and tells who gets which. Gives the exit code.

    Raises:
        BadInput: something that was given is wrong; tells all of it.
    """
    federation, _ = find_federation(wanted.federation, compat=wanted.compat)
    project = project_of(
        federation,
        server=wanted.server,
        users=[_user(text) for text in wanted.users],
        homesite=wanted.homesite,
        port=wanted.port,
        admin_port=wanted.admin_port,
        org=wanted.org,
        orgs=dict(_pairs(wanted.orgs)),
        scheme=wanted.scheme,
    )
    folder = Path.cwd() / (project.name if wanted.out is None else wanted.out)
    try:
        made = await provision_federation(
            federation, project, folder, homesite=wanted.homesite, allow_code=wanted.allow_code
        )
    except DeploymentError as error:
        raise BadInput(str(error)) from error
    except FederationError as error:
        if federation.files:
            raise
        raise BadInput(f"{error}\nIf all sites trust your users: --allow-code '*', and nothing is installed") from error
    if as_json:
        output = StandardOutput()
        for kit in made.kits:
            await output.line(msgspec.json.encode(_line(kit)).decode())
    else:
        terminal().print(_tree(made))
    return Exit.SUCCESS


def _user(text: str) -> User:
    name, separator, role = text.rpartition("=")
    return User(name, role) if separator else User(text)


def _pairs(texts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, separator, org = text.rpartition("=")
        if not separator or not name or not org:
            raise BadInput(f"--org-of {text}: write NAME=ORG, such as lab=University")
        yield name, org


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
        tree.add(Text(f"no longer part of it, though their certificates stay valid: {', '.join(made.left)}", "yellow"))
    tree.add(Text("send each kit to its participant only, on a safe way: it has a private key", "bold"))
    tree.add(Text(f"keep {made.project_file.parent} to yourself: it has the key that signs for all of them", "bold"))
    return tree


def _add(branch: Tree, found: FederationKit, made: Provisioned) -> None:
    certificate = found.certificate
    name = found.kit.name
    words = [certificate.org, *([certificate.role] if found.kind == "user" else [])]
    told = Text.assemble((name, "bold"), f"  {', '.join(words)}; valid until {certificate.ends:%Y-%m-%d}")
    if not found.new:
        told.append("; as before", "dim")
    node = branch.add(told)
    if found.kind == "user":
        node.add(Text(f"$ dfm-async flare doctor {name}"))
        if certificate.role in _SUBMIT:
            node.add(Text(f"$ dfm-async run FEDERATION PIPELINE --flare {name}"))
        return
    node.add(Text(f"$ dfm-async flare doctor {name}"))
    node.add(Text(f"$ dfm-async flare start {name}"))
    if found.kind == "server":
        project = made.project
        node.add(Text(f"takes connections at {project.server}, ports {project.port} and {project.admin_port}"))
