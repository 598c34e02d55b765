"""Writes a federation as ``federation.dfm.yaml``: lists everything that a file cannot express."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dfm_async.errors import FederationError, FileProblem
from dfm_async.federation.bindings import Binding, Const, ExposedParameter, FromParam, FromProvider, FromSecrets
from dfm_async.federation.files.operations import declared
from dfm_async.federation.files.reading import FORMAT, VERSION
from dfm_async.federation.files.schemas import INPUTS
from dfm_async.federation.operation import Adapter, CodeKind, Operation
from dfm_async.federation.site import FederatedSites, Site
from dfm_async.model.call_limits import bytes_text
from dfm_async.model.policies import Cost, RetryPolicy
from dfm_async.model.pool_size import IDLE_AFTER
from dfm_async.model.resources import CacheConfig, ClassPath, VaultConfig

_THREADS: Final = 8


def write_federation(federation: FederatedSites) -> str:
    """Return the text of the file. A FederationError lists everything that cannot be written to one."""
    writer = _FederationWriter(federation)
    data = writer.data()
    if writer.problems:
        raise FederationError(federation.name, writer.problems)
    return _dumped(data)


def _dumped(data: dict[str, Any]) -> str:
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # the faster one, where it is
        def ignore_aliases(self, _data: Any) -> bool:
            return True

    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


class _FederationWriter:
    def __init__(self, federation: FederatedSites) -> None:
        self._federation = federation
        self._schemas: dict[str, Any] = dict(federation.models.declared)
        self.problems: list[FileProblem] = []

    def _problem(self, key: str, message: str) -> None:
        self.problems.append(FileProblem(self._federation.name, 0, 0, key, message))

    def data(self) -> dict[str, Any]:
        federation = self._federation
        if not federation.name.isidentifier():
            self._problem("info.code-package", f"the federation's name must be an identifier, not {federation.name!r}")
        if not VERSION.fullmatch(federation.api_version):
            self._problem(
                "info.api-version", f"it must be three numbers, such as 0.1.0, not {federation.api_version!r}"
            )
        info: dict[str, Any] = {"api-version": federation.api_version, "code-package": federation.name}
        if federation.description:
            info["description"] = federation.description
        info.update(self._plain("info", federation.info))
        operations = {name: self._operation(found) for name, found in federation.operations.items()}
        sites = {name: self._site(site) for name, site in federation.sites.items()}
        parts = {
            "provision": self._plain("provision", federation.provision),
            "schemas": self._plain("schemas", self._schemas),
            "operations": operations,
            "sites": sites,
        }
        return {"dfm": FORMAT, "info": info, **_given(parts)}

    def _plain(self, key: str, value: Any) -> Any:
        """Return the value, if a file can hold it."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            if value.isprintable() or _encodes(value):
                return str(value)
            self._problem(key, f"{value!r} cannot be encoded as UTF-8")
            return ""
        if isinstance(value, (list, tuple)):
            return [self._plain(f"{key}[{index}]", part) for index, part in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {self._plain(key, name): self._plain(f"{key}.{name}", part) for name, part in value.items()}
        self._problem(key, f"{type(value).__name__} objects cannot be written; text, numbers, lists and dicts can")
        return None

    # operations

    def _operation(self, operation: Operation[..., Any]) -> dict[str, Any]:
        key = f"operations[{operation.name!r}]"
        found = operation.declaration
        if found is None:
            found = declared(operation, self._schemas, lambda message: self._problem(key, message))
        parameters = {
            name: {
                part.replace("_", "-") if part in INPUTS else part: self._plain(f"{key}.{name}.{part}", about)
                for part, about in schema.items()
            }
            for name, schema in found.parameters.items()
        }
        return _given(
            {
                "description": found.description,
                "parameters": parameters,
                "required": list(found.required),
                "returns": found.returns,
            }
        )

    # sites

    def _site(self, site: Site) -> dict[str, Any]:
        key = f"sites.{site.name}"
        interfaces: dict[str | None, dict[str, Any]] = {None: {}}
        for (name, provider), adapter in site.adapters.items():
            where = f"{key}.{provider}" if provider else key
            interfaces.setdefault(provider, {})[f"#/operations/{name}"] = self._adapter(f"{where}[{name!r}]", adapter)
        providers = {
            name: _given(
                {
                    "info": self._plain(f"{key}.{name}.info", about.info),
                    "impl": self._class(f"{key}.{name}.impl", about.impl, {}),
                    "interface": interfaces.pop(name, {}),
                }
            )
            for name, about in site.providers.items()
        }
        own = interfaces.pop(None)
        for provider, interface in interfaces.items():  # those that only their adapters name
            providers[str(provider)] = {"interface": interface}
        costs = {to: _given(msgspec.to_builtins(cost)) for to, cost in site.send_cost.items()}
        # By default a site of a file has a cache on disk: that there is none must be written.
        cache = {} if site.cache == CacheConfig() else {"cache_config": self._cache(f"{key}.cache_config", site.cache)}
        return cache | _given(
            {
                "info": self._plain(f"{key}.info", site.info),
                "impl": self._class(f"{key}.impl", site.impl, {}),
                "secrets_vault": self._vault(f"{key}.secrets_vault", site.vault),
                "send_cost": costs,
                "workers": list(site.workers) if isinstance(site.workers, tuple) else site.workers,
                "idle_after": None if site.idle_after == IDLE_AFTER else site.idle_after,
                "threads": None if site.threads == _THREADS else site.threads,
                "gpus": site.capacity.gpus or None,
                "memory": None if site.capacity.memory is None else bytes_text(site.capacity.memory),
                "interface": own,
                "providers": providers,
            }
        )

    def _cache(self, key: str, cache: CacheConfig | None) -> Any:
        if cache is None:
            return None
        default = msgspec.to_builtins(CacheConfig())
        found = self._plain(key, msgspec.to_builtins(cache))
        return {name: part for name, part in found.items() if part != default[name]}

    def _vault(self, key: str, vault: Any) -> Any:
        if not isinstance(vault, VaultConfig):
            self._problem(
                key, f"the vault is an object of {type(vault).__name__}; only VaultConfig(...) can be written"
            )
            return None
        return _given({"path": vault.path, "args": self._plain(key, vault.args)})

    def _class(self, key: str, code: Any, args: Mapping[str, Any]) -> Any:
        if code is None:
            return None
        if isinstance(code, ClassPath):
            path, args = code.path, {**code.args, **args}
        elif isinstance(code, type) and _importable(code):
            path = f"{code.__module__}.{code.__qualname__}"
        else:
            what = f"{_named(code)} is not a class"
            if isinstance(code, type):
                what = "the class is not at the top of a module"
            self._problem(key, f"{what}: a file names classes, with a body, by their modules and names")
            return None
        return {"path": path, "args": self._plain(f"{key}.args", args)} if args else path

    def _adapter(self, key: str, adapter: Adapter) -> dict[str, Any]:
        if adapter.external:
            self._problem(key, "an external program cannot be written; a class with a body can")
            return {}
        found: dict[str, Any] = {"adapter": self._class(key, adapter.code, adapter.args)}
        awaited = adapter.is_async
        if awaited is None:
            awaited = adapter.kind is CodeKind.ASYNC
        if adapter.bindings is None:
            args: Any = "from-operation"
        else:
            args = {name: self._binding(f"{key}.args.{name}", binding) for name, binding in adapter.bindings.items()}
        found |= _given(
            {
                "description": adapter.description,
                "returns": adapter.returns,
                "compute_cost": _cost(adapter.cost),
                "retry": _retry(adapter.retry),
                "deadline": adapter.deadline,
                **({} if adapter.limits is None else adapter.limits.declared),
            }
        )
        if not awaited:
            found["is-async"] = False
        if adapter.in_process:
            found["in-process"] = True
        return found | {"args": args}

    def _binding(self, key: str, binding: Binding) -> dict[str, Any]:
        found: dict[str, Any]
        if isinstance(binding, FromParam):
            return {"from-param": binding.param, **_given({"doc": binding.doc})}
        if isinstance(binding, Const):
            found = {"const": self._plain(key, binding.value)}
        elif isinstance(binding, FromSecrets):
            found = {"from-secrets": binding.key}
        elif isinstance(binding, FromProvider):
            found = {"from-provider": f"{binding.provider}.{binding.attribute}"}
        else:
            found = {"from-site": binding.attribute}
        if binding.expose_as is not None:
            found["expose-as"] = _exposed(binding.expose_as)
        return found | _given({"doc": binding.doc})


def _given(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is there: what is empty need not be written."""
    return {name: part for name, part in parts.items() if part is not None and part not in ({}, [], "")}


def _exposed(exposed: ExposedParameter) -> dict[str, Any]:
    found = {"param": exposed.param, "type": exposed.type, **_given({"description": exposed.description})}
    return found | {name.replace("_", "-"): False for name in INPUTS if not getattr(exposed, name)}


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    if cost is None:
        return None
    return {
        "fixed_time": cost.fixed_time,
        **_given({"compute_throughput": cost.throughput}),
        "fixed_size": cost.fixed_size,
        "output_factor": cost.output_factor,
    }


def _retry(retry: RetryPolicy | None) -> dict[str, Any] | None:
    return None if retry is None else _given({**msgspec.to_builtins(retry), "on": list(retry.on)})


def _importable(code: type) -> bool:
    module = sys.modules.get(code.__module__)
    return code.__module__ != "__main__" and getattr(module, code.__qualname__, None) is code


def _named(code: Any) -> str:
    return getattr(code, "__qualname__", None) or f"an object of {type(code).__name__}"


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
