"""Files that run startup kits in containers: an image for all, and a compose file. Keys are mounted, never copied."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from dfm_async.deploy.kit import Kit
from dfm_async.errors import DeploymentError
from dfm_async.version import __version__

__all__ = ["PLACE", "UID", "check_kits", "compose_files", "image_files", "label"]

PLACE: Final = "/flare/site"
"""Where every container has its kit."""
UID: Final = 10001
"""The user of the image; any other works, too."""
PROBE: Final = ["dfm-async", "flare", "probe", PLACE]
_PYTHON: Final = "3.12"

_DOCKERFILE: Final = f"""\
# The image of every participant. It has no kit in it: keys and certificates are mounted where it runs.
FROM python:{_PYTHON}-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Wheels that are on no index can lie in wheels/.
COPY requirements.txt /build/
COPY wheels/ /build/wheels/
RUN python -m venv /opt/dfm \\
    && /opt/dfm/bin/pip install --find-links /build/wheels --requirement /build/requirements.txt

# Any user can run it: nothing of the image is written to.
RUN mkdir -p {PLACE}/startup {PLACE}/local && chown -R {UID}:{UID} /flare
ENV PATH=/opt/dfm/bin:$PATH HOME={PLACE} USER=dfm
USER {UID}:{UID}
WORKDIR {PLACE}

# It is the first process of its container, hears SIGTERM, and ends everything that FLARE has started.
ENTRYPOINT ["dfm-async", "flare", "start", "{PLACE}"]
"""
_IGNORED: Final = """\
# Nothing goes to the builder but what the Dockerfile copies: no key can get into an image.
*
!requirements.txt
!wheels
wheels/*
!wheels/*.whl
"""


def check_kits(name: str, kits: Sequence[Kit]) -> list[Kit]:
    """Gives the kits that containers are for: the server's and those of clients.

    Raises:
        DeploymentError: there are none, or containers could not find the server.
    """
    found = [kit for kit in kits if kit.kind != "user"]
    problems = [] if found else ["there are only kits of users, who run nothing"]
    if any(kit.server_address()[0] in ("localhost", "127.0.0.1") for kit in found):
        problems.append(
            "its server is called localhost: each container would look for it in itself. Provision it with a name "
            "that others can use, such as --server flare-server"
        )
    if problems:
        raise DeploymentError(name, problems)
    return found


def label(text: str) -> str:
    """Makes a name that containers and Kubernetes take: small letters, digits and dashes."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return kept.strip("-")[:50].strip("-") or "site"


def image_files(packages: Sequence[str]) -> dict[str, str]:
    """The files that an image is built from, by their paths.

    Args:
        packages: what is installed in it besides dfm_async, such as the package of the adapters.
    """
    requirements = "\n".join([f"dfm-async[cli,flare]=={__version__}", *packages])
    return {
        "Dockerfile": _DOCKERFILE,
        ".dockerignore": _IGNORED,
        "requirements.txt": f"{requirements}\n",
        "wheels/.gitignore": "*\n!.gitignore\n",
    }


def compose_files(name: str, kits: Sequence[Kit], image: str, out: Path) -> dict[str, str]:
    """A compose file for the kits of a folder, all on one machine, or those of this one.

    Args:
        name: the name of the federation.
        kits: the kits; those of users are left out.
        image: the name of the image.
        out: the folder of the file; the kits are mounted from where they are, by paths from there.
    """
    found = check_kits(name, kits)
    names = {kit.name: "server" if kit.kind == "server" else label(kit.name) for kit in found}
    if len(set(names.values())) < len(names):
        raise DeploymentError(name, [f"names of sites are too alike for containers: {', '.join(sorted(names))}"])
    server = next((kit for kit in found if kit.kind == "server"), None)
    services = {names[kit.name]: _service(kit, image, out, server) for kit in found}
    data = {"name": label(name), "services": services, "networks": {"federation": {}}}
    head = (
        "# Written by 'dfm-async flare deploy'. The kits are mounted from where they are.\n"
        "# DFM_UID and DFM_GID: who owns them; as in: DFM_UID=$(id -u) DFM_GID=$(id -g) docker compose up -d\n"
    )
    return {"compose.yaml": head + yaml.safe_dump(data, sort_keys=False)}


def _service(kit: Kit, image: str, out: Path, server: Kit | None) -> dict[str, Any]:
    source = Path(os.path.relpath(kit.folder, out)).as_posix()
    source = source if source.startswith(".") else f"./{source}"

    def mount(part: str, *, read_only: bool) -> dict[str, Any]:
        found = {"type": "bind", "source": f"{source}{part}", "target": f"{PLACE}{part}"}
        return {**found, "read_only": True} if read_only else found

    service: dict[str, Any] = {
        "image": image,
        "build": {"context": "."},
        "user": f"${{DFM_UID:-{UID}}}:${{DFM_GID:-{UID}}}",
        "read_only": True,
        "tmpfs": ["/tmp"],  # noqa: S108 - in the container
        "volumes": [
            mount("", read_only=False),
            mount("/startup", read_only=True),
            mount("/local", read_only=True),
        ],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "mem_reservation": "512m" if kit.kind == "server" else "1g",
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
        "healthcheck": {
            "test": ["CMD", *PROBE],
            "interval": "30s",
            "timeout": "15s",
            "retries": 3,
            "start_period": "60s",
        },
        "networks": {"federation": {}},
    }
    host, port = kit.server_address()
    if kit.kind == "server":
        ports = dict.fromkeys([port, admin_port(kit)])
        service["ports"] = [f"{number}:{number}" for number in ports]
        service["networks"] = {"federation": {"aliases": [host]}}
    elif server is not None:
        service["depends_on"] = {"server": {"condition": "service_healthy"}}
    return service


def admin_port(kit: Kit) -> int:
    """Where a server listens for users."""
    return int(kit.start_file()["servers"][0]["admin_port"])
