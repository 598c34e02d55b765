"""Reads ``federation.dfm.yaml``: everything that is wrong with it is found at once, and nothing is imported."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from dfm_async.errors import FederationError
from dfm_async.federation.federation import Federation
from dfm_async.federation.files.adapters import AdapterFields, class_path, read_adapter
from dfm_async.federation.files.documents import REF, Documents
from dfm_async.federation.files.operations import read_operation, signature_of
from dfm_async.federation.files.schemas import SchemaReader, is_path
from dfm_async.federation.files.values import TooMuch, Value, one_of
from dfm_async.federation.operation import Operation
from dfm_async.federation.schemas import REF_START
from dfm_async.federation.site import Site
from dfm_async.model.resources import CacheConfig, SendCost, VaultConfig, allowed, refusal

__all__ = ["FORMAT", "VERSION", "read_federation"]

_KEYS: Final = ("dfm", "info", "provision", "schemas", "operations", "sites")
_SITE_KEYS: Final = (
    "info",
    "impl",
    "cache_config",
    "secrets_vault",
    "send_cost",
    "interface",
    "providers",
    "workers",
    "threads",
)
_PROVIDER_KEYS: Final = ("info", "impl", "interface")
_CACHE_KEYS: Final = ("protocol", "storage_options", "base_path", "max_bytes", "max_age")
_FILE_VAULT: Final = "file"
_VAULTS: Final = ("environment", _FILE_VAULT, "keyring")
_OUR_VAULTS: Final = "dfm_async.site.vaults"
_FILE_SYSTEMS: Final = "fsspec"
"""What the caller of ``from_yaml(packages=...)`` names to let a file choose a vault, or a directory for the cache."""
FORMAT: Final = "1.0.0"
VERSION: Final = re.compile(r"\d{1,9}\.\d{1,9}\.\d{1,9}", re.ASCII)
_OPERATION: Final = "#/operations/"
_APPLICATION: Final = "home"
"""The application's site as sessions call it by default: sending to it costs, too, but no file declares it."""


def read_federation(
    path: str | os.PathLike[str], *, packages: tuple[str, ...] | None = None, compat: bool = False
) -> Federation:
    """Reads a federation from its file.

    Raises:
        FederationError: something is wrong with it; lists everything.
    """
    found = None
    with _uncollected():
        documents = Documents(path, confined=packages is not None)
        if documents.root is not None:
            value = Value(documents.root.root, documents.root)
            try:
                found = _Reader(documents, packages, compat).read(value)
            except TooMuch as error:
                error.at.problem("what the files refer to is, taken together, larger than allowed")
    documents.report_strays()
    problems = documents.ledger.problems
    if problems or found is None:
        raise FederationError(os.fspath(path), sorted(problems, key=lambda p: (p.file, p.line, p.column)))
    found.files = tuple(documents.files)
    return found


