"""One startup kit: the folder of a server, a client or a user, what we write into it, and probes of its process.

Imports little: containers run probes every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import yaml

from dfm_async.deploy.certificates import Certificate, write_private
from dfm_async.errors import DeploymentError
from dfm_async.model.flare import FEDERATION_FOLDER, SETTINGS_FILE, SiteSettings

if TYPE_CHECKING:
    from dfm_async.deploy.federation_file import FederationFile

OURS: Final = tuple(f"dfm_async.targets.flare.components.{name}" for name in ("HubController", "SiteExecutor"))
"""What jobs build at a site, besides FLARE's own components."""
_FEDERATION_FILE: Final = f"{FEDERATION_FOLDER}/federation.dfm.yaml"
_MOST_JOBS: Final = 100
_STARTS: Final[dict[Literal["server", "client", "user"], str]] = {
    "server": "fed_server.json",
    "client": "fed_client.json",
    "user": "fed_admin.json",
}
"""What each kind of participant starts with."""


class Kit:
    """The startup kit of one participant: a folder."""

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
        """What it is for. Raises ``DeploymentError`` if the folder is not a startup kit."""
        for kind, name in _STARTS.items():
            if (self.startup / name).is_file():
                return kind
        missing = f"its folder 'startup' has none of {', '.join(_STARTS.values())}"
        raise DeploymentError(str(self.folder), [f"not a startup kit: {missing}"])

    def start_file(self) -> dict[str, Any]:
        """Return the start file of FLARE: the participant, and the address of the server.

        Raises ``DeploymentError`` if the folder is not a startup kit, or the file is broken.
        """
        path = self.startup / _STARTS[self.kind]
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DeploymentError(str(self.folder), [f"{path}: {error}"]) from error
        return dict(data)

    def server_address(self) -> tuple[str, int]:
        """Return the address of the server, for this participant."""
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
        """Return the participant's certificate."""
        return Certificate.read(self.certificate_file)

    def become_site(
        self, site: str, file: FederationFile | None, *, homesite: str, allow_code: bool, journal: bool = False
    ) -> None:
        """Make it the kit of one of our sites.

        Args:
            site: the name of the site in the federation.
            file: the file of the federation; None if the site has none.
            homesite: the site of the applications; its client has a gateway for those on its machine.
            allow_code: whether users may bring code to it.
            journal: of the server: whether jobs outlive it.
        """
        settings = SiteSettings(site=site, homesite=homesite, allow_code=allow_code, journal=journal)
        self._install(file, settings)
        self._allow_components()
        if not allow_code:
            self._forbid_code()

    def become_user(self, file: FederationFile | None, *, homesite: str) -> None:
        """Install the federation for a user, too, so that 'doctor' can report which sites are missing."""
        if file is not None:
            self._install(file, SiteSettings(site=homesite, homesite=homesite))

    def _install(self, file: FederationFile | None, settings: SiteSettings) -> None:
        if file is not None:
            (self.local / FEDERATION_FOLDER).mkdir(mode=0o700, exist_ok=True)
            write_private(self.local / _FEDERATION_FILE, file.for_site(settings.site))
            settings = msgspec.structs.replace(settings, federation=_FEDERATION_FILE, compat=file.federation.compat)
        data = {name: value for name, value in msgspec.to_builtins(settings).items() if value != _DEFAULTS.get(name)}
        write_private(self.local / SETTINGS_FILE, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def _allow_components(self) -> None:
        """Let jobs build our components here: FLARE refuses all that its list does not name."""
        resources = self.resources()
        allowed = resources.setdefault("class_allow_list", [])
        allowed.extend(path for path in OURS if path not in allowed)
        self._write_configuration("resources.json", resources)

    def _forbid_code(self) -> None:
        """Revoke the right to bring code for all roles: FLARE then refuses such jobs before we see them."""
        policy = self.policy()
        rights = policy["permissions"]
        known = {right: "any" for granted in rights.values() if isinstance(granted, dict) for right in granted}
        for role, granted in rights.items():
            every = known if granted == "any" else granted
            rights[role] = {**every, "byoc": "none"} if isinstance(every, dict) else every
        self._write_configuration("authorization.json", policy)

    def become_server(self, store: str) -> None:
        """Configure the kit of a server.

        Its jobs are kept in a place of their own, an absolute path that may begin with a variable: the default is one
        folder for all federations of a machine. As many as users need may run at once. A job that could not start as
        a site was absent is tried again after a second instead of ten.
        """
        resources = self.resources()
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = f"{store}/snapshots"
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = f"{store}/jobs"
            elif component["id"] == "job_scheduler":
                component["args"] |= {"max_jobs": _MOST_JOBS, "min_schedule_interval": 1.0}
        self._write_configuration("resources.json", resources)
        # Users who submit jobs may send them commands: applications reach their own jobs by these.
        policy = self.policy()
        lead = policy["permissions"].get("lead")
        if isinstance(lead, dict) and "app_command" not in lead:
            lead["app_command"] = "n:submitter"
            self._write_configuration("authorization.json", policy)

    def listen(self, port: int, admin_port: int) -> None:
        """Change the ports of a server, or those that its clients and users connect to."""
        for path in self.startup.glob("fed_*.json"):
            data = json.loads(path.read_text())
            for server in data.get("servers", ()):
                host = server["service"]["target"].partition(":")[0]
                server["service"]["target"] = f"{host}:{port}"
                if "admin_port" in server:
                    server["admin_port"] = admin_port
            if "admin" in data:
                data["admin"]["port"] = admin_port
            write_private(path, json.dumps(data, indent=2))

    def resources(self) -> dict[str, Any]:
        """Return the site's own configuration, or the default of FLARE."""
        return self._configuration("resources.json")

    def policy(self) -> dict[str, Any]:
        """Return the authorization policy of the site, as FLARE reads it."""
        return self._configuration("authorization.json")

    def _configuration(self, name: str) -> dict[str, Any]:
        path = self.local / name
        if not path.exists():
            path = self.local / f"{name}.default"
        return dict(json.loads(path.read_text()))

    def _write_configuration(self, name: str, data: Mapping[str, Any]) -> None:
        write_private(self.local / name, json.dumps(data, indent=2))


_DEFAULTS: Final = msgspec.to_builtins(SiteSettings(site="x")) | {"site": None}


async def greet(kit: Kit, host: str, port: int, *, timeout: float) -> str:  # noqa: ASYNC109 - a probe has one limit
    """Perform the TLS handshake with the server as the participant would, and return the version of TLS.

    Only certificates of this federation are accepted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # FLARE knows servers by their certificate, whatever address leads to them
    context.load_verify_locations(kit.authority_file)
    context.load_cert_chain(kit.certificate_file, kit.key_file)
    context.set_alpn_protocols(["h2"])  # gRPC requires it
    async with asyncio.timeout(timeout):
        _, writer = await asyncio.open_connection(host, port, ssl=context, family=socket.AF_UNSPEC)
        try:
            return str(writer.get_extra_info("ssl_object").version())
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def is_connected(kit: Kit) -> bool:
    """Return whether the client of a kit runs on this machine, and has a connection to the server."""
    import psutil  # comes with nvflare

    _, port = kit.server_address()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if not any(word.endswith("client_train") for word in command) or "-m" not in command:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if any(Path(word).resolve() == kit.folder.resolve() for word in command if word.startswith("/")) and any(
                found.status == psutil.CONN_ESTABLISHED and found.raddr and found.raddr.port == port
                for found in process.net_connections("tcp")
            ):
                return True
    return False
