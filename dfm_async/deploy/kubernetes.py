"""Manifests that run startup kits in Kubernetes: one StatefulSet per participant. Keys come as Secrets, made apart."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from dfm_async.deploy.containers import PLACE, PROBE, UID, admin_port, check_kits, label
from dfm_async.deploy.kit import Kit
from dfm_async.errors import DeploymentError

__all__ = ["kubernetes_files"]

_LARGEST: Final = 1024 * 1024
"""How many bytes a ConfigMap or a Secret may have."""
_KEYS: Final = ("*.json", "*.crt", "*.key", "*.pem")
_GRACE: Final = 30


def kubernetes_files(name: str, kits: Sequence[Kit], image: str, namespace: str) -> dict[str, str]:
    """Manifests for the kits of a folder, by their paths, and a script that makes the Secrets from the kits.

    Args:
        name: the name of the federation.
        kits: the kits; those of users are left out.
        image: the name of the image.
        namespace: where everything goes.

    Raises:
        DeploymentError: it cannot be done, and why.
    """
    found = check_kits(name, kits)
    names = {kit.name: f"{label(name)}-{'server' if kit.kind == 'server' else label(kit.name)}" for kit in found}
    if len(set(names.values())) < len(names):
        raise DeploymentError(name, [f"names of sites are too alike for Kubernetes: {', '.join(sorted(names))}"])
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace) is None:
        raise DeploymentError(name, [f"{namespace!r} is no name of a namespace"])
    files = {}
    for kit in found:
        participant = _Participant(kit, names[kit.name], label(name), image, namespace)
        files[f"{names[kit.name]}.yaml"] = _HEAD + yaml.safe_dump_all(participant.manifests(), sort_keys=False)
    files["secrets.sh"] = _secrets(found, names, namespace)
    return files


_HEAD: Final = """\
# Written by 'dfm-async flare deploy'. The Secret with the keys is not in here: secrets.sh makes it from the kit.
"""


def _secrets(kits: Sequence[Kit], names: dict[str, str], namespace: str) -> str:
    lines = [
        "#!/bin/sh",
        "# Makes the Secrets from the startup kits. The keys go from the kit to the cluster, and nowhere else.",
        "# Run it where the kits are: sh secrets.sh KITS",
        "set -eu",
        "KITS=${1:?name the folder of the kits}",
    ]
    for kit in kits:
        files = sorted(path.name for pattern in _KEYS for path in kit.startup.glob(pattern))
        sources = " ".join(f'--from-file="$KITS"/{shlex.quote(f"{kit.folder.name}/startup/{file}")}' for file in files)
        make = f"kubectl create secret generic {names[kit.name]}-startup --namespace {namespace} {sources}"
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
        """Everything that it consists of, but for its Secret."""
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
        host, port = self._kit.server_address()
        first, _, rest = host.partition(".")
        inside = not rest or rest.startswith(f"{self._namespace}.svc") or rest == self._namespace
        ports = [{"name": "sites", "port": port, "targetPort": "sites"}]
        if admin_port(self._kit) != port:
            ports.append({"name": "users", "port": admin_port(self._kit), "targetPort": "users"})
        # Inside the cluster, the name that stands in all kits is that of the service. Another one is DNS's business.
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
                "runAsUser": UID,
                "runAsGroup": UID,
                "fsGroup": UID,
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
            container["ports"] = self._ports()
        return container

    def _ports(self) -> list[dict[str, Any]]:
        port, admin = self._kit.server_address()[1], admin_port(self._kit)
        ports = [{"name": "sites", "containerPort": port}]
        return [*ports, {"name": "users", "containerPort": admin}] if admin != port else ports


def _probe(*, period: int, failures: int) -> dict[str, Any]:
    return {
        "exec": {"command": list(PROBE)},
        "periodSeconds": period,
        "timeoutSeconds": 15,
        "failureThreshold": failures,
    }


def _local(kit: Kit) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The files of the folder ``local``, and where each belongs: a ConfigMap has no folders."""
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
            raise DeploymentError(str(kit.folder), [f"{Path('local') / place} is no text: {error}"]) from error
        items.append({"key": key, "path": place})
    if sum(map(len, contents.values())) > _LARGEST:
        raise DeploymentError(str(kit.folder), ["the files in local are larger than the 1 MiB of a ConfigMap"])
    return contents, items
