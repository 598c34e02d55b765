"""Files that run startup kits in containers: an image for all, a compose file, manifests for Kubernetes.

Keys are never copied: they are mounted, or come as Secrets that are made apart.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from dfm_async.deploy.kit import Kit
from dfm_async.errors import DeploymentError
from dfm_async.version import __version__

PLACE: Final = "/flare/site"
"""Where every container has its kit."""
_UID: Final = 10001
"""The user of the image; any other works, too."""
_PROBE: Final = ["dfm-async", "flare", "probe", PLACE]
_PYTHON: Final = "3.12"

_DOCKERFILE: Final = f"""\
# The image of every participant. It has no kit in it: keys and certificates are mounted where it runs.
FROM python:{_PYTHON}-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Put wheels that are on no index into wheels/.
COPY requirements.txt /build/
COPY wheels/ /build/wheels/
RUN python -m venv /opt/dfm \\
    && /opt/dfm/bin/pip install --find-links /build/wheels --requirement /build/requirements.txt

# Any user can run it: nothing of the image is written to.
RUN mkdir -p {PLACE}/startup {PLACE}/local && chown -R {_UID}:{_UID} /flare
ENV PATH=/opt/dfm/bin:$PATH HOME={PLACE} USER=dfm
USER {_UID}:{_UID}
WORKDIR {PLACE}

# It is the first process of its container, handles SIGTERM, and ends everything that FLARE has started.
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


def _named_kits(federation: str, kits: Sequence[Kit], prefix: str = "") -> dict[str, Kit]:
    """Return the kits of the server and of clients by the names of their containers, if containers can run them."""
    found = [kit for kit in kits if kit.kind != "user"]
    named = {prefix + ("server" if kit.kind == "server" else label(kit.name)): kit for kit in found}
    problems = [] if found else ["there are only kits of users, which run nothing"]
    if any(kit.server_address()[0] in ("localhost", "127.0.0.1") for kit in found):
        problems.append(
            "its server is called localhost, which is the container itself in each container. Provision it with a name "
            "that others can use, such as --server flare-server"
        )
    if len(named) < len(found):
        names = ", ".join(sorted(kit.name for kit in found))
        problems.append(f"names of sites are too similar for containers: {names}")
    if problems:
        raise DeploymentError(federation, problems)
    return named


