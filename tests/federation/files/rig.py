"""Small files, and what federations are, in plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, Operation, Site
from dfm_async.errors import FederationError
from dfm_async.federation import ClassPath

HEAD = """\
dfm: 1.0.0
info: {api-version: 0.1.0, code-package: small}
"""


def written(folder: Path, text: str, *, head: str = HEAD, **others: str) -> Path:
    """Writes a file, and others beside it: ``parts_more`` is ``parts/more.yaml``."""
    path = folder / "federation.dfm.yaml"
    path.write_text(head + textwrap.dedent(text))
    for name, content in others.items():
        other = folder / (name.replace("_", "/") + ".yaml")
        other.parent.mkdir(exist_ok=True)
        other.write_text(textwrap.dedent(content))
    return path


def loaded(folder: Path, text: str, **others: str) -> Federation:
    return Federation.from_yaml(written(folder, text, **others))


def problems(folder: Path, text: str, *, head: str = HEAD, **others: str) -> list[str]:
    """What is wrong: line, column and key, and the message, of each."""
    path = written(folder, text, head=head, **others)
    with pytest.raises(FederationError) as caught:
        Federation.from_yaml(path)
    found = []
    for problem in caught.value.problems:
        file = Path(problem.file)
        name = "" if file == path else f"{file.relative_to(folder)}:"
        found.append(f"{name}{problem.line}:{problem.column} {problem.key}: {problem.message}")
    return found


def described(federation: Federation) -> dict[str, Any]:
    """Everything that a federation is, as plain data: two with the same are the same."""
    return {
        "name": federation.name,
        "api_version": federation.api_version,
        "description": federation.description,
        "info": federation.info,
        "provision": federation.provision,
        "schemas": federation.models.declared,
        "operations": {name: _operation(found) for name, found in federation.operations.items()},
        "sites": {name: _site(site) for name, site in federation.sites.items()},
    }


def _operation(operation: Operation[..., Any]) -> dict[str, Any]:
    signature = operation.signature
    return {
        "parameters": [
            (found.name, found.kind.name, repr(found.default)) for found in signature.parameters.parameters.values()
        ],
        "types": {name: repr(found) for name, found in signature.types.items()},
        "returns": repr(signature.returns),
        "exposed": msgspec.to_builtins(operation.exposed),
        "documentation": operation.__doc__,
    }


def _site(site: Site) -> dict[str, Any]:
    return {
        "impl": _class(site.impl),
        "info": site.info,
        "cache": site.cache,
        "vault": site.vault,
        "send_cost": site.send_cost,
        "workers": site.workers,
        "threads": site.threads,
        "capacity": site.capacity,
        "idle_after": site.idle_after,
        "providers": {name: (_class(found.impl), found.info) for name, found in site.providers.items()},
        "adapters": {
            f"{name} {provider}": {
                "code": _class(found.code, found.args),
                "bindings": None if found.bindings is None else dict(found.bindings),
                "awaited": found.is_async,
                "options": (found.cost, found.retry, found.deadline, found.in_process, found.limits),
                "about": (found.description, found.returns),
            }
            for (name, provider), found in site.adapters.items()
        },
    }


def _class(code: Any, args: Mapping[str, Any] | None = None) -> Any:
    if isinstance(code, ClassPath):
        return code.path, {**code.args, **(args or {})}
    return None if code is None else (f"{code.__module__}.{code.__qualname__}", dict(args or {}))


def parameters_of(federation: Federation, operation: str) -> Mapping[str, Any]:
    """Return the schemas of the parameters that an operation declares."""
    declaration = federation.operations[operation].declaration
    assert declaration is not None
    return declaration.parameters
