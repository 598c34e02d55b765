"""What FLARE is to provision: the server, one client per site, and the users. Names are checked here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from dfm_async.errors import DeploymentError

__all__ = ["ROLES", "SERVER_SITE", "Project", "User", "project_name"]

SERVER_SITE: Final = "server"
"""The site that is no client: it runs in the server's own job process."""
ROLES: Final = ("lead", "project_admin", "org_admin", "member")

_SITE: Final = re.compile(r"[A-Za-z0-9_-]+")
_HOST: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
_USER: Final = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}")
_WORD: Final = re.compile(r"[A-Za-z0-9_]+")
_LONGEST: Final = 63
"""How long a name may be: it stands in a certificate, and in the name of a folder."""


@dataclass(frozen=True, slots=True)
class User:
    """Who may use a federation.

    Attributes:
        name: an e-mail address; FLARE knows users by that.
        role: what FLARE allows: a ``lead`` submits jobs and looks after their own.
    """

    name: str
    role: str = "lead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Who takes part in a federation on FLARE.

    Attributes:
        name: what the federation is called.
        sites: the sites that are clients, each with a startup kit of its own.
        users: who may use it.
        server: the host name by which the sites reach the server.
        port: where the server listens for sites.
        admin_port: where it listens for users.
        org: the organisation of all that are not in ``orgs``.
        orgs: the organisations of others: of sites and users by their names, of the server as ``server``.
        scheme: how they talk: ``grpc`` or ``tcp``.
    """

    name: str
    sites: tuple[str, ...]
    users: tuple[User, ...]
    server: str
    port: int = 8002
    admin_port: int = 8003
    org: str = "dfm"
    orgs: Mapping[str, str] = field(default_factory=dict)
    scheme: str = "grpc"

    def check(self) -> None:
        """Checks all names by the rules of FLARE.

        Raises:
            DeploymentError: lists everything that is wrong.
        """
        problems = list(self.problems())
        if problems:
            raise DeploymentError(self.name, problems)

    def org_of(self, participant: str) -> str:
        """The organisation of a site or a user, or of the server (``server``)."""
        return self.orgs.get(participant, self.org)

    def problems(self) -> Iterator[str]:
        """Tells everything that is wrong by the rules of FLARE."""
        if not _fits(_SITE, self.name):
            yield f"the name {self.name!r} {_RULE}"
        if not self.sites:
            yield "there is no site besides the server: FLARE runs nothing without a client"
        for site in self.sites:
            if not _fits(_SITE, site):
                yield f"site {site!r}: its name {_RULE}"
            elif site == SERVER_SITE:
                yield f"site {site!r} is the server itself, not one of its clients"
            elif site == self.server:
                yield f"site {site!r} has the name of the server's host"
        yield from (f"site {site!r} is there twice" for site in _twice(self.sites))
        if not _fits(_HOST, self.server, 253):
            yield f"server {self.server!r} is no host name, such as flare.example.org"
        if not self.users:
            yield "there is no user: nobody could submit a pipeline"
        for user in self.users:
            if not _fits(_USER, user.name):
                yield f"user {user.name!r} must be an e-mail address, such as ann@example.org"
            if user.role not in ROLES:
                yield f"user {user.name!r}: there is no role {user.role!r}, but {', '.join(ROLES)}"
        yield from (f"user {name!r} is there twice" for name in _twice(user.name for user in self.users))
        for org in dict.fromkeys([self.org, *self.orgs.values()]):
            if not _fits(_WORD, org):
                yield f"organisation {org!r} must consist of letters, digits and _"
        known = {SERVER_SITE, *self.sites, *(user.name for user in self.users)}
        for name in sorted(self.orgs.keys() - known):
            yield f"organisation of {name!r}: there is no such site or user"
        if self.scheme not in ("grpc", "tcp"):
            yield f"scheme must be 'grpc' or 'tcp', not {self.scheme!r}"
        for port in (self.port, self.admin_port):
            if not 0 < port < 65536:
                yield f"{port} is no port"

    def to_yaml(self) -> str:
        """The project file that FLARE provisions from."""
        server = {"name": self.server, "type": "server", "org": self.org_of(SERVER_SITE)}
        participants: list[dict[str, Any]] = [
            {**server, "fed_learn_port": self.port, "admin_port": self.admin_port},
            *({"name": site, "type": "client", "org": self.org_of(site)} for site in self.sites),
            *(
                {"name": user.name, "type": "admin", "org": self.org_of(user.name), "role": user.role}
                for user in self.users
            ),
        ]
        data = {
            "api_version": 3,
            "name": self.name,
            "description": f"The federation {self.name}",
            "participants": participants,
            "builders": [
                {"path": f"{_BUILDERS}.workspace.WorkspaceBuilder"},
                {
                    "path": f"{_BUILDERS}.static_file.StaticFileBuilder",
                    "args": {"config_folder": "config", "scheme": self.scheme},
                },
                {"path": f"{_BUILDERS}.cert.CertBuilder", "args": {"root_valid_days": _ROOT_DAYS}},
                {"path": f"{_BUILDERS}.signature.SignatureBuilder"},
            ],
        }
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


_BUILDERS: Final = "nvflare.lighter.impl"
_ROOT_DAYS: Final = 3650
"""How long the federation's own certificate is valid. With FLARE's 360 days it would end together with those that it
signs, and they could not be renewed without a new kit for everybody on the same day."""
_RULE: Final = f"must consist of letters, digits, - and _, at most {_LONGEST}: FLARE knows it by that"


def project_name(federation: str) -> str:
    """Makes a name that FLARE takes out of that of a federation."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", federation)[:_LONGEST] or "federation"


def _fits(pattern: re.Pattern[str], name: str, longest: int = _LONGEST) -> bool:
    return len(name) <= longest and pattern.fullmatch(name) is not None


def _twice(names: Iterable[str]) -> list[str]:
    found = list(names)
    return sorted({name for name in found if found.count(name) > 1})