def label(text: str) -> str:
    """Make a name that containers and Kubernetes take: small letters, digits and dashes."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return kept.strip("-")[:50].strip("-") or "site"


def image_files(packages: Sequence[str]) -> dict[str, str]:
    """Return the files that an image with some packages is built from, such as that of the adapters, by their paths."""
    requirements = "\n".join([f"dfm-async[cli,flare]=={__version__}", *packages])
    return {
        "Dockerfile": _DOCKERFILE,
        ".dockerignore": _IGNORED,
        "requirements.txt": f"{requirements}\n",
        "wheels/.gitignore": "*\n!.gitignore\n",
    }


def compose_files(name: str, kits: Sequence[Kit], image: str, out: Path) -> dict[str, str]:
    """Return a compose file for the kits of this machine; those of users are left out.

    The kits are mounted from where they are, by paths from the folder ``out`` of the file.
    """
    found = _named_kits(name, kits)
    services = {service: _service(kit, image, out, has_server="server" in found) for service, kit in found.items()}
    data = {"name": label(name), "services": services, "networks": {"federation": {}}}
    head = (
        "# Written by 'dfm-async flare deploy'. The kits are mounted from where they are.\n"
        "# DFM_UID and DFM_GID: who owns them; as in: DFM_UID=$(id -u) DFM_GID=$(id -g) docker compose up -d\n"
    )
    return {"compose.yaml": head + yaml.safe_dump(data, sort_keys=False)}


def _service(kit: Kit, image: str, out: Path, *, has_server: bool) -> dict[str, Any]:
    source = Path(os.path.relpath(kit.folder, out)).as_posix()
    source = source if source.startswith(".") else f"./{source}"

    def mount(part: str, *, read_only: bool) -> dict[str, Any]:
        found = {"type": "bind", "source": f"{source}{part}", "target": f"{PLACE}{part}"}
        return {**found, "read_only": True} if read_only else found

    service: dict[str, Any] = {
        "image": image,
        "build": {"context": "."},
        "user": f"${{DFM_UID:-{_UID}}}:${{DFM_GID:-{_UID}}}",
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
            "test": ["CMD", *_PROBE],
            "interval": "30s",
            "timeout": "15s",
            "retries": 3,
            "start_period": "60s",
        },
        "networks": {"federation": {}},
    }
    host, port = kit.server_address()
    if kit.kind == "server":
        service["ports"] = [f"{number}:{number}" for number in dict.fromkeys([port, _admin_port(kit)])]
        service["networks"] = {"federation": {"aliases": [host]}}
    elif has_server:
        service["depends_on"] = {"server": {"condition": "service_healthy"}}
    return service


def _admin_port(kit: Kit) -> int:
    return int(kit.start_file()["servers"][0]["admin_port"])


# Kubernetes: one StatefulSet per participant

_LARGEST: Final = 1024 * 1024
"""How many bytes a ConfigMap or a Secret may have."""
_KEYS: Final = ("*.json", "*.crt", "*.key", "*.pem")
_GRACE: Final = 30


def kubernetes_files(name: str, kits: Sequence[Kit], image: str, namespace: str) -> dict[str, str]:
    """Return manifests for kits except those of users, by path, and a script that makes Secrets from the kits."""
    found = _named_kits(name, kits, f"{label(name)}-")
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace) is None:
        raise DeploymentError(name, [f"{namespace!r} is not a valid name of a namespace"])
    files = {}
    for pod, kit in found.items():
        participant = _Participant(kit, pod, label(name), image, namespace)
        files[f"{pod}.yaml"] = _HEAD + yaml.safe_dump_all(participant.manifests(), sort_keys=False)
    files["secrets.sh"] = _secrets(found, namespace)
    return files


_HEAD: Final = """\
# Written by 'dfm-async flare deploy'. The Secret with the keys is not in here: secrets.sh makes it from the kit.
"""


def _secrets(kits: dict[str, Kit], namespace: str) -> str:
    lines = [
        "#!/bin/sh",
        "# Makes the Secrets from the startup kits. The keys go from the kit to the cluster, and nowhere else.",
        "# Run it where the kits are: sh secrets.sh KITS",
        "set -eu",
        "KITS=${1:?name the folder of the kits}",
    ]
    for pod, kit in kits.items():
        files = sorted(path.name for pattern in _KEYS for path in kit.startup.glob(pattern))
        sources = " ".join(f'--from-file="$KITS"/{shlex.quote(f"{kit.folder.name}/startup/{file}")}' for file in files)
        make = f"kubectl create secret generic {pod}-startup --namespace {namespace} {sources}"
        lines.append(f"{make} --dry-run=client --output yaml | kubectl apply --filename -")
    return "\n".join(lines) + "\n"


class _Participant:
    """The server or one client."""

    def __init__(self, kit: Kit, name: str, federation: str, image: str, namespace: str) -> None:
        self._kit = kit
        self._name = name
        self._image = image
        self._namespace = namespace
        self._labels = {
            "app.kubernetes.io/name": "dfm-async",
            "app.kubernetes.io/instance": name,
            "app.kubernetes.io/component": kit.kind,
            "app.kubernetes.io/part-of": federation,
        }

    def manifests(self) -> list[dict[str, Any]]:
        """Return all its manifests, but for its Secret."""
        contents, items = _local(self._kit)
        found = [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._meta(f"{self._name}-local"), "data": contents},
            self._stateful_set(items, hashlib.sha256(repr(contents).encode()).hexdigest()[:16]),
        ]
        return [*found, self._service()] if self._kit.kind == "server" else found

    def _meta(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": self._namespace, "labels": dict(self._labels)}

    def _selector(self) -> dict[str, str]:
        return {"app.kubernetes.io/instance": self._name}

    def _service(self) -> dict[str, Any]:
        host, _ = self._kit.server_address()
        first, _, rest = host.partition(".")
        inside = not rest or rest.startswith(f"{self._namespace}.svc") or rest == self._namespace
        ports = [{"name": name, "port": number, "targetPort": name} for name, number in self._ports().items()]
        # Inside the cluster, the name in all kits is that of the service. Another name has to be in DNS.
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._meta(first if inside else self._name),
            "spec": {
                "type": "ClusterIP" if inside else "LoadBalancer",
                "selector": self._selector(),
                "ports": ports,
            },
        }

    def _stateful_set(self, items: list[dict[str, str]], digest: str) -> dict[str, Any]:
        # Settings are read at the start: with others, the pod is another one.
        annotations = {"dfm-async/local": digest}
        return {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": self._meta(self._name),
            "spec": {
                "serviceName": self._name,
                "replicas": 1,  # FLARE knows one of each name
                "selector": {"matchLabels": self._selector()},
                "template": {
                    "metadata": {"labels": dict(self._labels), "annotations": annotations},
                    "spec": self._pod(items),
                },
                "volumeClaimTemplates": [
                    {
                        "metadata": {"name": "workspace"},
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "resources": {"requests": {"storage": "10Gi"}},
                        },
                    }
                ],
            },
        }

    def _pod(self, items: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _GRACE,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _UID,
                "runAsGroup": _UID,
                "fsGroup": _UID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container()],
            "volumes": [
                {"name": "startup", "secret": {"secretName": f"{self._name}-startup", "defaultMode": 0o440}},
                {"name": "local", "configMap": {"name": f"{self._name}-local", "items": items}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
        }

    def _container(self) -> dict[str, Any]:
        server = self._kit.kind == "server"
        container: dict[str, Any] = {
            "name": self._kit.kind,
            "image": self._image,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "resources": {
                "requests": {"cpu": "500m" if server else "1", "memory": "512Mi" if server else "1Gi"},
            },
            "volumeMounts": [
                {"name": "workspace", "mountPath": PLACE},
                {"name": "startup", "mountPath": f"{PLACE}/startup", "readOnly": True},
                {"name": "local", "mountPath": f"{PLACE}/local", "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in the container
            ],
            "readinessProbe": _probe(period=15, failures=2),
        }
        if server:
            # A client without a server waits for it, and must not be restarted for that: only servers have these.
            container["startupProbe"] = _probe(period=5, failures=24)
            container["livenessProbe"] = _probe(period=30, failures=3)
            container["ports"] = [{"name": name, "containerPort": port} for name, port in self._ports().items()]
        return container

    def _ports(self) -> dict[str, int]:
        ports = {"sites": self._kit.server_address()[1], "users": _admin_port(self._kit)}
        return ports if ports["users"] != ports["sites"] else {"sites": ports["sites"]}


def _probe(*, period: int, failures: int) -> dict[str, Any]:
    return {
        "exec": {"command": list(_PROBE)},
        "periodSeconds": period,
        "timeoutSeconds": 15,
        "failureThreshold": failures,
    }


def _local(kit: Kit) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the files of the folder ``local``, and where each belongs: a ConfigMap has no folders."""
    contents: dict[str, str] = {}
    items = []
    for path in sorted(kit.local.rglob("*")):
        if not path.is_file() or path.name.startswith(".") or path.suffix == ".sample":
            continue
        place = path.relative_to(kit.local).as_posix()
        key = re.sub(r"[^-._a-zA-Z0-9]", "_", place)
        while key in contents:
            key += "_"
        try:
            contents[key] = path.read_text()
        except UnicodeDecodeError as error:
            raise DeploymentError(str(kit.folder), [f"{Path('local') / place} is not text: {error}"]) from error
        items.append({"key": key, "path": place})
    if sum(map(len, contents.values())) > _LARGEST:
        raise DeploymentError(str(kit.folder), ["the files in local are larger than the 1 MiB of a ConfigMap"])
    return contents, items
