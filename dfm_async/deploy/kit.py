"""One startup kit: the folder of a server, a client or a user, and what we write into it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import yaml

from dfm_async.deploy.certificates import Certificate
from dfm_async.errors import DeploymentError
from dfm_async.model.flare import FEDERATION_FOLDER, SETTINGS_FILE, SiteSettings

if TYPE_CHECKING:
    from dfm_async.deploy.installation import FederationFiles

__all__ = ["OURS", "Kit"]

OURS: Final = tuple(f"dfm_async.targets.flare.components.{name}" for name in ("HubController", "SiteExecutor"))
"""What jobs build at a site, besides FLARE's own components."""
_MOST_JOBS: Final = 100
_STARTS: Final[dict[Literal["server", "client", "user"], str]] = {
    "server": "fed_server.json",
    "client": "fed_client.json",
    "user": "fed_admin.json",
}
"""What each kind of participant starts with."""


class Kit:
    """The startup kit of one participant.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.local = folder / "local"
        self.startup = folder / "startup"

    @cached_property
    def name(self) -> str:
        """The participant; the folder may be called otherwise, as in a container."""
        try:
            data = self.start_file()
        except DeploymentError:
            return self.folder.name
        named = data.get("client", {}).get("fqsn") or data.get("admin", {}).get("username")
        return str(named or data.get("servers", [{}])[0].get("admin_server") or self.folder.name)

    @property
    def broken(self) -> bool:
        """Whether the file that FLARE starts with cannot be read."""
        try:
            self.start_file()
        except DeploymentError:
            return True
        return False

    @property
    def kind(self) -> Literal["server", "client", "user"]:
        """What it is for.

        Raises:
            DeploymentError: it is no startup kit.
        """
        for kind, name in _STARTS.items():
            if (self.startup / name).is_file():
                return kind
        told = f"its folder 'startup' has none of {', '.join(_STARTS.values())}"
        raise DeploymentError(str(self.folder), [f"it is no startup kit: {told}"])

    def start_file(self) -> dict[str, Any]:
        """What FLARE starts with: who this is, and where the server is.

        Raises:
            DeploymentError: it is no startup kit, or the file is broken.
        """
        path = self.startup / _STARTS[self.kind]
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DeploymentError(str(self.folder), [f"{path}: {error}"]) from error
        return dict(data)

    def server_address(self) -> tuple[str, int]:
        """Where the server is, for this participant."""
        data = self.start_file()
        if self.kind == "user":
            return str(data["admin"]["host"]), int(data["admin"]["port"])
        host, _, port = str(data["servers"][0]["service"]["target"]).rpartition(":")
        return host, int(port)

    @property
    def certificate_file(self) -> Path:
        """The participant's own certificate."""
        return self.startup / ("server.crt" if self.kind == "server" else "client.crt")

    @property
    def key_file(self) -> Path:
        """The participant's private key."""
        return self.certificate_file.with_suffix(".key")

    @property
    def authority_file(self) -> Path:
        """The certificate of the federation, which has signed all others."""
        return self.startup / "rootCA.pem"

    def certificate(self) -> Certificate:
        """The participant's certificate."""
        return Certificate.read(self.certificate_file)

    def become_site(self, site: str, files: FederationFiles | None, *, homesite: str, allow_code: bool) -> None:
        """Makes it the kit of one of our sites.

        Args:
            site: the name of the site in the federation.
            files: the federation as it is installed there; None if the site has none.
            homesite: the site of the applications; its client has a gateway for those on its machine.
            allow_code: whether users may bring code to it.
        """
        if files is not None:
            files = files.for_site(site)
            files.write(self.local / FEDERATION_FOLDER)
        installed = None if files is None else f"{FEDERATION_FOLDER}/{files.root}"
        compat = files is not None and files.federation.compat
        self._write_settings(
            SiteSettings(site=site, homesite=homesite, federation=installed, compat=compat, allow_code=allow_code)
        )
        self._allow_components()
        if not allow_code:
            self._forbid_code()

    def become_user(self, files: FederationFiles | None, *, homesite: str) -> None:
        """Gives a user the federation, too: so 'doctor' can tell which sites are missing."""
        if files is not None:
            files.write(self.local / FEDERATION_FOLDER)
            installed = f"{FEDERATION_FOLDER}/{files.root}"
            compat = files.federation.compat
            self._write_settings(SiteSettings(site=homesite, homesite=homesite, federation=installed, compat=compat))

    def _write_settings(self, settings: SiteSettings) -> None:
        data = {name: value for name, value in msgspec.to_builtins(settings).items() if value != _DEFAULTS.get(name)}
        _write(self.local / SETTINGS_FILE, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def _allow_components(self) -> None:
        """Lets jobs build our components here: FLARE refuses all that its list does not name."""
        resources = self.resources()
        allowed = resources.setdefault("class_allow_list", [])
        allowed.extend(path for path in OURS if path not in allowed)
        self._write_resources(resources)

    def _forbid_code(self) -> None:
        """Takes the right to bring code from all roles: FLARE then refuses such jobs, before we see them."""
        policy = self.policy()
        rights = policy["permissions"]
        known = {right: "any" for granted in rights.values() if isinstance(granted, dict) for right in granted}
        for role, granted in rights.items():
            every = known if granted == "any" else granted
            rights[role] = {**every, "byoc": "none"} if isinstance(every, dict) else every
        _write(self.local / "authorization.json", json.dumps(policy, indent=2))

    def become_server(self, store: str) -> None:
        """Tunes the kit of a server.

        Its jobs are kept in a place of their own: the default is one folder for all federations of a machine. As many
        as users need may run at once. One that could not start, because a site was not there, is tried again after a
        second instead of ten.

        Args:
            store: where jobs are kept; an absolute path, which may begin with a variable, such as ``{$HOME}/weather``.
        """
        resources = self.resources()
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = f"{store}/snapshots"
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = f"{store}/jobs"
            elif component["id"] == "job_scheduler":
                component["args"] |= {"max_jobs": _MOST_JOBS, "min_schedule_interval": 1.0}
        self._write_resources(resources)
        self._allow_commands()

    def _allow_commands(self) -> None:
        """Lets those who submit jobs speak to them: applications have no other way to their own jobs."""
        policy = self.policy()
        lead = policy["permissions"].get("lead")
        if isinstance(lead, dict) and "app_command" not in lead:
            lead["app_command"] = "n:submitter"
            _write(self.local / "authorization.json", json.dumps(policy, indent=2))

    def listen(self, port: int, admin_port: int) -> None:
        """Changes the ports, of a server or in what its clients and users know of it."""
        for path in self.startup.glob("fed_*.json"):
            data = json.loads(path.read_text())
            for server in data.get("servers", ()):
                host = server["service"]["target"].partition(":")[0]
                server["service"]["target"] = f"{host}:{port}"
                if "admin_port" in server:
                    server["admin_port"] = admin_port
            if "admin" in data:
                data["admin"]["port"] = admin_port
            _write(path, json.dumps(data, indent=2))

    def resources(self) -> dict[str, Any]:
        """What the site's own configuration says; that of FLARE, as long as nobody has changed it."""
        data: dict[str, Any] = self._configuration("resources.json")
        return data

    def policy(self) -> dict[str, Any]:
        """What the site allows to whom, as FLARE reads it."""
        data: dict[str, Any] = self._configuration("authorization.json")
        return data

    def _configuration(self, name: str) -> Any:
        path = self.local / name
        if not path.exists():
            path = self.local / f"{name}.default"
        return json.loads(path.read_text())

    def _write_resources(self, resources: Mapping[str, Any]) -> None:
        _write(self.local / "resources.json", json.dumps(resources, indent=2))


_DEFAULTS: Final = msgspec.to_builtins(SiteSettings(site="x")) | {"site": None}


def _write(path: Path, text: str) -> None:
    """Writes a file as a whole, for nobody but its owner: a reader sees the old one or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch(mode=0o600)
    new.write_text(text)
    os.replace(new, path)
