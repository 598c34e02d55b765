"""One startup kit: the folder of a server, a client or a user, and what we write into it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from dfm_async.model.flare import SETTINGS_FILE, SiteSettings

__all__ = ["Kit"]

_OURS: Final = "dfm_async.targets.flare."
"""What jobs build at a site, besides FLARE's own components."""
_MOST_JOBS: Final = 100


class Kit:
    """The startup kit of one participant.

    Args:
        folder: where it is; its name is that of the participant.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.local = folder / "local"
        self.startup = folder / "startup"

    @property
    def name(self) -> str:
        """The participant."""
        return self.folder.name

    def write_settings(self, settings: SiteSettings) -> None:
        """Writes what the site decides for itself."""
        data = {name: value for name, value in msgspec.to_builtins(settings).items() if value != _DEFAULTS.get(name)}
        _write(self.local / SETTINGS_FILE, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def allow_components(self) -> None:
        """Lets jobs build our components here: FLARE refuses all that its list does not name."""
        resources = self.resources()
        allowed = resources.setdefault("class_allow_list", [])
        if _OURS not in allowed:
            allowed.append(_OURS)
        self._write_resources(resources)

    def keep_jobs_inside(self) -> None:
        """Puts the server's stores into its workspace: the default is one folder for all federations of a machine."""
        resources = self.resources()
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(self.folder / "snapshots")
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(self.folder / "jobs")
            elif component["id"] == "job_scheduler":
                # How many jobs run at once; and after how many seconds one that did not fit is tried again.
                component["args"] |= {"max_jobs": _MOST_JOBS, "min_schedule_interval": 1.0}
        self._write_resources(resources)

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
        path = self.local / "resources.json"
        if not path.exists():
            path = self.local / "resources.json.default"
        data: dict[str, Any] = json.loads(path.read_text())
        return data

    def _write_resources(self, resources: Mapping[str, Any]) -> None:
        _write(self.local / "resources.json", json.dumps(resources, indent=2))


_DEFAULTS: Final = msgspec.to_builtins(SiteSettings(site="x")) | {"site": None}


def _write(path: Path, text: str) -> None:
    """Writes a file as a whole: a reader sees the old one or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    os.replace(new, path)
