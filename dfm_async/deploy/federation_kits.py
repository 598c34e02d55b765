"""The startup kits of a whole federation: who gets which, with our settings in each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from dfm_async.deploy.certificates import Certificate, handed_out
from dfm_async.deploy.installation import FederationFiles
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.project import SERVER_SITE, Project, User, project_name
from dfm_async.deploy.provisioning import PROJECT_FILE, newest_kits, provision, require_nvflare, state_file
from dfm_async.errors import DeploymentError, FederationError
from dfm_async.federation.federation import Federation

__all__ = ["EVERYWHERE", "FederationKit", "Provisioned", "kits_in", "project_of", "provision_federation"]

EVERYWHERE: Final = "*"
"""All sites, where some are named."""


@dataclass(frozen=True, slots=True)
class FederationKit:
    """The startup kit of one participant.

    Attributes:
        kit: the kit itself.
        kind: what it is for.
        site: which site of the federation it is; empty for a user.
        certificate: who it says it is.
        new: whether nobody has this certificate yet.
    """

    kit: Kit
    kind: Literal["server", "client", "user"]
    site: str
    certificate: Certificate
    new: bool


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What provisioning has made.

    Attributes:
        project: who takes part.
        project_file: the file that FLARE provisioned from.
        folder: the folder of the kits.
        kits: one per participant: the server, the sites, the users.
        left: participants of earlier times that are not part of it any more; their certificates are still valid.
    """

    project: Project
    project_file: Path
    folder: Path
    kits: tuple[FederationKit, ...]
    left: tuple[str, ...]


def project_of(
    federation: Federation,
    *,
    server: str,
    users: Iterable[User],
    homesite: str = "home",
    port: int = 8002,
    admin_port: int = 8003,
    org: str = "dfm",
    orgs: Mapping[str, str] | None = None,
    scheme: str = "grpc",
) -> Project:
    """Makes the project of a federation: a client for the homesite and for each site, except for ``server``."""
    sites = dict.fromkeys([homesite, *(site for site in federation.sites if site != SERVER_SITE)])
    return Project(
        name=project_name(federation.name),
        sites=tuple(sites),
        users=tuple(users),
        server=server,
        port=port,
        admin_port=admin_port,
        org=org,
        orgs=dict(orgs or {}),
        scheme=scheme,
    )


async def provision_federation(
    federation: Federation,
    project: Project,
    folder: Path,
    *,
    homesite: str = "home",
    allow_code: Iterable[str] = (),
) -> Provisioned:
    """Makes a startup kit for each participant, with the settings and the files of the federation in it.

    In a folder of earlier kits, participants keep their certificates, and new ones get kits of the same federation.

    Args:
        federation: the federation.
        project: who takes part.
        folder: where the project file and the kits go.
        homesite: the site of the applications.
        allow_code: the sites that users may bring code to; ``*`` means all.

    Raises:
        DeploymentError: lists everything that is wrong, or says why FLARE refuses the project.
        FederationError: the federation cannot be written to files, and not all sites allow code.
    """
    allowed = set(allow_code)
    every = {SERVER_SITE, *project.sites}
    trusting = every if EVERYWHERE in allowed else allowed
    require_nvflare(project.name)
    state = state_file(folder, project)
    earlier = handed_out(state)
    problems = [*project.problems(), *_changes(project, earlier)]
    problems += [f"--allow-code {name}: there is no such site" for name in sorted(trusting - every)]
    if problems:
        raise DeploymentError(project.name, problems)
    files = _files(federation, needed=trusting != every)
    made = await provision(project, folder)
    (folder / ".gitignore").write_text("# Private keys do not belong into a repository.\n*\n")
    with contextlib.suppress(OSError):  # written by FLARE as everybody's, in folders of earlier times
        state.chmod(0o600)
    for participant in (project.server, *project.sites):
        site = SERVER_SITE if participant == project.server else participant
        Kit(made / participant).become_site(site, files, homesite=homesite, allow_code=site in trusting)
    # FLARE wants an absolute path, and nobody knows yet where the kit will be.
    Kit(made / project.server).become_server(f"{{$HOME}}/dfm-async/{project.name}")
    for user in project.users:
        Kit(made / user.name).become_user(files, homesite=homesite)
    now = {project.server, *project.sites, *(user.name for user in project.users)}
    return Provisioned(
        project=project,
        project_file=folder / PROJECT_FILE,
        folder=made,
        kits=tuple(_made(project, made, earlier)),
        left=tuple(name for name, found in earlier.items() if name not in now and found.left().total_seconds() > 0),
    )


def _files(federation: Federation, *, needed: bool) -> FederationFiles | None:
    try:
        return FederationFiles.of(federation)
    except FederationError:
        if federation.files or needed:
            raise
        return None  # users bring its code everywhere


def _changes(project: Project, earlier: Mapping[str, Certificate]) -> Iterator[str]:
    """What cannot change: it stands in certificates that stay valid."""
    advice = "their certificate says so, and stays: give the same again, or choose another name or another --out"
    named = {project.server: SERVER_SITE, **{name: name for name in project.sites}}
    orgs = {name: project.org_of(key) for name, key in named.items()}
    orgs |= {user.name: project.org_of(user.name) for user in project.users}
    for name, org in orgs.items():
        found = earlier.get(name)
        if found is not None and found.org != org:
            yield f"{name!r} is of organisation {found.org!r}, not {org!r}: {advice}"
    for user in project.users:
        found = earlier.get(user.name)
        if found is not None and found.role != user.role:
            yield f"user {user.name!r} is {found.role!r}, not {user.role!r}: {advice}"


def _made(project: Project, made: Path, before: Mapping[str, Certificate]) -> Iterator[FederationKit]:
    def kit(name: str, kind: Literal["server", "client", "user"], site: str) -> FederationKit:
        found = Kit(made / name)
        certificate = found.certificate()
        return FederationKit(found, kind, site, certificate, before.get(name) != certificate)

    yield kit(project.server, "server", SERVER_SITE)
    for site in project.sites:
        yield kit(site, "client", site)
    for user in project.users:
        yield kit(user.name, "user", "")


def kits_in(folder: Path) -> list[Kit]:
    """The kits in a folder, the server's first; the newest ones, if it is the folder of a provisioned federation.

    Raises:
        DeploymentError: there are none.
    """
    where = folder
    if (folder / PROJECT_FILE).is_file():
        name = yaml.safe_load((folder / PROJECT_FILE).read_text()).get("name", "")
        where = newest_kits(folder / str(name)) or folder
    found = [Kit(path) for path in sorted(where.iterdir()) if (path / "startup").is_dir()] if where.is_dir() else []
    if not found:
        raise DeploymentError(str(folder), ["it has no startup kit: name a folder that 'provision' has written"])
    return sorted(found, key=lambda kit: (("server", "client", "user").index(kit.kind), kit.name))
