"""Projects that FLARE provisions: the server, one client per site, and the users; and their startup kits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from dfm_async.base.text import install_hint
from dfm_async.deploy.certificates import forget_ending
from dfm_async.errors import DeploymentError
from dfm_async.errors.root import exit_text

SERVER_SITE: Final = "server"
"""The site without a client: it runs in the server's own job process."""
INSTALL: Final = install_hint("flare")
PROJECT_FILE: Final = "project.yml"
ROLES: Final = ("lead", "project_admin", "org_admin", "member")

_MAX_AGE: Final = 300 * 24 * 3600.0
"""The age in seconds up to which kits are reused: their certificates are valid for 360 days."""
_SITE: Final = re.compile(r"[A-Za-z0-9_-]+")
_HOST: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
_USER: Final = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}")
_WORD: Final = re.compile(r"[A-Za-z0-9_]+")
_LONGEST: Final = 63
"""The longest name: it is a part of a certificate, and of the name of a folder."""


@dataclass(frozen=True, slots=True)
class User:
    """A user of a federation.

    Attributes:
        name: an e-mail address; FLARE knows users by that.
        role: the role in FLARE: a ``lead`` submits jobs and manages their own.
    """

    name: str
    role: str = "lead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The participants of a federation on FLARE.

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
        """Check all names by the rules of FLARE.

        Raises:
            DeploymentError: lists everything that is wrong.
        """
        problems = list(self.problems())
        if problems:
            raise DeploymentError(self.name, problems)

    def org_of(self, participant: str) -> str:
        """Return the organisation of a site or a user, or of the server (``server``)."""
        return self.orgs.get(participant, self.org)

    def problems(self) -> Iterator[str]:
        """Return all violations of the rules of FLARE."""
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
            yield f"server {self.server!r} is not a host name, such as flare.example.org"
        if not self.users:
            yield "there is no user, so that no pipeline can be submitted"
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
                yield f"invalid port {port}"

    def to_yaml(self) -> str:
        """Return the project file that FLARE provisions from."""
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
    """Return the name of a federation as a name that FLARE accepts."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", federation)[:_LONGEST] or "federation"


def _fits(pattern: re.Pattern[str], name: str, longest: int = _LONGEST) -> bool:
    return len(name) <= longest and pattern.fullmatch(name) is not None


def _twice(names: Iterable[str]) -> list[str]:
    found = list(names)
    return sorted({name for name in found if found.count(name) > 1})


# provisioning


def require_nvflare(name: str) -> None:
    """Raise DeploymentError if nvflare is not installed here; the message says how to install it."""
    if importlib.util.find_spec("nvflare") is None:
        raise DeploymentError(name, [f"nvflare is not installed in {sys.prefix}: {INSTALL}"])


async def provision(project: Project, folder: Path) -> Path:
    """Make the startup kits of a project, and return their folder. What is in ``folder`` already stays.

    Certificates that expire soon are renewed, signed by the same federation. Only the owner can read what is written:
    the private key of the federation is part of it.

    Raises:
        DeploymentError: names are wrong, or FLARE refuses the project.
    """
    project.check()
    require_nvflare(project.name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    (folder / PROJECT_FILE).write_text(project.to_yaml())
    forget_ending(state_file(folder, project))
    code, output, _ = await run_python(
        *("-m", "nvflare.cli", "provision", "-p", PROJECT_FILE, "-w", ".", "--force"),
        cwd=folder,
        stderr=asyncio.subprocess.STDOUT,
        umask=0o077,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    _protect(folder / project.name)
    kits = newest_kits(folder / project.name)
    if code != 0 or kits is None:
        output = output.strip() or f"it ended with {exit_text(code)}"
        raise DeploymentError(project.name, [f"FLARE cannot provision {folder / PROJECT_FILE}: {output}"])
    return kits


async def run_python(*arguments: str, cwd: Path, **options: Any) -> tuple[int, str, str]:
    """Run Python to its end; return its exit code and what it wrote. Cancelling this kills it."""
    options = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE, **options}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=cwd, stdout=asyncio.subprocess.PIPE, **options
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace"), (errors or b"").decode(errors="replace")


def _protect(workspace: Path) -> None:
    """Remove the permissions of other users, also for FLARE's own scripts."""
    for path in (workspace, *workspace.rglob("*")):
        if path.exists() and not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o077)


def state_file(folder: Path, project: Project) -> Path:
    """Return the file in which FLARE keeps the certificates and private keys of a project."""
    return folder / project.name / "state" / "cert.json"


def newest_kits(workspace: Path) -> Path | None:
    """Return the kits that were made last in the workspace of a project; None if there are none."""
    made = [path for path in workspace.glob("prod_*") if path.name[5:].isdigit()]
    return max(made, key=lambda path: int(path.name[5:]), default=None)


async def cached_kits(project: Project, cache: Path) -> Path:
    """Return the kits of a project; make them if there are no earlier ones of the same project.

    Several processes may call it for the same project at once.
    """
    digest = hashlib.sha256(project.to_yaml().encode()).hexdigest()[:16]
    home = cache / digest
    if (kits := newest_kits(home / project.name)) is not None and time.time() - kits.stat().st_mtime < _MAX_AGE:
        return kits
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as making:
        await provision(project, Path(making) / digest)
        shutil.rmtree(home, ignore_errors=True)  # too old
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(Path(making) / digest, home)
    kits = newest_kits(home / project.name)
    if kits is None:
        raise DeploymentError(project.name, [f"{home} cannot be written to"])
    return kits
