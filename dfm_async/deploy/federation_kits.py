"""The startup kits of a whole federation, with our settings and the file of the federation in each."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from dfm_async.deploy.certificates import Certificate, handed_out
from dfm_async.deploy.federation_file import FederationFile, file_of
from dfm_async.deploy.kit import Kit
from dfm_async.deploy.project import (
    PROJECT_FILE,
    SERVER_SITE,
    Project,
    User,
    newest_kits,
    project_name,
    provision,
    require_nvflare,
    state_file,
)
from dfm_async.errors import DeploymentError
from dfm_async.federation.federation import Federation

_EVERYWHERE: Final = "*"
"""All sites, where some are named."""


@dataclass(frozen=True, slots=True)
class FederationKit:
    """The startup kit of one participant.

    Attributes:
        site: which site of the federation it is; empty for a user.
        new: whether the certificate is new.
    """

    kit: Kit
    kind: Literal["server", "client", "user"]
    site: str
    certificate: Certificate
    new: bool


@dataclass(frozen=True, slots=True)
class Provisioned:
    """The result of provisioning.

    Attributes:
        project_file: the file that FLARE provisioned from.
        folder: the folder of the kits.
        kits: one per participant: the server, the sites, the users.
        left: participants of earlier times that are not part of it any longer; their certificates are still valid.
    """

    project: Project
    project_file: Path
    folder: Path
    kits: tuple[FederationKit, ...]
    left: tuple[str, ...]


def project_of(
    federation: Federation | Iterable[str], *, server: str, users: Iterable[User], homesite: str = "home"
) -> Project:
    """Return the project of a federation, or of sites: a client for the homesite and each site except ``server``."""
    sites = federation.sites if isinstance(federation, Federation) else federation
    return Project(
        name=project_name(federation.name) if isinstance(federation, Federation) else "federation",
        sites=tuple(dict.fromkeys([homesite, *(site for site in sites if site != SERVER_SITE)])),
        users=tuple(users),
        server=server,
    )


async def provision_federation(
    federation: Federation,
    project: Project,
    folder: Path,
    *,
    homesite: str = "home",
    allow_code: Iterable[str] = (),
) -> Provisioned:
    """Make a startup kit for each participant, with the settings and the file of the federation in it.

    In a folder of earlier kits, participants keep their certificates, and new ones get kits of the same federation.

    Args:
        federation: the federation.
        project: the participants.
        folder: where the project file and the kits go.
        homesite: the site of the applications.
        allow_code: the sites that users may bring code to; ``*`` means all.

    Raises:
        DeploymentError: lists all problems, or the reason why FLARE refuses the project.
        FederationError: the federation cannot be written to a file, and not all sites allow code.
    """
    allowed = set(allow_code)
    every = {SERVER_SITE, *project.sites}
    trusting = every if _EVERYWHERE in allowed else allowed
    require_nvflare(project.name)
    state = state_file(folder, project)
    earlier = handed_out(state)
    problems = [*project.problems(), *_changes(project, earlier)]
    problems += [f"--allow-code {name}: there is no such site" for name in sorted(trusting - every)]
    if problems:
        raise DeploymentError(project.name, problems)
    file = file_of(federation, required=trusting != every)
    made = await provision(project, folder)
    (folder / ".gitignore").write_text("# Do not commit private keys.\n*\n")
    with contextlib.suppress(OSError):  # written by FLARE as everybody's, in folders of earlier times
        state.chmod(0o600)
    # FLARE needs an absolute path, and the location of the kit is not known yet.
    store = f"{{$HOME}}/dfm-async/{project.name}"
    complete_kits(project, made, file, homesite=homesite, trusting=trusting, store=store)
    for user in project.users:
        Kit(made / user.name).become_user(file, homesite=homesite)
    now = {project.server, *project.sites, *(user.name for user in project.users)}
    return Provisioned(
        project=project,
        project_file=folder / PROJECT_FILE,
        folder=made,
        kits=tuple(_made(project, made, earlier)),
        left=tuple(name for name, found in earlier.items() if name not in now and found.left().total_seconds() > 0),
    )


def complete_kits(
    project: Project,
    folder: Path,
    file: FederationFile | None,
    *,
    homesite: str,
    trusting: Collection[str],
    store: str,
    journal: bool = False,
) -> None:
    """Make the kits of the server and the clients in a folder those of our sites.

    Users may bring code to those that are ``trusting``; without a file, they bring all of it. ``store`` is for the jobs
    of FLARE; with a ``journal``, ours outlive the server.
    """
    for participant in (project.server, *project.sites):
        site = SERVER_SITE if participant == project.server else participant
        kept = journal and site == SERVER_SITE
        kit = Kit(folder / participant)
        kit.become_site(site, file, homesite=homesite, allow_code=site in trusting, journal=kept)
    Kit(folder / project.server).become_server(store)


def _changes(project: Project, earlier: Mapping[str, Certificate]) -> Iterator[str]:
    """Yield changes that are not possible, because certificates that stay valid contain the old values."""
    advice = "that is in their valid certificate. Use the same value, or another name or another --out"
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
    """Return the kits in a folder, the server's first; of a provisioned federation, the newest ones."""
    where = folder
    if (folder / PROJECT_FILE).is_file():
        name = yaml.safe_load((folder / PROJECT_FILE).read_text()).get("name", "")
        where = newest_kits(folder / str(name)) or folder
    found = [Kit(path) for path in sorted(where.iterdir()) if (path / "startup").is_dir()] if where.is_dir() else []
    if not found:
        raise DeploymentError(str(folder), ["it has no startup kit: name a folder that 'provision' has written"])
    return sorted(found, key=lambda kit: (("server", "client", "user").index(kit.kind), kit.name))