def _only_names(name: str, schemas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tells whether a schema is a name for another that is a name again, and so on, without end."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        ref = schemas.get(name, {}).get(REF)
        if ref is None:
            return False
        name = ref.removeprefix(REF_START)
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Spares the garbage collector: all that is made stays, and looking for garbage takes a third of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Reader:
    def __init__(self, documents: Documents, packages: tuple[str, ...] | None, compat: bool) -> None:
        self._documents = documents
        self._packages = packages
        self._compat = compat
        self._adapters: dict[tuple[int, str | None, tuple[str, ...]], AdapterFields | None] = {}

    def read(self, value: Value) -> Federation | None:
        if not isinstance(value.node.value, dict):
            what = "is empty" if value.missing else f"holds {value.kind}"
            value.problem(f"the file {what}; it must be a mapping with the keys {', '.join(_KEYS)}")
            return None
        fields = value.fields("a federation", _KEYS)
        if "dfm" not in fields:
            value.problem(f"'dfm' is missing: the version of the format, {FORMAT}")
        elif fields["dfm"].node.value != FORMAT:
            fields["dfm"].problem(f"dfm must be {FORMAT}, the version of the format, not {fields['dfm'].kind}")
        federation = self._info(value, fields.get("info"))
        if "provision" in fields:
            federation.provision = fields["provision"].plain_mapping("provision")
        reader = self._schemas(fields.get("schemas"), federation)
        if "operations" in fields:
            self._operations(fields["operations"], federation, reader)
        if "sites" in fields:
            self._sites(fields["sites"], federation)
        return federation

    def _info(self, whole: Value, info: Value | None) -> Federation:
        if info is None or info.missing:
            (info or whole).problem("'info' is missing: it holds api-version and code-package")
            return Federation("", packages=self._packages, compat=self._compat)
        given: dict[str, Value] = {}
        others: dict[str, Any] = {}
        for name, part in info.mapping("info"):
            plain = name.replace("-", "_")
            if plain in given:
                info.problem_at_key(name, f"this stands here twice, also as {given[plain].key!r}")
            elif plain in ("api_version", "code_package", "description"):
                given[plain] = part
            else:
                others[name] = part.plain()
        name, version = "", ""
        if "code_package" in given:
            name = given["code_package"].identifier("code-package") or ""
        elif isinstance(info.node.value, dict):
            info.problem("'code-package' is missing: the package of the federation's code, and its name")
        if "api_version" in given:
            version = self._version(given["api_version"])
        elif isinstance(info.node.value, dict):
            info.problem("'api-version' is missing: the version of the operations, such as 0.1.0")
        about = given.get("description")
        description = "" if about is None or about.missing else about.text("description") or ""
        federation = Federation(
            name, api_version=version, description=description, packages=self._packages, compat=self._compat
        )
        federation.info = others
        return federation

    def _version(self, value: Value) -> str:
        text = value.node.value
        if not isinstance(text, str) or not VERSION.fullmatch(text):
            value.problem(f"api-version must be three numbers, such as 0.1.0, not {value.kind}")
            return ""
        return text

    # schemas and operations

    def _schemas(self, value: Value | None, federation: Federation) -> SchemaReader:
        named: dict[str, Value] = {}
        names: dict[int, str] = {}
        for name, part in self._documents.entries(value, "schemas") if value is not None else ():
            if not is_path(name):
                part.problem(f"a schema's name must be identifiers with dots between them, not {name!r}")
                continue
            named[name] = part
            names[id(part.node)] = name
        for name, part in named.items():
            found = self._documents.referred(part) if part.only(REF) else None
            if found is not None and names.setdefault(id(found.node), name) == name:
                named[name] = found  # it has no other name, and may refer to itself
        reader = SchemaReader(self._documents, names)
        for name, part in named.items():
            federation.models.declared[name] = reader.schema(part)
        for name, part in named.items():
            if _only_names(name, federation.models.declared):
                part.problem("this reference leads back to itself")
        return reader

    def _operations(self, value: Value, federation: Federation, schemas: SchemaReader) -> None:
        for name, part in self._documents.entries(value, "operations"):
            found = self._documents.follow(part)
            if not is_path(name):
                part.problem(f"an operation's name must be identifiers with dots between them, not {name!r}")
            elif found is not None:
                declaration = read_operation(found, self._documents, schemas)
                federation.declare(name, signature_of(declaration, federation.models), declaration=declaration)

    # sites

    def _sites(self, value: Value, federation: Federation) -> None:
        costs: list[tuple[Site, Value]] = []
        for full, part in self._documents.entries(value, "sites"):
            found = self._documents.follow(part)
            name, at, domain = full.partition("@")
            if not name.isidentifier() or (at and not domain):
                part.problem(f"a site's name must be an identifier, or identifier@domain, not {full!r}")
            elif name in federation.sites:
                part.problem(f"there is a site {name!r} already; what stands behind @ does not count")
            elif found is not None:
                site, cost = self._site(found, name, federation)
                if cost is not None:
                    costs.append((site, cost))
        for site, cost in costs:  # only now all sites are known
            site.send_cost = self._send_cost(cost, federation)

    def _site(self, value: Value, name: str, federation: Federation) -> tuple[Site, Value | None]:
        fields = value.fields("a site", _SITE_KEYS)
        workers, threads = (
            fields[key].number(key, positive=True, whole=True) if key in fields and not fields[key].missing else None
            for key in ("workers", "threads")
        )
        site = federation.site(name, workers=None if workers is None else int(workers))
        if threads is not None:
            site.threads = int(threads)
        if "info" in fields:
            site.info = fields["info"].plain_mapping("info")
        if "impl" in fields and not fields["impl"].missing:
            site.impl = class_path(fields["impl"], "impl", self._packages)
        cache = fields.get("cache_config")  # as in DFM, a site has files without saying so
        site.cache = CacheConfig() if cache is None else None if cache.missing else self._cache(cache)
        if "secrets_vault" in fields and not fields["secrets_vault"].missing:
            site.vault = self._vault(fields["secrets_vault"])
        interfaces: list[tuple[str | None, Value]] = []
        if "providers" in fields:
            interfaces = self._providers(fields["providers"], site)
        if "interface" in fields:
            self._interface(fields["interface"], site, None)
        for provider, interface in interfaces:
            self._interface(interface, site, provider)
        return site, fields.get("send_cost")

    def _providers(self, value: Value, site: Site) -> list[tuple[str | None, Value]]:
        interfaces: list[tuple[str | None, Value]] = []
        for name, part in self._documents.entries(value, "providers"):
            found = self._documents.follow(part)
            if not name.isidentifier():
                part.problem(f"a provider's name must be an identifier, not {name!r}")
            elif found is not None:
                fields = found.fields("a provider", _PROVIDER_KEYS)
                impl = fields.get("impl")
                site.provider(
                    name,
                    None if impl is None or impl.missing else class_path(impl, "impl", self._packages),
                    info=fields["info"].plain_mapping("info") if "info" in fields else None,
                )
                if "interface" in fields:
                    interfaces.append((name, fields["interface"]))
        return interfaces

    def _interface(self, value: Value, site: Site, provider: str | None) -> None:
        known = site.federation.operations
        for key, part in self._documents.entries(value, "an interface"):
            name = key.removeprefix(_OPERATION).replace("~1", "/").replace("~0", "~")
            found = self._documents.follow(part)
            operation = known.get(name) if key.startswith(_OPERATION) else None
            if operation is None:
                if not key.startswith(_OPERATION):
                    hint = f"; write '{_OPERATION}{key}'" if key in known else ""
                    part.problem(f"an interface has keys such as '{_OPERATION}array.Create', not {key!r}{hint}")
                else:
                    part.problem(f"there is no operation {name!r}; {one_of(name, list(known))}")
            if found is None:
                continue
            fields = self._adapter(found, operation, tuple(site.providers))
            if fields is not None and operation is not None:
                site.adapt(
                    name,
                    fields.code,
                    bind=fields.bind,
                    is_async=fields.is_async,
                    description=fields.description,
                    returns=fields.returns,
                    provider=provider,
                    cost=fields.cost,
                    retry=fields.retry,
                    deadline=fields.deadline,
                    in_process=fields.in_process,
                )

    def _adapter(
        self, value: Value, operation: Operation[..., Any] | None, providers: tuple[str, ...]
    ) -> AdapterFields | None:
        """Reads an adapter, once for all the sites that refer to it."""
        key = (id(value.node), None if operation is None else operation.name, providers)
        if key not in self._adapters:
            parameters = operation.signature.parameters.parameters if operation is not None else ()
            self._adapters[key] = read_adapter(value, parameters, providers, self._packages)
        return self._adapters[key]

    def _cache(self, value: Value) -> CacheConfig:
        fields = value.fields("cache_config", _CACHE_KEYS)
        given: dict[str, Any] = {}
        for name, part in fields.items():
            if part.missing:
                continue
            if name == "storage_options":
                given[name] = part.plain_mapping(name)
            elif name in ("max_bytes", "max_age"):
                given[name] = part.number(name, positive=True, whole=name == "max_bytes")
            else:
                given[name] = part.text(name)
        try:
            config = CacheConfig(**{name: found for name, found in given.items() if found is not None})
        except ValueError as error:
            value.problem(str(error))
            return CacheConfig()
        own = config.base_path is None and config.protocol in ("file", "local")
        if not own and config.protocol != "memory" and not allowed(_FILE_SYSTEMS, self._packages):
            value.problem(
                f"a cache in a directory of its own is not allowed: add {_FILE_SYSTEMS!r} to packages=, or leave out "
                "protocol and base_path"
            )
        return config

    def _vault(self, value: Value) -> VaultConfig:
        fields = value.fields("secrets_vault", ("path", "args"))
        args = fields["args"].plain_mapping("args") if "args" in fields else {}
        path = None
        if "path" in fields and not fields["path"].missing:
            path = fields["path"].text("path")
            if path is not None and path not in _VAULTS:
                wrong = refusal(path, self._packages, in_file=True)
                if wrong is not None:
                    known = ", ".join(_VAULTS)
                    fields["path"].problem(f"{path!r} {wrong}. A vault is {known}, or a class with secret_for_key")
        by_default = path in (None, "environment") and not args
        if path in (None, *_VAULTS) and not by_default and not allowed(_OUR_VAULTS, self._packages):
            value.problem(f"a vault with arguments is not allowed: add {_OUR_VAULTS!r} to packages=, or leave it out")
        if path == _FILE_VAULT and isinstance(args.get("path"), str):
            args["path"] = _beside(fields["args"], args["path"])
        return VaultConfig(path=path, args=args)

    def _send_cost(self, value: Value, federation: Federation) -> dict[str, SendCost]:
        found: dict[str, SendCost] = {}
        for full, part in value.mapping("send_cost"):
            name = full.partition("@")[0]
            if name not in federation.sites and name != _APPLICATION:
                value.problem_at_key(full, f"there is no site {name!r}; {one_of(name, list(federation.sites))}")
                continue
            fields = part.fields("a send cost", ("fixed_time", "bandwidth"))
            fixed = fields["fixed_time"].number("fixed_time") if "fixed_time" in fields else 0.0
            bandwidth = None
            if "bandwidth" in fields and not fields["bandwidth"].missing:
                bandwidth = fields["bandwidth"].number("bandwidth", positive=True)
            found[name] = SendCost(fixed_time=fixed or 0.0, bandwidth=bandwidth)
        return found


def _beside(value: Value, path: str) -> str:
    """A path that begins at the folder of the file that holds it, as all of them do: workers may run elsewhere."""
    return path if path.startswith("~") else os.path.abspath(os.path.join(value.document.folder, path))
